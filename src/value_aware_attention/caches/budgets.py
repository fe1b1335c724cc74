"""Orders keys by how long they are kept, and shares a number of them among heads and layers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from value_aware_attention.files import from_json, reading, to_json

STEPS = 4096
"""Parts of a total that budgets are counted in, at most"""
LEAST = 1e-12
"""KL divergence, in nats, below which budgets tell none apart"""


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


@dataclass(frozen=True)
class CacheProfile:
    """Holds the KL divergence from the exact model by the keys that one layer or head keeps alone.

    Measured by `caches.profile` for one model, cache method and prefix.

    Attributes:
        sizes: Keys a head, ascending to the whole prefix.
        kl: Mean KL in nats a served token, by layer, key-value head and size; one curve where all
            heads of a layer were compressed together.
    """

    sizes: tuple[int, ...]
    kl: tuple[tuple[tuple[float, ...], ...], ...]
    key_value_heads: int

    def __post_init__(self) -> None:
        shape = np.shape(self.kl)
        if (
            len(shape) != 3
            or shape[2] != len(self.sizes)
            or shape[1] not in (1, self.key_value_heads)
        ):
            raise ValueError(
                f"kl has shape {shape}; it must be layers x 1 or {self.key_value_heads} key-value "
                f"heads x {len(self.sizes)} sizes"
            )

    @property
    def layers(self) -> int:
        """Returns the number of layers."""
        return len(self.kl)

    @property
    def heads(self) -> int:
        """Returns the number of key-value heads of all layers."""
        return self.layers * self.key_value_heads

    def budgets(self, total: int) -> Int[Tensor, "L H"]:
        """Counts the keys of each layer and head, `total` at most in all, of the least sum of KL.

        Found by dynamic programming over log KL that is linear between the sizes (KL itself up to
        the last one); exact where `total` is at most 4,096, else in as many steps. Raises
        ValueError for a total below the smallest size, or above the largest, in every head.
        """
        curves = np.log(np.maximum(np.array(self.kl), LEAST)).reshape(-1, len(self.sizes))
        alike = self.heads // len(curves)
        least, most = (size * self.heads for size in (self.sizes[0], self.sizes[-1]))
        if not least <= total <= most:
            raise ValueError(f"total is {total}; it must be between {least} and {most}")
        step = -(-total // (alike * STEPS))
        sizes = np.arange(self.sizes[0], self.sizes[-1] + 1, step)
        costs = np.exp([np.interp(sizes, self.sizes, curve) for curve in curves])
        last = sizes >= self.sizes[-2:][0]  # to a KL of 0, whose logarithm says nothing between
        costs[:, last] = [np.interp(sizes[last], self.sizes, np.exp(curve)) for curve in curves]
        chosen = sizes[_cheapest(costs, (total // alike - self.sizes[0] * len(curves)) // step)]
        by_layer = torch.from_numpy(chosen).view(len(self.kl), -1)
        return by_layer.expand(-1, self.key_value_heads)

    def to_json(self) -> str:
        """Returns JSON with sorted keys."""
        return to_json(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the text that `to_json` wrote; raises ValueError for anything else."""
        with reading("the profile", "make it again"):
            fields: dict[str, Any] = from_json(text)
            kl = tuple(tuple(tuple(map(float, x)) for x in layer) for layer in fields["kl"])
            return cls(tuple(map(int, fields["sizes"])), kl, int(fields["key_value_heads"]))


def _cheapest(costs: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Finds one place in each row, `total` at most in all, of the least sum of costs."""
    rows, sizes = costs.shape
    best, choices = np.zeros(total + 1), np.zeros((rows, total + 1), dtype=np.int64)
    for row, cost in enumerate(costs):
        lowest = np.full(total + 1, np.inf)
        for place in range(min(sizes, total + 1)):
            sums = best[: total + 1 - place] + cost[place]
            better = sums < lowest[place:]
            lowest[place:][better] = sums[better]
            choices[row, place:][better] = place
        best = lowest
    chosen = np.zeros(rows, dtype=np.int64)
    for row in reversed(range(rows)):
        chosen[row] = choices[row, total]
        total -= chosen[row]
    return chosen


def first_of(
    keys: Int[Tensor, "*batch M"], counts: Int[Tensor, " *batch"]
) -> Bool[Tensor, "*batch M"]:
    """Returns the set of the first `counts` keys of each order."""
    places = torch.arange(keys.shape[-1], device=keys.device)
    chosen = (places < counts[..., None]).expand(keys.shape)
    return torch.zeros_like(chosen).scatter(-1, keys, chosen)
