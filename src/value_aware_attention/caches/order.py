"""Orders keys by how long they are kept, and shares a number of keys among heads and layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """Orders the keys of caches: the first r of them are a set to keep, for every r."""

    keys: Int[Tensor, "*batch M"]
    loss: Float[Tensor, "*batch M"]
    """What dropping each key costs once all behind it are dropped, comparable between the heads and
    layers of a model: a part of the layer's squared output, or a score; inf: protected,
    -inf: padding"""


def first_of(
    keys: Int[Tensor, "*batch M"], counts: Int[Tensor, " *batch"]
) -> Bool[Tensor, "*batch M"]:
    """Returns the set of the first `counts` keys of each order."""
    places = torch.arange(keys.shape[-1], device=keys.device)
    chosen = (places < counts[..., None]).expand(keys.shape)
    return torch.zeros_like(chosen).scatter(-1, keys, chosen)


def pooled_counts(
    orders: Sequence[Order], total: int, least: int = 0
) -> list[Int[Tensor, "B H"]]:
    """Counts the keys that heads keep when all drop, in each text, the cheapest key of any.

    `orders` are of layers (B, H, M); `total` keys of a text are kept, at least `least` by each
    head. A head's next key may cost less than its last one: it then goes with it, so that each
    head keeps the first keys of its order.
    """
    costs = [order.loss.flip(-1).cummax(dim=-1).values.flip(-1) for order in orders]
    for cost in costs:
        cost[..., :least] = torch.inf
    every = torch.cat([cost.flatten(1) for cost in costs], dim=-1)
    largest = every.argsort(dim=-1, descending=True, stable=True)[:, :total]
    kept = torch.zeros_like(every, dtype=torch.bool).scatter(-1, largest, value=True)
    parts = kept.split([cost[0].numel() for cost in costs], dim=-1)
    return [part.view_as(cost).sum(dim=-1) for part, cost in zip(parts, costs, strict=True)]
