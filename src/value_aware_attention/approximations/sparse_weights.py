"""Holds a few keys per query with their weights and the resulting output error."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.call import Call
from value_aware_attention.error import squared_output_error
from value_aware_attention.weights import dense_weights, renormalised, smallest, weighted_sum


@dataclass(frozen=True)
class SparseWeights:
    """Holds at most R keys per query with their weights: a point of C_r (section 3).

    Attributes:
        indices: Keys, each in range; an unused slot has weight 0.
        weights: >= 0, summing to 1, or to 0 if all keys are masked.
        error: ||o - o~||^2, recomputed from indices and weights.
        optimal: Mask of rows whose choice is proved optimal; None for methods that do not claim it.
    """

    indices: Int[Tensor, "*batch N R"]
    weights: Float[Tensor, "*batch N R"]
    error: Float[Tensor, "*batch N"]
    optimal: Bool[Tensor, "*batch N"] | None = None

    def dense(self, keys: int) -> Float[Tensor, "*batch N M"]:
        """Returns the weights on every key, zero where not kept."""
        return dense_weights(self.indices, self.weights, keys)

    def support(self) -> Int[Tensor, "*batch N"]:
        """Counts the keys with a positive weight, per query."""
        return (self.weights > 0).sum(dim=-1)


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
        value = call.value.double()
        if call.visible is not None:
            value = value.where(call.visible.any(dim=-2)[..., None], 0.0)
        centre = smallest(weights @ value)
        value = value - centre
        return cls(call.rows, weights, value, weights @ value, centre, call.visible)

    def error(self, chosen: SparseWeights) -> Float[Tensor, "*batch K"]:
        """Computes ||o - o~||^2 of the choice in these rows, with weights renormalised in fp64."""
        indices, weights = (x[..., self.place, :] for x in (chosen.indices, chosen.weights))
        weights = renormalised(weights.double())
        return squared_output_error(weighted_sum(indices, weights, self.value), self.output)


def rows_in_fp64(call: Call, rows: Bool[Tensor, "*batch N"]) -> Iterator[RowsInFp64]:
    """Recomputes some rows of a whole call, block by block; each row comes for all heads."""
    if call.is_empty:
        return
    for block in call.blocks():
        which = rows[..., block.rows].reshape(-1, len(block.rows)).any(dim=0).nonzero()[:, 0]
        if len(which):
            yield RowsInFp64.of(block.take(which))
