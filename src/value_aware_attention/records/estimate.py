"""A number with its 95% interval over units of text, and the formats of numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

CONFIDENCE = 0.95
Array = NDArray[np.float64]
DASH = "–"
NO_COUNT = "none"
"""Stands for a count that no number of keys reaches, or a share of outputs that are all 0"""
LARGE = 1e7
"""Smallest number written with a power of ten"""
TOO_WIDE = 1e5
"""Smallest number whose digits are too wide for a table in a terminal"""


def number(value: float | None, digits: int = 1) -> str:
    """Writes a number with thousands separators and fixed decimals; a dash if it is missing."""
    if not _is_known(value):
        return DASH
    return f"{float(value):,.{digits}f}" if abs(value) < LARGE else f"{float(value):.2e}"


def whole(value: float | None) -> str:
    """Writes a number without decimals."""
    return number(value, 0)


def signed(value: float | None, digits: int = 1) -> str:
    """Formats a number with its sign; zero gets none."""
    if not _is_known(value):
        return DASH
    if not round(value, digits):
        return f"{0:.{digits}f}"
    return f"{'+' if value > 0 else '−'}{number(abs(value), digits)}"


def short(value: float | None, digits: int = 3) -> str:
    """Writes a number to its significant digits: "0.0123"."""
    return f"{value:.{digits}g}" if _is_known(value) else DASH


def rounded(value: float | None, digits: int = 3) -> str:
    """Writes a number to its significant digits, with separators: "0.0123", "1,230"."""
    if not _is_known(value):
        return DASH
    return f"{float(f'{float(value):.{digits}g}'):,.10g}".replace("-", "−")


def narrow(value: float | None, digits: int = 1) -> str:
    """Writes a number as `number` does; from `TOO_WIDE` on, with two digits and a power of ten."""
    return short(value, 2) if _is_known(value) and value >= TOO_WIDE else number(value, digits)


def _is_known(value: float | None) -> TypeGuard[float]:
    """Returns whether this is a number: not None, NaN or a missing value of pandas."""
    return isinstance(value, Real) and value == value


Writer = Callable[[float | None, int], str]
"""(number, digits) -> text: one of the functions above"""


def interval(low: float | None, high: float | None, digits: int = 1, text: Writer = number) -> str:
    """Writes "1.0 to 2.5"; `text` writes its ends: `number`, `signed` or `short`."""
    if not (_is_known(low) and _is_known(high)):
        return DASH
    return f"{text(low, digits)} to {text(high, digits)}"


def with_interval(
    value: float | None,
    low: float | None,
    high: float | None,
    digits: int = 1,
    text: Writer = number,
    *,
    brackets: bool = False,
) -> str:
    """Writes "69 (65 to 76)", or "69 [65, 76]"; the value alone if its interval is unknown."""
    if not (_is_known(low) and _is_known(high)):
        return text(value, digits)
    form = "{} [{}, {}]" if brackets else "{} ({} to {})"
    return form.format(text(value, digits), text(low, digits), text(high, digits))


def counted(keys: int | None, low: int | None = None, high: int | None = None) -> str:
    """Writes a count of keys with its interval; "none" if there is no count."""
    return NO_COUNT if keys is None else with_interval(keys, low, high, 0)


UNITS: Mapping[str, tuple[Writer, int]] = {
    "": (short, 3),
    "perplexity": (narrow, 2),
    "error": (narrow, 1),
    "cosine": (narrow, 4),
}
"""End metric -> its format and number of digits; other numbers have three"""


def in_unit(value: float, metric: str) -> str:
    """Writes a number of an end metric: `in_unit(30.5, "perplexity")` is "30.50"."""
    text, digits = UNITS[metric]
    return text(value, digits)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95% interval over units; None if unknown, such as for one unit."""

    value: float | None
    low: float | None
    high: float | None

    def __format__(self, unit: str) -> str:
        """Formats it in a unit of `UNITS`: f"{estimate:perplexity}" is "30.50 (30.40 to 30.60)".

        A unit in brackets gives "30.50 [30.40, 30.60]".
        """
        text, digits = UNITS[unit.strip("[]")]
        return with_interval(
            self.value, self.low, self.high, digits, text, brackets=unit.startswith("[")
        )


def estimate(
    totals: Array,
    counts: Array,
    *,
    least: float = -np.inf,
    most: float = np.inf,
) -> Estimate:
    """Computes a ratio of sums and its interval, cut at `least` and `most`; None if not finite."""
    if not counts.sum() > 0:
        return Estimate(value=None, low=None, high=None)
    ends = (float(x) for x in ratio_of_sums(totals, counts))
    value, low, high = (min(max(x, least), most) if np.isfinite(x) else None for x in ends)
    return Estimate(value=value, low=low, high=high)


def mean(units: Array, most: float = np.inf) -> Estimate:
    """Averages numbers >= 0 over units, with the interval cut at `most`."""
    return estimate(units, np.ones_like(units), least=0.0, most=most)


def ratio_of_sums(totals: Array, counts: Array) -> tuple[Array, Array, Array]:
    """Computes sum(t_u) / sum(n_u) over the units u of the first axis, and its 95% interval's ends.

    Units (windows or sequences) count as independent, unlike their targets, which share a context:
    Student's t with the variance of a ratio estimator. If t_u is the difference of two methods'
    losses, this is the paired interval of their mean difference. Other axes are other ratios; they
    broadcast. The ends for a single unit are NaN, and so is 0 / 0.
    """
    units, count = len(counts), counts.sum(axis=0)
    with np.errstate(invalid="ignore"):
        ratio = totals.sum(axis=0) / count
        if units < 2:
            unknown = np.full_like(ratio, np.nan)
            return ratio, unknown, unknown
        error = np.sqrt(units / (units - 1) * ((totals - ratio * counts) ** 2).sum(axis=0)) / count
    margin = float(stdtrit(units - 1, (1 + CONFIDENCE) / 2)) * error
    return ratio, ratio - margin, ratio + margin
