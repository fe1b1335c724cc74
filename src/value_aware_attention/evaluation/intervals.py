"""Paired 95% intervals: a method against exact attention on the same text."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["Interval", "paired_difference"]

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
    difference = totals - exact_totals
    estimate = float(difference.sum() / counts.sum())
    units = len(counts)
    if units < 2:
        return Interval(estimate, float("nan"), float("nan"))
    deviation = difference - estimate * counts
    error = np.sqrt(units / (units - 1) * (deviation**2).sum()) / counts.sum()
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, units - 1) * error)
    return Interval(estimate, estimate - margin, estimate + margin)
