"""Error of a cache method in four factors: criterion, information, sharing and weights."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from value_aware_attention.caches import AfterPrefix, AttentionMatching, Observed, ValueAware
from value_aware_attention.measurement.cache_record import CacheGaps, estimate
from value_aware_attention.measurement.recorded import ExactRows

__all__ = ["GAPS", "REFERENCES", "gaps", "served_errors"]

REFERENCES = ("observed", "served", "alone", "refitted")
"""Sets that a method is compared with: the best found on the rows that it observed, on the rows
served, for each served query alone, and that on the rows served with refitted biases and values."""
GAPS: Mapping[str, tuple[str, str]] = {
    "criterion": ("method", "observed"),
    "information": ("observed", "served"),
    "sharing": ("served", "alone"),
    "weights": ("served", "refitted"),
}
"""Each gap as a ratio of two errors"""
Array = NDArray[np.float64]


@torch.inference_mode()
def served_errors(
    measured: ExactRows, like: AfterPrefix, r: int
) -> dict[str, Float[Tensor, "B H"]]:
    """Computes the errors that the best sets of r keys leave on the queries they were found on.

    `like` tells which keys are protected.
    """
    count = measured.rows.query.shape[-2]
    served = like.like(ValueAware(r, search="best"), observed="hindsight", rows=count)
    seen = served.observe(**measured.call.arguments(), layer=measured.call.layer)
    kept = served.method.keep(seen)
    refitted = AttentionMatching(r, served.method).keep(seen)
    alone = _by_query(seen)
    errors = {
        "served": seen.error(kept),
        "alone": alone.error(ValueAware(r).keep(alone)).sum(dim=-1),
        "refitted": seen.error(refitted),
    }
    heads = measured.call.query.shape[:2]
    return {name: error.double().reshape(heads) for name, error in errors.items()}


def _by_query(seen: Observed) -> Observed:
    """Gives every observed query a cache of its own."""
    count = seen.query[..., 0].flatten(-2).shape[-1]

    def apart(x: Tensor) -> Tensor:  # (*batch, G, W, .) -> (*batch, G W, 1, 1, .)
        return x.flatten(-3, -2)[..., None, None, :]

    def of_keys(x: Tensor | None) -> Tensor | None:  # (*batch, M) -> (*batch, G W, M)
        return None if x is None else x.expand(*seen.batch, -1)[..., None, :].expand(*rows, -1)

    rows = (*seen.batch, count)
    visible, beside = seen.visible, seen.beside
    return replace(
        seen,
        query=apart(seen.query),
        key=seen.key[..., None, :, :].expand(*rows, -1, -1),
        value=seen.value[..., None, :, :].expand(*rows, -1, -1),
        visible=None if visible is None else apart(visible.expand(seen.log_similarity.shape)),
        protected=of_keys(seen.protected),
        available=of_keys(seen.available),
        beside=None if beside is None else beside.rearranged(apart),
        projection=None,
        positions=None,
    )


def gaps(errors: Mapping[str, Array], *, method: str, observed: str, r: int) -> Iterator[CacheGaps]:
    """Computes the gaps of a method from errors (units, layers, heads), pooled and for each head.

    `errors` has those of the method under "method", and those of `REFERENCES`.
    """
    pools = {"all": (1, 2), "layer": (2,), "head": ()}
    for axes in pools.values():
        pooled = {name: error.sum(axis=axes) for name, error in errors.items()}
        for place in np.ndindex(pooled["method"].shape[1:]):
            layer, head = (*place, None, None)[:2]
            found = {
                gap: estimate(pooled[above][:, *place], pooled[below][:, *place])
                for gap, (above, below) in GAPS.items()
            }
            yield CacheGaps(method=method, observed=observed, r=r, layer=layer, head=head, **found)
