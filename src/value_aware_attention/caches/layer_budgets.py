"""Shares keys among layers and heads by published rules.

The authors' codes round each number separately, so totals differ by some keys. Here totals are
exact (largest remainder method), and the window of recent keys counts towards r.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.budgets import (
    Ranking,
    pooled_counts,
    proportional_counts,
    whole_counts,
)
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import (
    ObservedAttention,
    candidate_weights,
    pooled,
)


class AdaKV(ObservedAttention):
    """Keeps more keys in heads with more of the layer's largest SnapKV scores.

    This is AdaKV (arXiv 2407.11550), by the rule of its code: a head gets 0.2 times the mean, plus
    0.8 times its number among the largest scores of all heads. kvpress instead makes 0.2 the
    minimum (`floor`). The authors use SnapKV's options and `pool="layer"`.
    """

    def share(
        self, rankings: Sequence[Ranking], total: int, least: int
    ) -> list[Int[Tensor, "B H"]]:
        return [_pulled_alike(ranking, total // len(rankings), least) for ranking in rankings]


class PyramidKV(ObservedAttention):
    """Keeps fewer keys in later layers, in equal steps, by SnapKV's scores.

    This is PyramidKV (arXiv 2406.02069), by the rule of its code. With b keys per head on average
    besides those always kept, the first layer gets 2b - b/20 (at most all keys), and the last layer
    as many below b as the first is above. The authors use the last 8 rows, pool 7, pooling "max",
    recent = 8, sinks = 0 and `pool="model"`.
    """

    def share(
        self, rankings: Sequence[Ranking], total: int, least: int
    ) -> list[Int[Tensor, "B H"]]:
        heads, keys = rankings[0].by_head.shape[1:]
        mean = total / heads / len(rankings) - least
        most = min(2 * mean - mean / 20, keys - least)
        shares = torch.linspace(
            most, 2 * mean - most, len(rankings), device=rankings[0].loss.device
        )
        return _by_layer(rankings, shares.expand(len(rankings[0].keys), -1), total, least)


class Cake(CacheMethod):
    """Keeps keys by mean and variance of their weights, more in layers of high entropy and
    variance.

    This is CAKE (arXiv 2503.12491) as in its code. Scores are mean + 200 variance over rows,
    averaged over 5 neighbours and the group. Besides the keys always kept, layers get keys in
    proportion to H^(1/t) V^(1/t') of the entropy H and the summed variance V of their weights. The
    authors fit both t for each model and size; here they are 1. Keys that a layer cannot take go to
    the others in proportion (in the original, equally). The authors use the last 32 rows,
    recent = 32, sinks = 0 and `pool="model"`.
    """

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        weights = candidate_weights(observed)
        return pooled((weights.mean(dim=-2) + 200 * _variance(weights)).mean(dim=-2), 5)

    def preference(self, observed: Observed) -> Float[Tensor, " B"]:
        weights = candidate_weights(observed)
        entropy = torch.special.entr(weights).flatten(1).sum(dim=-1)
        return entropy * _variance(weights).flatten(1).sum(dim=-1)

    def share(
        self, rankings: Sequence[Ranking], total: int, least: int
    ) -> list[Int[Tensor, "B H"]]:
        return _by_layer(rankings, _preferences(rankings), total, least)


class Lava(CacheMethod):
    """Keeps keys by their weight times the head's longest value, more in layers with spread scores.

    This is LAVa (arXiv 2509.09754), by the rule that its code intends. Scores are the largest mean
    weight of 7 neighbours over the group, times max_j ||v_j||_1. Besides the keys always kept,
    layers get keys in proportion to the entropy of their scores, and heads within a layer as in
    `AdaKV`. The code as it runs gives 0.2 r keys to every head in all layers, and keeps more than r
    by 0.2 times its window. The authors use the last 32 rows, recent = 32, sinks = 0 and
    `pool="model"`.
    """

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        weights = candidate_weights(observed).mean(dim=-2).amax(dim=-2)
        norm = working_precision(observed.value).abs().sum(dim=-1).amax(dim=-1, keepdim=True)
        return pooled(weights, 7, "max") * norm

    def preference(self, observed: Observed) -> Float[Tensor, " B"]:
        scores = self.scores(observed).flatten(1)
        share = scores / scores.sum(dim=-1, keepdim=True)
        return torch.special.entr(share.nan_to_num()).sum(dim=-1)

    def share(
        self, rankings: Sequence[Ranking], total: int, least: int
    ) -> list[Int[Tensor, "B H"]]:
        by_layer = _by_layer(rankings, _preferences(rankings), total, least)
        return [
            _pulled_alike(ranking, count.sum(dim=-1).to(ranking.loss.device), least)
            for ranking, count in zip(rankings, by_layer, strict=True)
        ]


def _variance(weights: Float[Tensor, "*batch G W M"]) -> Float[Tensor, "*batch G M"]:
    """Computes the variance over rows; 0 for a single row."""
    return weights.var(dim=-2, correction=min(1, weights.shape[-2] - 1))


def _preferences(rankings: Sequence[Ranking]) -> Float[Tensor, "B L"]:
    preferences = [ranking.preference for ranking in rankings if ranking.preference is not None]
    return torch.stack([x.to(preferences[0].device) for x in preferences], dim=-1)


def _by_layer(
    rankings: Sequence[Ranking], shares: Float[Tensor, "B L"], total: int, least: int
) -> list[Int[Tensor, "B H"]]:
    """Gives all heads of a layer the same number of keys, from the layer's share."""
    heads, keys = rankings[0].by_head.shape[1:]
    counts = proportional_counts(shares, total // heads, least, keys)
    return [count[:, None].expand(-1, heads) for count in counts.unbind(dim=-1)]


def _pulled_alike(
    ranking: Ranking, total: int | Int[Tensor, " B"], least: int
) -> Int[Tensor, "B H"]:
    """Counts the keys of each head: 0.2 times the mean plus 0.8 times its pooled count."""
    (best,) = pooled_counts([ranking], total, least)
    return whole_counts(best + 0.2 * (best.double().mean(dim=-1, keepdim=True) - best), total)
