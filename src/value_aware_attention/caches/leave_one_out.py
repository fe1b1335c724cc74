"""Keeps keys by the output error that dropping each of them alone leaves."""

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.caches.joint_set import Rows
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.order import Order


class LeaveOneOut(CacheMethod):
    """Keeps the r keys with the largest sum_i (alpha_ij / (1 - alpha_ij))^2 ||v_j - o_i||^2.

    DropKV (kvpress pull request 285): the exact squared change of the observed outputs where key j
    alone is dropped, summed as if drops added up. A query that sees nothing else loses its output.
    """

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        return Rows.of(seen).cost_of_dropping().view(*seen.batch, -1)

    @torch.no_grad()
    def order(self, seen: Observed) -> Order:
        """Orders keys by their loss alone after W_o, in parts of the layer's squared output."""
        self.check(seen)
        cost = Rows.of(seen, projected=True).cost_of_dropping().view(*seen.batch, -1)
        keys = self.ranked(seen, cost, seen.keys)
        norm = seen.squared_layer_output()
        return Order(keys, cost.gather(-1, keys) / norm.view(-1, *(1,) * (cost.ndim - 1)))

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * keys * (head_dim + 2 * value_dim))
