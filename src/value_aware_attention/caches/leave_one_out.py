"""Keeps keys by the output error that dropping each of them alone leaves."""

from jaxtyping import Float
from torch import Tensor

from value_aware_attention.caches.joint_set import Rows
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import check_pool, pooled


class LeaveOneOut(CacheMethod):
    """Keeps the r keys with the largest sum_i (alpha_ij / (1 - alpha_ij))^2 ||v_j - o_i||^2.

    The exact squared change of the observed outputs where key j alone is dropped, summed as if
    drops added up. A query that sees nothing else loses its output. `pool` averages over that many
    neighbouring keys, protected ones too (odd; 1 = none). DropKV (kvpress pull request 285) is the
    last 8 rows, pool 11, recent 8 and sinks 0; there 1e-6 is added to 1 - alpha.
    """

    def __init__(self, r: int, pool: int = 1) -> None:
        super().__init__(r)
        self.pool = check_pool(pool)

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        return pooled(Rows.of(seen).cost_of_dropping().view(*seen.batch, -1), self.pool)

    def losses(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        """Measures the losses after W_o, in parts of the layer's squared output."""
        losses = Rows.of(seen, projected=True).cost_of_dropping().view(*seen.batch, -1)
        norm = seen.squared_layer_output().view(-1, *(1,) * len(seen.batch))
        return pooled(losses, self.pool) / norm

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * keys * (head_dim + 2 * value_dim))
