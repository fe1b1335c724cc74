"""What an evaluation task offers: its metric per unit of text, and its layers' real inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor, nn

from value_aware_attention.approximations import Exact
from value_aware_attention.kernels import Kernel

__all__ = ["LayerCall", "LayerRecorder", "Layerwise", "Task", "UnitSums", "evenly_spaced"]

Layerwise = Callable[[int], nn.Module]
"""layer index -> the method that replaces attention there."""


@dataclass(frozen=True)
class UnitSums:
    """The summed loss (nats, or wrong predictions) and the number of targets of each unit."""

    totals: NDArray[np.float64]
    counts: NDArray[np.float64]

    def mean(self) -> float:
        """Mean per target."""
        return float(self.totals.sum() / self.counts.sum())


@dataclass(frozen=True)
class LayerCall:
    """What one layer's attention is called with when the model reads real text."""

    query: Float[Tensor, "B H N D"]
    key: Float[Tensor, "B H M D"]
    value: Float[Tensor, "B H M V"]
    kernel: Kernel
    is_causal: bool
    first_row: int
    """Rows before it only provide context; statistics leave them out."""
    attn_mask: Bool[Tensor, "#B #H #N #M"] | None = None
    """True = may attend; beside `is_causal`. None = every key."""


@runtime_checkable
class Task(Protocol):
    """A trained model with its evaluation text."""

    metric: str
    """"perplexity", "error" (percent) or "cosine"."""
    unit: str
    """What `UnitSums` counts: "window" or "sequence"."""
    length: int
    head_dim: int

    def run(self, method: Layerwise | None) -> UnitSums:
        """The end metric's sums with attention replaced; None = with the model's own."""
        ...

    def layer_calls(self) -> list[LayerCall]:
        """Each layer's inputs in the exact model, on a few units spread over those evaluated."""
        ...

    def first_tokens(self, count: int) -> list[int]:
        """The first tokens of the first unit that `layer_calls` records."""
        ...


class LayerRecorder(nn.Module):
    """Exact attention that keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        self.calls.append((query, key, value))
        return Exact()(query, key, value, **options)

    def call(self, kernel: Kernel, *, is_causal: bool, first_row: int) -> LayerCall:
        """Everything recorded, as one batch; the parts are given up, so as not to hold both."""
        query, key, value = (torch.cat(parts) for parts in zip(*self.calls, strict=True))
        self.calls.clear()
        return LayerCall(query, key, value, kernel, is_causal, first_row)


def evenly_spaced(available: int, wanted: int | None) -> list[int]:
    """At most `wanted` different indices spread over range(available); None = all of them."""
    if wanted is None or wanted >= available:
        return list(range(available))
    return [index * available // wanted for index in range(wanted)]
