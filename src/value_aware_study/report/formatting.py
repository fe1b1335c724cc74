"""Numbers as text, the way tables, captions and the terminal have them."""

from collections.abc import Callable
from typing import Any

import pandas as pd

DASH = "–"
# From here on a number is written with a power of ten.
LARGE = 1e7


def missing(value: Any) -> bool:
    return value is None or bool(pd.isna(value))


def number(value: Any, digits: int = 1) -> str:
    """A number with thousands separators and a fixed number of decimals; a dash when missing."""
    if missing(value):
        return DASH
    return f"{float(value):,.{digits}f}" if abs(value) < LARGE else f"{float(value):.2e}"


def whole(value: Any) -> str:
    return number(value, 0)


def signed(value: Any, digits: int = 1) -> str:
    if missing(value):
        return DASH
    if not round(value, digits):
        return f"{0:.{digits}f}"
    return f"{'+' if value > 0 else '−'}{number(abs(value), digits)}"


def interval(low: Any, high: Any, digits: int = 1, text: Callable[..., str] = number) -> str:
    """ "1.0 to 2.5"; `text` writes its ends: `number` or `signed`."""
    if missing(low) or missing(high):
        return DASH
    return f"{text(low, digits)} to {text(high, digits)}"


def ratio(value: Any, base: Any) -> float | None:
    return None if missing(value) or missing(base) or not base else float(value) / float(base)


def times(value: Any) -> str:
    """A ratio: two decimals below ten, none from a hundred on."""
    if missing(value):
        return DASH
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"× {number(value, digits)}"


def tokens_count(value: Any) -> str:
    """A count of tokens as the paper prints it: 1.53B, 1.02M, 482K."""
    if missing(value):
        return DASH
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(int(value))


def setting_value(value: Any) -> str:
    """A hyperparameter as text; flags as y and n, the way Table 4 has them."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return str(value)
