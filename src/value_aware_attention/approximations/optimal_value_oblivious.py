"""Computes optimal-v-oblivious-r, the r keys with the largest attention weights (Eq. 2)."""

from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.call import Call
from value_aware_attention.weights import renormalised


class OptimalValueOblivious(SparseApproximation):
    """Keeps the top r keys by alpha, renormalised, which sparse methods try to emulate."""

    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        weights = call.weights.expand(*call.batch, -1, -1)
        kept = weights.topk(min(self.r, call.keys), dim=-1, sorted=False)
        return kept.indices, renormalised(kept.values)
