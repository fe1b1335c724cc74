"""Ratios of times that were taken in the same rounds, with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from scipy.stats import binom

LEVEL = 0.95
Side = Literal["below", "above", "undecided"]


@dataclass(frozen=True)
class Ratio:
    """Holds the median of paired ratios and the ends of its interval; None = too few rounds."""

    median: float
    low: float | None
    high: float | None
    rounds: int

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float], level: float = LEVEL) -> "Ratio":
        """Divides times of the same rounds: a slow spell of the machine slows both."""
        paired = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, high = median_interval(paired, level) or (None, None)
        return cls(median(paired), low, high, len(paired))

    @classmethod
    def exact(cls, value: float) -> "Ratio":
        """Wraps a ratio that is counted, not timed."""
        return cls(value, value, value, 1)

    def side(self, threshold: float = 1.0) -> Side:
        """Says on which side of a threshold the whole interval lies."""
        if self.low is None or self.high is None:
            return "undecided"
        if self.high < threshold:
            return "below"
        return "above" if self.low > threshold else "undecided"

    def __str__(self) -> str:
        ends = ""
        if self.low is not None and self.high is not None and self.low < self.high:
            ends = f" ({_number(self.low)} to {_number(self.high)})"
        return _number(self.median) + ends


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Computes the interval of the median by order statistics (the sign test), for any law.

    Its ends are the k-th smallest and the k-th largest of n values, k the largest with
    2 P(B < k) <= 1 - level for B binomial (n, 1/2). None if there are too few values for k = 1:
    below 6 at 95%, below 8 at 99%.
    """
    k, ordered = int(binom.ppf((1 - level) / 2, len(values), 0.5)), sorted(values)
    return (ordered[k - 1], ordered[-k]) if k else None
