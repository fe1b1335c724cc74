"""Sets the formulas of docstrings as mathematics, and links the papers that they name.

Docstrings are plain text, which help() shows: ||o - o~||^2, <q, k>, sum_j alpha_ij v_j. The site
has the signs themselves and lowered indices, and no script or font that draws them. Without this
<q, k> would be read as a tag, and vanish.
"""

import re
from typing import Any

from griffe import Extension, Object

CODE = re.compile(r"(`+[^`]*`+)")
TABLE = re.compile(r"\n(?=(?:Attributes|Args):\n)")
SIGNS = (
    (r"<([^<>=]+)>", r"⟨\1⟩"),
    (r"\|\|", "‖"),
    (r"<=", "≤"),
    (r">=", "≥"),
    ("<", "&lt;"),
    (">", "&gt;"),
    (r"\b([oKQ])~", "\\1\u0303"),
    (r"\^2\b", "²"),
    (r"\^\+", "⁺"),
    (r"\balpha(?![a-z])", "α"),
    (r"\bbeta(?![a-z])", "β"),
    (r"\bkappa(?![a-z])", "κ"),
    (r"\bsigma(?![a-z])", "σ"),
    (r"\bmu(?![a-z])", "μ"),
    (r"\bPhi(?![a-z])", "Φ"),
    (r"\bSigma(?![a-z])", "Σ"),
    (r"\bsum_", "Σ_"),
    (
        r"(?<![A-Za-z0-9_])(\w\u0303?|argmax|max|min)_([A-Za-z0-9]{1,2})(?![A-Za-z0-9_])",
        r"\1<sub>\2</sub>",
    ),
    (r"‖_1\b", "‖<sub>1</sub>"),
    (r"\barXiv (\d{4}\.\d{5})\b", r"[arXiv \1](https://arxiv.org/abs/\1)"),
)


class Formulas(Extension):
    """Sets the formulas of every docstring, outside of code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text, *rows = TABLE.split(obj.docstring.value, maxsplit=1)
            lines = [
                line if line.startswith("    ") else written(line) for line in text.split("\n")
            ]
            obj.docstring.value = "\n".join([*lines, *map(written, rows)])


def written(text: str) -> str:
    """Writes the signs of a text, except in code: between backticks."""
    parts = CODE.split(text)
    return "".join(part if part.startswith("`") else _signs(part) for part in parts)


def _signs(text: str) -> str:
    for plain, sign in SIGNS:
        text = re.sub(plain, sign, text)
    return text
