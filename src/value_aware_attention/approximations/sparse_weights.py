"""Holds a few keys per query with their weights and the resulting output error."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.call import Call
from value_aware_attention.error import squared_output_error
from value_aware_attention.weights import (
    dense_weights,
    mean_of_visible,
    renormalised,
    smallest,
    weighted_sum,
)


@dataclass(frozen=True)
class SparseWeights:
    """Holds at most R keys per query with their weights: a point of C_r (section 3).

    Methods that may also use the mean of the visible values give it a separate weight.

    Attributes:
        indices: Keys, each in range; an unused slot has weight 0.
        weights: >= 0, summing to 1 (with `mean_weight`), or to 0 if all keys are masked.
        error: ||o - o~||^2, recomputed from indices and weights.
        optimal: Mask of rows whose choice is proved optimal; None for methods that do not claim it.
        mean_weight: Weight of the mean of the visible values; None for methods that do not use it.
        visible: What each query sees, if there is a mean; None = all keys.
    """

    indices: Int[Tensor, "*batch N R"]
    weights: Float[Tensor, "*batch N R"]
    error: Float[Tensor, "*batch N"]
    optimal: Bool[Tensor, "*batch N"] | None = None
    mean_weight: Float[Tensor, "*batch N"] | None = None
    visible: Bool[Tensor, "*#batch #N M"] | None = None

    @classmethod
    def of(
        cls,
        indices: Int[Tensor, "*batch N R"],
        weights: Float[Tensor, "*batch N W"],
        error: Float[Tensor, "*batch N"],
        visible: Bool[Tensor, "*#batch #N M"] | None,
    ) -> "SparseWeights":
        """Splits off the weight of the mean, a column beyond the indices, if there is one."""
        r = indices.shape[-1]
        mean_weight = weights[..., r] if weights.shape[-1] > r else None
        return cls(indices, weights[..., :r], error, None, mean_weight, visible)

    def dense(self, keys: int) -> Float[Tensor, "*batch N M"]:
        """Returns the weights on every key; the mean's is spread over the visible keys."""
        dense = dense_weights(self.indices, self.weights, keys)
        if self.mean_weight is None:
            return dense
        visible = dense.new_ones(keys) if self.visible is None else self.visible.to(dense.dtype)
        share = self.mean_weight[..., None] / visible.sum(dim=-1, keepdim=True).clamp_min(1)
        return dense + share * visible

    def support(self) -> Int[Tensor, "*batch N"]:
        """Counts the vectors with a positive weight, per query: keys, and the mean if used."""
        return (self.all_weights() > 0).sum(dim=-1)

    def all_weights(self) -> Float[Tensor, "*batch N W"]:
        """Returns the weights of the keys, and the mean's in a last column if there is one."""
        if self.mean_weight is None:
            return self.weights
        return torch.cat([self.weights, self.mean_weight[..., None]], dim=-1)

    def output(self, value: Float[Tensor, "*#batch M V"]) -> Float[Tensor, "*batch N V"]:
        """Computes o~ from the values."""
        return combination(self.indices, self.all_weights(), value, self.visible)


def combination(
    indices: Int[Tensor, "*batch N R"],
    weights: Float[Tensor, "*batch N W"],
    value: Float[Tensor, "*#batch M V"],
    visible: Bool[Tensor, "*#batch #N M"] | None,
) -> Float[Tensor, "*batch N V"]:
    """Sums values by their weights; a column beyond the indices weighs the visible values' mean."""
    r = indices.shape[-1]
    output = weighted_sum(indices, weights[..., :r], value)
    if weights.shape[-1] == r:
        return output
    return output + weights[..., r:] * mean_of_visible(value, visible, weights.shape[-2])


@dataclass(frozen=True)
class RowsInFp64:
    """Holds K queries in fp64; each head's values are centred on its output of smallest norm.

    Attributes:
        place: The positions of these queries in the whole call.
    """

    place: Int[Tensor, " K"]
    weights: Float[Tensor, "*batch K M"]
    value: Float[Tensor, "*batch M V"]
    output: Float[Tensor, "*batch K V"]
    centre: Float[Tensor, "*batch 1 V"]
    visible: Bool[Tensor, "*#batch #K M"] | None

    @classmethod
    def of(cls, call: Call) -> "RowsInFp64":
        """Converts a call, with its attention weights; values that no row sees become 0."""
        weights = renormalised(call.weights.double()).expand(*call.batch, -1, -1)
        value = call.seen.value.double()
        centre = smallest(weights @ value)
        value = value - centre
        return cls(call.rows, weights, value, weights @ value, centre, call.visible)

    def error(self, chosen: SparseWeights) -> Float[Tensor, "*batch K"]:
        """Computes ||o - o~||^2 of the choice in these rows, with weights renormalised in fp64."""
        indices, weights = (x[..., self.place, :] for x in (chosen.indices, chosen.all_weights()))
        output = combination(indices, renormalised(weights.double()), self.value, self.visible)
        return squared_output_error(output, self.output)

    def mean(self) -> Float[Tensor, "*batch K V"]:
        """Computes the mean of the values that each query sees."""
        return mean_of_visible(self.value, self.visible, len(self.place))


def rows_in_fp64(call: Call, rows: Bool[Tensor, "*batch N"]) -> Iterator[RowsInFp64]:
    """Recomputes some rows of a whole call, block by block; each row comes for all heads."""
    for block in () if call.is_empty else call.blocks():
        which = rows[..., block.rows].reshape(-1, len(block.rows)).any(dim=0).nonzero()[:, 0]
        if len(which):
            yield RowsInFp64.of(block.take(which))
