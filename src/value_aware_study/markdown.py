"""Escapes text from data for Markdown, so that markup in it appears as text."""

import re
from html import escape

MARKUP = re.compile(r"([\\|`\[\]])")


def escaped(text: str) -> str:
    r"""Returns the text on one line, with entities for & < >, and a backslash before \ | ` [ ]."""
    return MARKUP.sub(r"\\\1", escape(" ".join(text.splitlines()), quote=False))
