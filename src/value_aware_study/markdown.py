"""Text from data as text in Markdown: what would be markup there is shown as it was given."""

import re
from html import escape

__all__ = ["escaped"]

MARKUP = re.compile(r"([\\|`\[\]])")


def escaped(text: str) -> str:
    r"""The text on one line, with entities for & < >, and a backslash before \ | ` [ ]."""
    return MARKUP.sub(r"\\\1", escape(" ".join(text.splitlines()), quote=False))
