"""Measures how far a search of optimal-v-aware-r is from the best search, on recorded calls."""

from collections.abc import Sequence

import torch

from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.call import Call
from value_aware_attention.records.record import SearchGap


def search_gap(calls: Sequence[Call], r: int, search: str, rows: int) -> SearchGap:
    """Compares ||o - o~||^2 of a search with the best search, on `rows` random queries per call."""
    generator = torch.Generator().manual_seed(0)
    rows_of_calls = []
    for call in calls:
        which = torch.randperm(call.query.shape[-2], generator=generator)[:rows].sort().values
        sample = call.take(which.to(call.query.device))
        inputs = sample.arguments() | {"attn_mask": sample.visible, "is_causal": False}
        best = OptimalValueAware(r, "best").select(**inputs)
        error = OptimalValueAware(r, search).select(**inputs).error
        assert best.optimal is not None
        rows_of_calls.append(torch.stack([error, best.error, best.optimal]).double().flatten(1))
    error, optimum, proved = torch.cat(rows_of_calls, dim=1)
    clear = optimum > 1e-9 * optimum.mean()  # smaller errors are rounding
    ratio = error[clear] / optimum[clear]
    return SearchGap(
        r=r,
        search=search,
        excess=float(error.sum() / optimum.sum()) - 1,
        off=float((ratio > 1.001).sum()) / len(error),
        worst=float(ratio.max()),
        proved=float(proved.mean()),
    )
