"""Keeps attention's top r keys at optimal weights: half of the gain of value-aware attention."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations import closest_combination
from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.call import Call
from value_aware_attention.weights import or_overflow, top_keys


class ObliviousKeysOptimalWeights(SparseApproximation):
    """Keeps the top r keys by alpha, with the weights that come closest to the exact output.

    argmin ||o - sum_i w_i v_i||^2 over w >= 0 summing to 1 on those keys: never further from the
    output than optimal-v-oblivious-r, whose weights are among the candidates. The distance that
    remains to optimal-v-aware-r is due to the choice of keys.
    """

    solves_for_weights = True
    differentiable_weights = False

    def elements_per_query(self, call: Call) -> int:
        """Counts the numbers of the values kept, which are gathered."""
        return min(self.r, call.keys) * call.value.shape[-1]

    @torch.no_grad()
    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        problem = closest_combination.flatten(call)
        indices = top_keys(problem.weights, problem.visible, self.r)
        weights = closest_combination.optimal_weights(problem, indices)
        shape = (*call.batch, *indices.shape[-2:])
        return indices.reshape(shape), or_overflow(weights.reshape(shape), call.weights)
