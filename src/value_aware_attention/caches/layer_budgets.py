"""Shares keys among layers by rules that their authors published."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.budgets import pooled_counts, proportional_counts
from value_aware_attention.caches.method import CacheMethod, available, protected
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import ObservedAttention
from value_aware_attention.caches.order import Order

SPREAD = 200.0
"""Weight of the variance beside the mean (CAKE's gamma)"""
BETA = 20
"""The layer of fewest keys has 1/20 of the mean (PyramidKV)"""


class PyramidKV(ObservedAttention):
    """Keeps fewer keys the later the layer, in equal steps, by SnapKV's scores.

    PyramidKV (arXiv 2406.02069), the rule of its code: from 2b - b/20 keys in the first layer to
    b/20 in the last, beside those that are always kept. With `pool="model"`.
    """

    def __init__(self, r: int, pool: int = 7, pooling: str = "max") -> None:
        super().__init__(r, pool=pool, pooling=pooling)

    def counts(self, orders: Sequence[Order], total: int, least: int) -> list[Int[Tensor, "B H"]]:
        shares = torch.linspace(2 - 1 / BETA, 1 / BETA, len(orders))
        shares = shares.expand(len(orders[0].keys), -1).to(orders[0].loss.device)
        return _alike(orders, shares, total, least)


class Cake(CacheMethod):
    """Keeps keys of large mean and variance of their weight, more in layers where these are large.

    CAKE (arXiv 2503.12491) as its code has it, with the last 32 rows: mean + 200 variance over
    rows, averaged over 5 neighbours and the group; layers in proportion to H^(1/t) V^(1/t) of the
    entropy H and the summed variance V of their weights. Its authors fit both t for each model
    and size; here they are 1. With `pool="model"`.
    """

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        weights = _unprotected(seen)
        scores = weights.mean(dim=-2) + SPREAD * weights.var(dim=-2)
        flat = scores.reshape(-1, 1, seen.keys)
        return avg_pool1d(flat, 5, stride=1, padding=2).view_as(scores).mean(dim=-2)

    @torch.no_grad()
    def order(self, seen: Observed) -> Order:
        weights = _unprotected(seen)
        entropy = torch.special.entr(weights).flatten(1).sum(dim=-1)
        variance = weights.var(dim=-2).flatten(1).sum(dim=-1)
        return replace(super().order(seen), preference=entropy * variance)

    def counts(self, orders: Sequence[Order], total: int, least: int) -> list[Int[Tensor, "B H"]]:
        return _alike(orders, _preferences(orders), total, least)


class Lava(CacheMethod):
    """Keeps keys by their weight times the head's longest value, more where these are spread.

    LAVa (arXiv 2509.09754), the rule that its code means: the largest mean weight of 7 neighbours
    over the group, times max_j ||v_j||_1; layers in proportion to the entropy of their scores,
    whose heads are pooled above a fifth of the layer's mean. With the last 32 rows and
    `pool="model"`.
    """

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        weights = _unprotected(seen).mean(dim=-2)
        flat = weights.reshape(-1, 1, seen.keys)
        largest = torch.nn.functional.max_pool1d(flat, 7, stride=1, padding=3).view_as(weights)
        norm = working_precision(seen.value).abs().sum(dim=-1).amax(dim=-1, keepdim=True)
        return largest.amax(dim=-2) * norm

    @torch.no_grad()
    def order(self, seen: Observed) -> Order:
        scores = self.scores(seen).flatten(1)
        share = scores / scores.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        return replace(super().order(seen), preference=torch.special.entr(share).sum(dim=-1))

    def counts(self, orders: Sequence[Order], total: int, least: int) -> list[Int[Tensor, "B H"]]:
        by_layer = _alike(orders, _preferences(orders), total, least)
        return [
            pooled_counts([order], count.sum(dim=-1), (count[:, 0] // 5).clamp_min(least))[0]
            for order, count in zip(orders, by_layer, strict=True)
        ]


def _unprotected(seen: Observed) -> Float[Tensor, "*batch G W M"]:
    counted = available(seen) & ~protected(seen)
    return seen.weights.masked_fill(~counted[..., None, None, :], 0.0)


def _preferences(orders: Sequence[Order]) -> Float[Tensor, "B L"]:
    found = [order.preference for order in orders if order.preference is not None]
    return torch.stack(found, dim=-1)


def _alike(
    orders: Sequence[Order], shares: Float[Tensor, "B L"], total: int, least: int
) -> list[Int[Tensor, "B H"]]:
    """Gives all heads of a layer the same number of keys, by the layer's share."""
    heads, keys = orders[0].by_head.shape[1:]
    counts = proportional_counts(shares, total // heads, least, keys)
    return [counts[:, layer, None].expand(-1, heads) for layer in range(len(orders))]
