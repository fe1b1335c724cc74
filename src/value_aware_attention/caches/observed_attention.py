"""Keeps keys by the attention weights of the observed queries."""

from math import prod

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from value_aware_attention.arguments import check_at_least, check_choice
from value_aware_attention.caches.method import CacheMethod, candidates
from value_aware_attention.caches.observed import Observed

AGGREGATES = {"mean": 1.0, "rms": 2.0, "max": torch.inf}
"""The orders of norms that aggregate weights"""


class ObservedAttention(CacheMethod):
    """Keeps the r keys with the largest mean attention weight over observed queries and group.

    `aggregate` "max" takes the largest weight for the mean, "rms" the root mean square. `pool` then
    averages over that many neighbouring keys, protected ones as 0 (odd; 1 = none), or takes the
    largest of them with `pooling` "max". `by_layer` keeps one set for all heads of a layer (every
    leading dimension but the first), by their mean. With the options of `AfterPrefix`:
        SnapKV (Li et al., 2024, arXiv 2404.14469): last 32 rows, pool 7, pooling "max", recent =
            rows, sinks = 0
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
        self.pool = check_pool(pool)
        self.aggregate = check_choice(tuple(AGGREGATES), aggregate=aggregate)
        self.by_layer = by_layer
        self.pooling = check_choice(("mean", "max"), pooling=pooling)

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        weights, order = candidate_weights(seen), AGGREGATES[self.aggregate]
        norm = torch.linalg.vector_norm(weights, order, dim=(-3, -2))
        mean = norm / prod(weights.shape[-3:-1]) ** (1 / order)
        scores = pooled(mean, self.pool, self.pooling)
        if self.by_layer:
            heads = by_layer(seen, scores)
            scores = heads.mean(dim=1, keepdim=True).expand_as(heads).reshape_as(scores)
        return scores


def check_pool(pool: int) -> int:
    """Returns the number of neighbouring keys, if it is odd; ValueError otherwise."""
    if check_at_least(1, pool=pool) % 2 == 0:
        raise ValueError(f"pool is {pool}; it must be odd, to lie around its key")
    return pool


def pooled(
    x: Float[Tensor, "*rows M"], pool: int, pooling: str = "mean"
) -> Float[Tensor, "*rows M"]:
    """Takes the mean, or the largest, of `pool` neighbouring numbers >= 0; past the ends are 0."""
    flat = x.reshape(-1, 1, x.shape[-1])
    over = max_pool1d if pooling == "max" else avg_pool1d
    return over(flat, pool, stride=1, padding=pool // 2).view_as(x)


def by_layer(seen: Observed, x: Shaped[Tensor, "*batch M"]) -> Shaped[Tensor, "B H M"]:
    """Joins the leading dimensions behind the first, of texts: the heads of a layer."""
    return x.reshape(seen.batch[:1].numel(), -1, seen.keys)


def candidate_weights(seen: Observed) -> Float[Tensor, "*batch G W M"]:
    """Returns alpha, 0 for keys that are no candidates."""
    return seen.weights.masked_fill(~candidates(seen)[..., None, None, :], 0.0)


def mean_softmax(
    seen: Observed, logits: Float[Tensor, "*batch #G W M"]
) -> Float[Tensor, "*batch M"]:
    """Averages the softmax over the candidates alone; a row that sees none of them has zeros."""
    logits = logits.masked_fill(~candidates(seen)[..., None, None, :], -torch.inf)
    return logits.softmax(dim=-1).nan_to_num().mean(dim=(-3, -2))
