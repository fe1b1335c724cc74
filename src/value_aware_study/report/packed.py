"""Packs a page for git."""

import gzip
from base64 import b64encode
from pathlib import Path

PACKED = """<!DOCTYPE html>
<meta charset="utf-8">
<title>Value-aware approximate attention: a published run</title>
<noscript>The page needs JavaScript; its tables and figures are beside this file.</noscript>
<script type="module">
const packed = Uint8Array.from(atob("{}"), (character) => character.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const page = await new Response(stream).text();
document.open();
document.write(page);
document.close();
</script>
"""
"""A page that unpacks itself: a quarter of its size in git."""


def pack(page: Path) -> str:
    """Returns a page that unpacks itself."""
    text = gzip.compress(page.read_bytes(), mtime=0)
    return PACKED.replace("{}", b64encode(text).decode())
