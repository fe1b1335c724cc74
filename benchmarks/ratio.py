"""Ratios of times that were taken in the same rounds, with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from scipy.stats import binom

LEVEL = 0.95


@dataclass(frozen=True)
class Ratio:
    """Holds the median of paired ratios and the ends of its interval; None = too few rounds."""

    median: float
    low: float | None
    high: float | None
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float], level: float = LEVEL) -> "Ratio":
        """Takes ratios of times of the same rounds: a slow spell of the machine slows both."""
        low, high = median_interval(ratios, level) or (None, None)
        return cls(median(ratios), low, high, len(ratios))

    def within(self, low: float, high: float) -> bool | None:
        """Tells whether the ratio lies between two bounds; None if its interval contains one."""
        if self.low is None or self.high is None:
            return None
        if low < self.low and self.high < high:
            return True
        return False if self.high < low or high < self.low else None

    def __str__(self) -> str:
        if self.low is None or self.high is None or self.low == self.high:
            return _number(self.median)
        return f"{_number(self.median)} ({_number(self.low)} to {_number(self.high)})"


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
