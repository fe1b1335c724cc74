"""What a task offers: its end metric per unit of text, and its layers' real attention calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from value_aware_attention.approximations import Exact
from value_aware_attention.call import Call
from value_aware_attention.kernels import Kernel

__all__ = [
    "Layerwise",
    "Task",
    "UnitSums",
    "exactly",
]

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

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The units of all parts, in order."""
        totals, counts = ([getattr(part, name) for part in parts] for name in ("totals", "counts"))
        return cls(np.concatenate(totals), np.concatenate(counts))


@runtime_checkable
class Task(Protocol):
    """A trained model with its evaluation text, read in parts of one or more units.

    A number is computed and kept part by part, so that one part more computes that part alone.
    """

    metric: str
    """"perplexity", "error" (percent) or "cosine"."""
    unit: str
    """What `UnitSums` counts: "window" or "sequence"."""
    length: int
    parts: int
    model: Any
    """A PreTrainedModel in evaluation mode"""

    @property
    def head_dim(self) -> int: ...

    @property
    def kernel(self) -> Kernel:
        """That exact attention has"""
        ...

    def run(self, method: Layerwise | None, part: int = 0) -> UnitSums:
        """The end metric's sums with attention replaced; None = with the model's own."""
        ...

    def layer_calls(self, part: int = 0) -> list[Call]:
        """Each layer's call in the exact model, on the units that layers are measured on."""
        ...

    def first_tokens(self, count: int, unit: int = 0) -> list[int]:
        """The first tokens of one of the units that `layer_calls` records on the first part."""
        ...

    def digest(self, part: int) -> str:
        """Hash of everything that the part alone decides: its tokens, masks and what is scored."""
        ...


def exactly(layer: int) -> nn.Module:
    """Exact attention in every layer."""
    return Exact()
