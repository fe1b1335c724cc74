"""Orders keys by how long they are kept."""

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
    preference: Float[Tensor, " B"] | None = None
    """How much a layer needs keys, where a method shares them among layers by one number of each"""
    others: Int[Tensor, "S *batch M"] | None = None
    """Orders of other methods, whose sets a search compares with its own"""

    @property
    def by_head(self) -> Float[Tensor, "B H M"]:
        """Returns the losses with all dimensions between texts and keys as one, of heads."""
        return self.loss.flatten(1, -2)


def first_of(
    keys: Int[Tensor, "*batch M"], counts: Int[Tensor, " *batch"]
) -> Bool[Tensor, "*batch M"]:
    """Returns the set of the first `counts` keys of each order."""
    places = torch.arange(keys.shape[-1], device=keys.device)
    chosen = (places < counts[..., None]).expand(keys.shape)
    return torch.zeros_like(chosen).scatter(-1, keys, chosen)
