"""Keeps keys by the attention weights of the observed queries."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from value_aware_attention.arguments import check_at_least, check_choice
from value_aware_attention.caches.method import CacheMethod, protected
from value_aware_attention.caches.observed import Observed


class ObservedAttention(CacheMethod):
    """Keeps the r keys with the largest mean attention weight over observed queries and group.

    `pool` averages over that many neighbouring keys, protected ones left out (odd; 1 = none), or
    with `pooling` "max" takes the largest of their scores;
    `aggregate` "max" takes the largest weight for the mean, "rms" the root mean square; `by_layer`
    keeps one set for all heads of a layer (every leading dimension but the first), by their mean.
    With the options of `AfterPrefix`:
        SnapKV (Li et al., 2024, arXiv 2404.14469): last 32 or 64 rows, pool 5 or 7, recent = rows
        TOVA (Oren et al., 2024, arXiv 2401.06104): the last row alone, by_layer, sinks = recent = 0
        H2O (Zhang et al., 2023, arXiv 2306.14048): every causal row, recent = r / 2, sinks = 0, as
            its one-shot form
        KVzip (Kim et al., 2025, arXiv 2505.23416): repeated rows, aggregate "max"; there heads have
            budgets of their own
    """

    def __init__(
        self,
        r: int,
        pool: int = 1,
        aggregate: str = "mean",
        by_layer: bool = False,
        pooling: str = "mean",
    ) -> None:
        super().__init__(r)
        self.pool = check_at_least(1, pool=pool)
        if pool % 2 == 0:
            raise ValueError(f"pool is {pool}; it must be odd, to lie around its key")
        self.aggregate = check_choice(("mean", "max", "rms"), aggregate=aggregate)
        self.by_layer = by_layer
        self.pooling = check_choice(("mean", "max"), pooling=pooling)

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        weights = seen.weights
        if self.pool > 1:
            weights = weights.masked_fill(protected(seen)[..., None, None, :], 0.0)
        if self.pool > 1 and self.pooling == "mean":
            weights = self._pooled(weights, avg_pool1d)
        if self.aggregate == "max":
            scores = weights.amax((-3, -2))
        else:
            power = 2 if self.aggregate == "rms" else 1
            scores = weights.pow(power).mean((-3, -2)).pow(1 / power)
        if self.pool > 1 and self.pooling == "max":
            scores = self._pooled(scores, max_pool1d)
        if self.by_layer and scores.ndim > 2:
            scores = scores.mean(dim=tuple(range(1, scores.ndim - 1)), keepdim=True)
        return scores.expand(*seen.batch, -1)

    def _pooled(
        self, x: Float[Tensor, "*rows M"], over: Callable[..., Tensor]
    ) -> Float[Tensor, "*rows M"]:
        flat = x.reshape(-1, 1, x.shape[-1])
        return over(flat, self.pool, stride=1, padding=self.pool // 2).view_as(x)
