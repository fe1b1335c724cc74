"""Ranks keys, and shares a budget of keys among heads and layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Ranking:
    """Ranks the keys of caches: for every r, the first r are a set to keep.

    Attributes:
        loss: Cost of dropping each key after all lower-ranked keys, comparable between heads and
            layers of a model: relative to the layer's squared output, or a score; inf = protected,
            -inf = padding.
        preference: The layer's need for keys, if a method shares keys among layers by one number
            per layer.
        others: Rankings of other methods; a search compares their sets with its own.
    """

    keys: Int[Tensor, "*batch M"]
    loss: Float[Tensor, "*batch M"]
    preference: Float[Tensor, " B"] | None = None
    others: Int[Tensor, "S *batch M"] | None = None

    @property
    def by_head(self) -> Float[Tensor, "B H M"]:
        """Returns the losses with all dimensions between texts and keys flattened into heads.

        NaN becomes the lowest loss. In a layer with zero output, relative losses are 0 / 0, and
        torch would sort NaN above all numbers.
        """
        return _without_nan(self.loss.flatten(1, -2))


def pooled_counts(
    rankings: Sequence[Ranking], total: int | Int[Tensor, " B"], least: int = 0
) -> list[Int[Tensor, "B H"]]:
    """Counts the keys that each head keeps when the cheapest key of any head is dropped repeatedly.

    `rankings` holds one ranking per layer. Each text keeps `total` keys, at least `least` per head.
    Each head keeps the first keys of its ranking, so a cheap key goes only after costlier keys
    ranked below it.
    """
    losses = [ranking.loss.flatten(1, -2) for ranking in rankings]
    cost = _without_nan(torch.cat([loss.to(losses[0].device) for loss in losses], dim=1))
    cost = cost.flip(-1).cummax(dim=-1).values.flip(-1)
    cost[..., :least] = torch.inf
    order = cost.flatten(1).argsort(dim=-1, descending=True, stable=True)
    chosen = first_of(order, torch.as_tensor(total, device=order.device).expand(len(order)))
    counts = chosen.view_as(cost).sum(dim=-1)
    return list(counts.split([loss.shape[1] for loss in losses], dim=-1))


def _without_nan(loss: Float[Tensor, "B H M"]) -> Float[Tensor, "B H M"]:
    return loss.masked_fill(loss.isnan(), torch.finfo(loss.dtype).min)


def proportional_counts(
    shares: Float[Tensor, "B L"], total: int, least: int, most: int
) -> Int[Tensor, "B L"]:
    """Counts the keys per head of each layer: `least`, plus keys in proportion to the layer's
    share.

    The counts sum to `total`. Keys above `most` go to the other layers, again in proportion.
    """
    share = shares.double().clamp_min(torch.finfo(torch.float32).tiny)
    counts = torch.full_like(share, least)
    for _ in range(share.shape[-1]):
        weight = share.where(counts < most, 0.0)
        left = total - counts.sum(dim=-1, keepdim=True)
        counts = counts + left * (weight / weight.sum(dim=-1, keepdim=True)).nan_to_num()
        counts = counts.clamp_max(most)
    return whole_counts(counts, total)


def whole_counts(
    numbers: Float[Tensor, "B X"], total: int | Int[Tensor, " B"]
) -> Int[Tensor, "B X"]:
    """Rounds numbers that sum to `total`, keeping the sum (largest remainder method)."""
    counts = numbers.long()
    order = (numbers - counts).argsort(dim=-1, descending=True, stable=True)
    return counts + first_of(order, total - counts.sum(dim=-1)).long()


def first_of(
    keys: Int[Tensor, "*batch M"], counts: Int[Tensor, " *batch"]
) -> Bool[Tensor, "*batch M"]:
    """Returns a mask of the first `counts` keys of each ranking."""
    places = torch.arange(keys.shape[-1], device=keys.device)
    chosen = (places < counts[..., None]).expand(keys.shape)
    return torch.zeros_like(chosen).scatter(-1, keys, chosen)
