"""Keeps keys by the output error that dropping each of them alone leaves."""

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.leave_one_out_keys import output_change
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed


class LeaveOneOut(CacheMethod):
    """Keeps the r keys with the largest sum_i (alpha_ij / (1 - alpha_ij))^2 ||v_j - o_i||^2.

    DropKV (kvpress pull request 285): the exact squared change of the observed outputs where key j
    alone is dropped, summed as if drops added up. A query that sees nothing else loses its output.
    """

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        value = working_precision(seen.value)
        centre = value.mean(dim=-2, keepdim=True)  # distances keep their digits far from 0
        weights = seen.weights.flatten(-3, -2)
        change = output_change(weights, value - centre, self._beside(seen, centre)).square()
        output = seen.output.flatten(-3, -2)
        alone = output.square().sum(dim=-1, keepdim=True).expand_as(change)
        return change.where(change < torch.inf, alone).sum(dim=-2)

    @staticmethod
    def _beside(seen: Observed, centre: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns each row's attention weight beside the keys, and the output that it adds."""
        if seen.beside is None:
            return None
        weight, output = seen.log_beside.exp(), seen.beside.output() - centre[..., None, :, :]
        return weight.flatten(-3, -2), (weight * output).flatten(-3, -2)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * keys * (head_dim + 2 * value_dim))
