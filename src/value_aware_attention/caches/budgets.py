"""Orders keys by how long they are kept, and shares a number of them among heads and layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Ranking:
    """Orders the keys of caches: the first r of them are a set to keep, for every r.

    Attributes:
        loss: Cost of dropping each key once all behind it are dropped, comparable between the heads
            and layers of a model: a part of the layer's squared output, or a score; inf: protected,
            -inf: padding.
        preference: How much a layer needs keys, where a method shares them among layers by one
            number of each.
        others: Orders of other methods, whose sets a search compares with its own.
    """

    keys: Int[Tensor, "*batch M"]
    loss: Float[Tensor, "*batch M"]
    preference: Float[Tensor, " B"] | None = None
    others: Int[Tensor, "S *batch M"] | None = None

    @property
    def by_head(self) -> Float[Tensor, "B H M"]:
        """Returns the losses with all dimensions between texts and keys as one, of heads.

        NaN becomes the lowest loss: where a layer adds nothing a share of its sum is 0 / 0, and
        torch would sort that before every number.
        """
        lowest = torch.finfo(self.loss.dtype).min
        return self.loss.masked_fill(self.loss.isnan(), lowest).flatten(1, -2)


def pooled_counts(
    rankings: Sequence[Ranking], total: int | Int[Tensor, " B"], least: int = 0
) -> list[Int[Tensor, "B H"]]:
    """Counts the keys that heads keep when all drop, in each text, the cheapest key of any.

    `rankings` are of layers; `total` keys of a text are kept, at least `least` by each
    head. A head's next key may cost less than its last one: it then goes with it, so that each
    head keeps the first keys of its order.
    """
    costs = [ranking.by_head.flip(-1).cummax(dim=-1).values.flip(-1) for ranking in rankings]
    for cost in costs:
        cost[..., :least] = torch.inf
    of_all = torch.cat([cost.flatten(1).to(costs[0].device) for cost in costs], dim=-1)
    order = of_all.argsort(dim=-1, descending=True, stable=True)
    chosen = first_of(order, torch.as_tensor(total, device=order.device).expand(len(order)))
    parts = chosen.split([cost[0].numel() for cost in costs], dim=-1)
    return [mask.view_as(cost).sum(dim=-1) for mask, cost in zip(parts, costs, strict=True)]


def proportional_counts(
    shares: Float[Tensor, "B L"], total: int, least: int, most: int
) -> Int[Tensor, "B L"]:
    """Counts keys a head of each layer: `least`, and the others in proportion to its share.

    `total` over the layers. Keys that a layer of `most` cannot take are shared by the others in
    proportion too.
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
    """Rounds numbers that sum to `total` so that they still do: up by the largest remainders."""
    counts = numbers.long()
    order = (numbers - counts).argsort(dim=-1, descending=True, stable=True)
    return counts + first_of(order, total - counts.sum(dim=-1)).long()


def first_of(
    keys: Int[Tensor, "*batch M"], counts: Int[Tensor, " *batch"]
) -> Bool[Tensor, "*batch M"]:
    """Returns the set of the first `counts` keys of each order."""
    places = torch.arange(keys.shape[-1], device=keys.device)
    chosen = (places < counts[..., None]).expand(keys.shape)
    return torch.zeros_like(chosen).scatter(-1, keys, chosen)
