"""What a task offers: its end metric per unit of text, and its layers' real attention calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor, nn

from value_aware_attention.approximations import Exact
from value_aware_attention.kernels import Kernel

__all__ = [
    "LayerCall",
    "LayerRecorder",
    "Layerwise",
    "Task",
    "UnitSums",
    "evenly_spaced",
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


@dataclass(frozen=True)
class LayerCall:
    """What one layer's attention is called with when the model reads real text."""

    query: Float[Tensor, "B H N D"]
    key: Float[Tensor, "B H M D"]
    value: Float[Tensor, "B H M V"]
    kernel: Kernel
    is_causal: bool
    first_row: int = 0
    """Rows before it only provide context; statistics leave them out."""
    attn_mask: Bool[Tensor, "#B #H #N #M"] | None = None
    """True = may attend; beside `is_causal`. None = every key."""

    @classmethod
    def joined(cls, calls: Sequence[Self]) -> Self:
        """The calls of one layer on several texts of one length as one batch."""
        if len(calls) == 1:
            return calls[0]
        query, key, value = (
            torch.cat([getattr(call, name) for call in calls]) for name in ("query", "key", "value")
        )
        masks = [
            call.attn_mask.expand(len(call.query), -1, -1, -1)
            for call in calls
            if call.attn_mask is not None
        ]
        mask = torch.cat(masks) if masks else None
        return replace(calls[0], query=query, key=key, value=value, attn_mask=mask)

    def unit(self, number: int) -> Self:
        """The call on one unit of the batch alone."""
        at = slice(number, number + 1)
        mask = self.attn_mask
        if mask is not None and len(mask) > 1:
            mask = mask[at]
        query, key, value = self.query[at], self.key[at], self.value[at]
        return replace(self, query=query, key=key, value=value, attn_mask=mask)


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

    def layer_calls(self, part: int = 0) -> list[LayerCall]:
        """Each layer's call in the exact model, on the units that layers are measured on."""
        ...

    def first_tokens(self, count: int, unit: int = 0) -> list[int]:
        """The first tokens of one of the units that `layer_calls` records on the first part."""
        ...

    def digest(self, part: int) -> str:
        """Hash of everything that the part alone decides: its tokens, masks and what is scored."""
        ...


class LayerRecorder(nn.Module):
    """Exact attention that keeps what it was called with, masks included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        kernel: Kernel,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        self.calls.append(LayerCall(query, key, value, kernel, is_causal, attn_mask=attn_mask))
        return Exact()(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)

    def joined(self, first_row: int = 0) -> LayerCall:
        """Everything recorded, as one batch; the parts are given up, so as not to hold both."""
        call = LayerCall.joined(self.calls)
        self.calls.clear()
        return replace(call, first_row=first_row)


def exactly(layer: int) -> nn.Module:
    """Exact attention in every layer."""
    return Exact()


def evenly_spaced(available: int, wanted: int | None) -> list[int]:
    """At most `wanted` different indices spread over range(available); None = all of them."""
    if wanted is None or wanted >= available:
        return list(range(available))
    return [index * available // wanted for index in range(wanted)]
