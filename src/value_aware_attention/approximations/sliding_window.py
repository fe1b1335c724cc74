"""Sliding-window attention: r neighbouring keys per query."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import (
    Inputs,
    SparseApproximation,
    renormalised,
)

__all__ = ["SlidingWindow"]


class SlidingWindow(SparseApproximation):
    """The r keys around each query, weighted by attention (section 4, sliding-window-r).

    Bidirectional: the token itself, r // 2 keys to its left and the rest to its right; at the edges
    of the sequence the window is shifted inwards, so every query sees r keys and r = M is exact.
    Causal: the token itself and the r - 1 keys before it. Queries are the last N of M positions.
    """

    queries_alone = False

    def choose(
        self, inputs: Inputs
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        weights = inputs.weights()
        indices = self._window(inputs).to(weights.device)
        inside = indices >= 0
        indices = indices.clamp_min(0).expand(*weights.shape[:-1], -1)
        return indices, renormalised(weights.gather(-1, indices) * inside)

    def _window(self, inputs: Inputs) -> Int[Tensor, "N R"]:
        """Key positions of each query's window; negative where it reaches before the first key."""
        queries, keys = inputs.query.shape[-2], inputs.keys
        size = min(self.r, keys)
        position = torch.arange(keys - queries, keys)
        if inputs.is_causal:
            first = position - size + 1
        else:
            first = (position - self.r // 2).clamp(0, keys - size)
        return first[:, None] + torch.arange(size)
