"""Packs a page for git, and tells which files of a folder belong to a published run."""

import gzip
import re
from base64 import b64decode, b64encode
from pathlib import Path

from value_aware_attention.files import CHECKSUMS, listed, reading, write_checksums
from value_aware_study.paths import SUMMARY, TIMES
from value_aware_study.report.page import ENDINGS, PAGE

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


def check_published(folder: Path) -> None:
    """Raises ValueError where a folder holds a file that no publication wrote.

    One that was published before there were lists of files gets its list.
    """
    found = {path.name for path in folder.glob("*")} - {CHECKSUMS}
    if others := sorted(found - set(listed(folder) or unlisted(folder / PAGE))):
        raise ValueError(f"{folder / others[0]} is not of a published run: move it away")
    if found and not listed(folder):
        write_checksums(folder)


def unlisted(page: Path) -> set[str]:
    """Lists the names of a published run without SHA256SUMS, by its exhibits."""
    if not page.exists():
        return set()
    with reading(page, "move it away"):
        _, packed = page.read_text(encoding="utf-8").split('atob("', 1)
        text = gzip.decompress(b64decode(packed.partition('"')[0])).decode()
    stems = re.findall(r'data-exhibit="(\w+)"', text)
    names = {stem + ending for stem in stems for ending in ENDINGS}
    return {PAGE, SUMMARY, TIMES} | names
