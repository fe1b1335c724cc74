"""Keeps the r keys of each query with the largest score."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.call import Call
from value_aware_attention.weights import or_overflow, renormalised, top_keys, usable


class RankedKeys(SparseApproximation):
    """Keeps the top r keys by a score, weighted by attention as in Eq. 2: alpha / sum of alpha."""

    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        weights = call.weights.expand(*call.batch, -1, -1)
        with torch.no_grad():
            scores = self.scores(call, weights)
            indices = top_keys(scores, usable(weights), self.r)
        kept = renormalised(weights.gather(-1, indices))
        return indices, or_overflow(kept, weights)

    @abstractmethod
    def scores(
        self, call: Call, weights: Float[Tensor, "*#batch N M"]
    ) -> Float[Tensor, "*batch N M"]:
        """Scores the keys by which they are ranked, given the attention weights."""
