"""Keeps formulas in docstrings from being read as markup: <q, k> would be a tag, and vanish."""

import re
from typing import Any

from griffe import Extension, Object

CODE = re.compile(r"(`+[^`]*`+)")


class Formulas(Extension):
    """Escapes < and > in every docstring, outside of code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(map(escaped, obj.docstring.value.split("\n")))


def escaped(line: str) -> str:
    """Replaces < and > by entities, except in code: between backticks, or indented by four."""
    if line.startswith("    "):
        return line
    parts = CODE.split(line)
    return "".join(
        part if part.startswith("`") else part.replace("<", "&lt;").replace(">", "&gt;")
        for part in parts
    )
