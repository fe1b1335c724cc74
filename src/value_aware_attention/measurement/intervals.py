"""Paired 95% intervals: a method against exact attention on the same text."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

__all__ = ["Interval", "paired_difference", "ratio_of_sums"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its 95% interval."""

    estimate: float
    low: float
    high: float


def paired_difference(
    totals: NDArray[np.float64], exact_totals: NDArray[np.float64], counts: NDArray[np.float64]
) -> Interval:
    """Mean per-target difference to exact, with Student's t over units (windows or sequences).

    `totals` and `exact_totals` sum a loss over the `counts` targets of each unit. Units, not
    targets, are taken as independent, since the targets of one window share their context: the
    variance is that of a ratio estimator, sum(d_u) / sum(n_u).
    """
    estimate, low, high = ratio_of_sums(totals - exact_totals, counts)
    return Interval(float(estimate), float(low), float(high))


def ratio_of_sums(
    totals: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """sum(t_u) / sum(n_u) over the units u of the first axis, and the ends of its 95% interval.

    Other axes are other ratios; they broadcast. The ends of a single unit are NaN; so is 0 / 0.
    """
    units, count = len(counts), counts.sum(axis=0)
    with np.errstate(invalid="ignore"):
        estimate = totals.sum(axis=0) / count
        if units < 2:
            unknown = np.full_like(estimate, np.nan)
            return estimate, unknown, unknown
        deviation = totals - estimate * counts
        error = np.sqrt(units / (units - 1) * (deviation**2).sum(axis=0)) / count
    margin = float(stdtrit(units - 1, (1 + CONFIDENCE) / 2)) * error
    return estimate, estimate - margin, estimate + margin
