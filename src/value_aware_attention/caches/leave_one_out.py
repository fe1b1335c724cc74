"""Keys kept by what dropping each of them alone costs the observed queries."""

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed

__all__ = ["LeaveOneOut"]


class LeaveOneOut(CacheMethod):
    """Keeps the r keys with the largest sum_i (alpha_ij / (1 - alpha_ij))^2 ||v_j - o_i||^2.

    DropKV (kvpress pull request 285): the exact squared change of the observed outputs where key j
    alone is dropped, summed as if drops added up. A query that sees nothing else loses its output.
    """

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        value = working_precision(seen.value)
        centre = value.mean(dim=-2, keepdim=True)  # distances keep their digits far from 0
        output = seen.output.flatten(-3, -2)
        distance = torch.cdist(output - centre, value - centre)
        weights = seen.weights.flatten(-3, -2)
        left = 1 - weights
        change = (weights / left * distance).square()
        alone = output.square().sum(dim=-1, keepdim=True).expand_as(change)
        return change.where(left > 0, alone).sum(dim=-2)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * keys * (head_dim + 2 * value_dim))
