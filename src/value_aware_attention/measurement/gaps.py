"""Splits the error that kept keys leave in every layer into four gaps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from value_aware_attention.caches import (
    AfterPrefix,
    AttentionMatching,
    Observed,
    Recent,
    ValueAware,
)
from value_aware_attention.call import Call
from value_aware_attention.measurement.layers import POOLS
from value_aware_attention.measurement.recorded import ExactRows
from value_aware_attention.records.cache_record import CacheGaps
from value_aware_attention.records.estimate import Array, estimate

SERVED = 64
"""Most queries after a prefix, per head and text, on which errors are measured"""
Sums = Float[Tensor, "B L H"]
"""Squared errors or norms by text, layer and key-value head"""
REFERENCES = ("observed", "served", "alone", "refitted")
"""Best sets that a method is compared with: for the queries that it observed, for as many served
ones, for each served query alone, and for the served ones with refitted biases and values"""
GAPS: Mapping[str, tuple[str, str]] = {
    "criterion": ("method", "observed"),
    "information": ("observed", "served"),
    "sharing": ("served", "alone"),
    "weights": ("served", "refitted"),
}
"""Each gap as a ratio of two errors"""


@dataclass(frozen=True)
class ServedQueries:
    """Holds served queries of a text with their exact outputs in every layer.

    Attributes:
        best: Errors of the best sets that were searched, by their methods.
    """

    layers: Sequence[ExactRows]
    best: dict[str, Sums] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: Sequence[Call], like: AfterPrefix) -> "ServedQueries":
        """Takes at most `SERVED` queries after a prefix; in an encoder as many as are observed."""
        rows = (
            like.rows
            if like.prefix is None
            else min(SERVED, calls[0].query.shape[-2] - like.prefix)
        )
        places = observed_places(
            calls[0], like.like(Recent(like.method.r), observed="hindsight", rows=rows)
        )
        return cls([ExactRows.served(call, places) for call in calls])

    def norms(self) -> Sums:
        """Computes ||o||^2 (texts, layers, heads)."""
        return _stacked([layer.squared_norm() for layer in self.layers])

    def errors(self, methods: Sequence[nn.Module]) -> Sums:
        """Measures ||o - o~||^2 (texts, layers, heads) of a method in each layer."""
        pairs = zip(self.layers, methods, strict=True)
        return _stacked(
            [layer.squared_error(layer.approximated(method)) for layer, method in pairs]
        )

    def best_errors(self, after: AfterPrefix) -> dict[str, Sums]:
        """Measures each of `REFERENCES` once, with the method's search or the default one."""
        r = after.method.r
        best = ValueAware(r, search=getattr(after.method, "search", "default"))
        methods = {
            "observed": after.like(best),
            "served": after.like(best, observed="hindsight"),
            "refitted": after.like(AttentionMatching(r, best), observed="hindsight"),
        }
        for method in methods.values():
            if repr(method) not in self.best:
                self.best[repr(method)] = self.errors([method] * len(self.layers))
        alone = f"alone {(r, after.sinks, after.recent)}"
        if alone not in self.best:
            self.best[alone] = _stacked([alone_errors(layer, after) for layer in self.layers])
        return {
            **{name: self.best[repr(method)] for name, method in methods.items()},
            "alone": self.best[alone],
        }


@torch.inference_mode()
def alone_errors(measured: ExactRows, like: AfterPrefix) -> Float[Tensor, "B H"]:
    """Computes the error of each served query with a set of r keys for it alone.

    `like` has r and the protected keys.
    """
    best = ValueAware(like.method.r)
    rows = like.rows if like.prefix is None else measured.rows.query.shape[-2]
    served = like.like(best, observed="hindsight", rows=rows)
    alone = _by_query(served.observe(**measured.call.arguments(), layer=measured.call.layer))
    errors = alone.error(best.keep(alone)).sum(dim=-1)
    return errors.double().reshape(measured.call.query.shape[:2])


def _by_query(observed: Observed) -> Observed:
    """Gives every observed query its own cache."""
    rows = (*observed.batch, observed.query[..., 0].flatten(-2).shape[-1])
    visible, beside = observed.visible, observed.beside

    def apart(x: Tensor) -> Tensor:  # (*batch, G, W, .) -> (*batch, G W, 1, 1, .)
        return x.flatten(-3, -2)[..., None, None, :]

    def of_keys(x: Tensor | None) -> Tensor | None:  # (*batch, M) -> (*batch, G W, M)
        return None if x is None else x.expand(*observed.batch, -1)[..., None, :].expand(*rows, -1)

    return replace(
        observed,
        query=apart(observed.query),
        key=observed.key[..., None, :, :].expand(*rows, -1, -1),
        value=observed.value[..., None, :, :].expand(*rows, -1, -1),
        visible=None if visible is None else apart(visible.expand(observed.log_similarity.shape)),
        protected=of_keys(observed.protected),
        available=of_keys(observed.available),
        beside=None if beside is None else beside.rearranged(apart),
        projection=None,
        positions=None,
    )


def gaps(errors: Mapping[str, Array], **setting: Any) -> Iterator[CacheGaps]:
    """Computes the gaps of a setting from errors (texts, layers, heads), pooled and for each head.

    `errors` has those of the method under "method", and those of `REFERENCES`.
    """
    for axes in POOLS:
        pooled = {name: error.sum(axis=axes) for name, error in errors.items()}
        for place in np.ndindex(pooled["method"].shape[1:]):
            layer, head = (*place, None, None)[:2]
            ratios: dict[str, Any] = {
                gap: estimate(pooled[above][:, *place], pooled[below][:, *place], least=0.0)
                for gap, (above, below) in GAPS.items()
            }
            yield CacheGaps(**setting, layer=layer, head=head, **ratios)


def observed_places(call: Call, after: AfterPrefix) -> Int[Tensor, " n"]:
    """Finds the places of the queries that a method observes."""
    positions = after.observe(**call.arguments(), layer=call.layer).positions
    assert positions is not None
    return positions


def _stacked(layers: Sequence[Float[Tensor, "B H"]]) -> Sums:
    return torch.stack(list(layers), dim=1)
