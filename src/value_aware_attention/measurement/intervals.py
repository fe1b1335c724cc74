"""Ratios of sums over units of text, with their 95% intervals."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

__all__ = ["Estimate", "estimate", "ratio_of_sums"]

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95% interval over units; None where it is not known, as of one unit."""

    value: float | None
    low: float | None
    high: float | None


def estimate(totals: NDArray[np.float64], counts: NDArray[np.float64]) -> Estimate:
    """Computes a ratio of sums with its interval; None where it is not finite."""
    if not counts.sum() > 0:
        return Estimate(value=None, low=None, high=None)
    ends = (float(x) for x in ratio_of_sums(totals, counts))
    value, low, high = (x if np.isfinite(x) else None for x in ends)
    return Estimate(value=value, low=low, high=high)


def ratio_of_sums(
    totals: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Computes sum(t_u) / sum(n_u) over the units u of the first axis, and its 95% interval's ends.

    Units (windows or sequences) are taken as independent, not their targets, which share a context:
    Student's t with the variance of a ratio estimator. With t_u the difference of two methods'
    losses it is the paired interval of their mean difference. Other axes are other ratios; they
    broadcast. The ends of a single unit are NaN; so is 0 / 0.
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
