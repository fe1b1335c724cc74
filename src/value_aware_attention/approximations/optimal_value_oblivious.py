"""optimal-v-oblivious-r: the r keys with the largest attention weights (Eq. 2)."""

from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import (
    Inputs,
    SparseApproximation,
    renormalised,
)

__all__ = ["OptimalValueOblivious"]


class OptimalValueOblivious(SparseApproximation):
    """Keeps the top r keys by alpha and renormalises: what sparse methods try to emulate."""

    def choose(
        self, inputs: Inputs
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        kept = inputs.weights().topk(min(self.r, inputs.keys), dim=-1, sorted=False)
        return kept.indices, renormalised(kept.values)
