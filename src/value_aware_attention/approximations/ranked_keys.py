"""Keys kept by rank: the r keys of each query with the largest score."""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.approximations.sparse_weights import or_overflow, renormalised
from value_aware_attention.call import Call

__all__ = ["RankedKeys", "top_keys", "usable"]


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


def usable(weights: Float[Tensor, "*batch N M"]) -> Bool[Tensor, "*batch N M"]:
    """Finds the keys that attention's own weights can use: those that did not underflow to 0."""
    return weights >= torch.finfo(weights.dtype).tiny


def top_keys(
    scores: Float[Tensor, "*batch N M"], allowed: Bool[Tensor, "*#batch #N #M"] | None, r: int
) -> Int[Tensor, "*batch N R"]:
    """Returns the min(r, M) keys with the largest scores, the lowest index first among equals.

    Keys that are not allowed come last: they are named only in rows with fewer than r others.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    top = scores.topk(min(r, scores.shape[-1]), dim=-1)
    # topk breaks ties as it likes. That matters where equals are left out, and only there a
    # stable sort decides: sorting every row would cost several times the attention itself.
    last = top.values[..., -1:]
    cut = (scores == last).sum(dim=-1) > (top.values == last).sum(dim=-1)
    cut &= last[..., 0] > -torch.inf
    ranked = scores[cut].argsort(dim=-1, descending=True, stable=True)
    return top.indices.masked_scatter(cut[..., None], ranked[:, : top.indices.shape[-1]])
