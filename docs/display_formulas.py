"""Sets blocks of LaTeX, ```math, as MathML, which browsers draw without a script or a font.

GitHub draws the same blocks. Formulas within a line are written in Unicode.
"""

from typing import Any

from latex2mathml.converter import convert


def on_config(config: Any) -> None:
    """Has such blocks converted while the site is built."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": _block}]


def _block(latex: str, *_: Any, **__: Any) -> str:
    return f'<div class="math">{convert(latex, display="block")}</div>'
