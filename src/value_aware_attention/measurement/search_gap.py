"""Measures how far a search of optimal-v-aware-r stays from the best search, on recorded calls."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.call import Call

OFF = 1e-3
"""Relative excess of ||o - o~||^2 above which a row counts as off"""


@dataclass(frozen=True)
class SearchGap:
    """Holds how the squared errors of a search compare with those of the "best" search."""

    excess: float
    """Pooled error over that of the best search, minus 1"""
    off: float
    """Share of rows whose error is more than OFF above"""
    worst: float
    """Largest error of a row over that of the best search; rows without an error left out"""
    proved: float
    """Share of rows where the best search is proved optimal: at r = 2 nearly all"""


def search_gap(calls: Sequence[Call], r: int, search: str, rows: int) -> SearchGap:
    """Compares ||o - o~||^2 of a search with the best search, on `rows` random queries a call.

    At r = 2 and up to 512 keys the best search is the optimum; above, the best that is known.
    """
    generator = torch.Generator().manual_seed(0)
    errors, optima, proved = [], [], []
    for call in calls:
        which = torch.randperm(call.query.shape[-2], generator=generator)[:rows].sort().values
        inputs = call.take(which.to(call.query.device)).arguments()
        best = OptimalValueAware(r, "best").select(**inputs)
        errors.append(OptimalValueAware(r, search).select(**inputs).error.flatten().double())
        optima.append(best.error.flatten().double())
        proved.append(best.optimal.flatten())
    error, optimum = torch.cat(errors), torch.cat(optima)
    ratio = error[optimum > 0] / optimum[optimum > 0]
    return SearchGap(
        excess=float(error.sum() / optimum.sum()) - 1,
        off=float((ratio > 1 + OFF).sum()) / len(error),
        worst=float(ratio.max()) if len(ratio) else 1.0,
        proved=float(torch.cat(proved).double().mean()),
    )
