"""Describes one attention call: tensors, kernel, mask and layer, and derived values."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.arguments import check_at_least
from value_aware_attention.attention import (
    attention_over,
    check_inputs,
    promoted,
    visibility,
    weights_over,
    working_precision,
)
from value_aware_attention.kernels import Kernel

uncompiled = torch._disable_dynamo
"""Excludes a function from compilation. `torch.compiler.disable` does the same, but imports the
compiler when the function is defined"""
Rotary = Callable[[Tensor, Tensor], Tensor]
"""(queries (..., N, D), shift (N or 1)) -> the queries rotated to positions `shift` later."""
Arguments = dict[str, Any]
"""Arguments of a call by their names"""
_MAX_ELEMENTS: ContextVar[int] = ContextVar("max_elements", default=2**24)
_COLLECTED: ContextVar["Collected | None"] = ContextVar("collected", default=None)
BYTES_PER_ELEMENT = 64
"""Peak memory of a method in bytes, per element of a block's largest matrix."""


@contextmanager
def chunked(elements: int) -> Iterator[None]:
    """Limits the largest matrix of a block of queries to `elements` elements within the context.

    Outside a context the limit is 2**24, 64 MiB of fp32. A single query may exceed it. Inputs and
    outputs are not counted. The block size changes results only by rounding. Raises ValueError for
    elements below 1.
    """
    # 2**62 is more than any machine holds, and small enough for torch's sizes
    token = _MAX_ELEMENTS.set(min(check_at_least(1, elements=elements), 2**62))
    try:
        yield
    finally:
        _MAX_ELEMENTS.reset(token)


def max_elements() -> int:
    """Returns the limit of `chunked` in this context."""
    return _MAX_ELEMENTS.get()


def max_elements_within(memory_gib: float) -> int:
    """Converts memory in GiB into elements for `chunked`: 2**24 per GiB.

    The factor was measured over all methods (`benchmarks/evaluation_memory.py`). Raises ValueError
    unless `memory_gib` is above 0 and finite.
    """
    if not 0 < memory_gib < math.inf:
        raise ValueError(f"memory_gib is {memory_gib}; it must be above 0 and finite")
    return max(1, int(memory_gib * 2**30) // BYTES_PER_ELEMENT)


@dataclass(frozen=True)
class Layer:
    """Holds facts about a layer that `hugging_face.replace_attention` finds for methods.

    Attributes:
        projection: Output projection W_o of each query head, without bias.
        rotary: Rotates queries to later positions; None for a model without rotary positions.
        repeated: Queries, keys and values (B, *heads, T, .) of a second reading of the prefix.
        number: Index of the layer in the model; None for bare tensors.
        kept: Choices (`caches.KeptKeys`) made together with those of the other layers, in order.
    """

    projection: Float[Tensor, "*heads V E"] | None = None
    rotary: Rotary | None = None
    repeated: tuple[Tensor, Tensor, Tensor] | None = None
    number: int | None = None
    kept: Any = None


@dataclass(frozen=True)
class Call:
    """Holds queries, keys and values in at least fp32, their kernel, and which pairs are visible.

    Masks, weights and centred values are computed on first use and cached.

    Attributes:
        rows: Positions of these queries in the whole call, if this is a part of one.
        queries: The number of queries of the whole call.
        dtype: The precision of the output that the caller expects.
        layer: Facts about the model's layer that made the call, for methods that use them.
        first_row: Earlier queries only give context: errors and statistics exclude them.
    """

    query: Float[Tensor, "*#batch N D"]
    key: Float[Tensor, "*#batch M D"]
    value: Float[Tensor, "*#batch M V"]
    kernel: Kernel
    attn_mask: Bool[Tensor, "*#batch #N M"] | None
    is_causal: bool
    rows: Int[Tensor, "*#batch N"]
    queries: int
    dtype: torch.dtype
    layer: Layer = field(default_factory=Layer)
    first_row: int = 0

    @classmethod
    def of(
        cls,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel,
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
        layer: Layer | None = None,
    ) -> "Call":
        """Checks the inputs, with the ValueErrors of `attention`, and raises their precision."""
        check_inputs(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
        queries, keys = query.shape[-2], key.shape[-2]
        if attn_mask is not None:
            attn_mask = torch.atleast_2d(attn_mask)
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], keys)
        rows, dtype = torch.arange(queries, device=query.device), value.dtype
        query, key, value = map(working_precision, promoted(query, key, value))
        return cls(
            query, key, value, kernel, attn_mask, is_causal, rows, queries, dtype, layer or Layer()
        )

    @classmethod
    def joined(cls, calls: Sequence[Self]) -> Self:
        """Joins calls of one layer (B, H, N, .) on texts of one length into one batch."""
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
        return replace(
            calls[0], query=query, key=key, value=value,
            attn_mask=torch.cat(masks) if masks else None,
        )  # fmt: skip

    def arguments(self) -> Arguments:
        """Returns the arguments of a method or of `attention`, in the caller's precision."""
        tensors = {name: getattr(self, name).to(self.dtype) for name in ("query", "key", "value")}
        return tensors | {
            "kernel": self.kernel, "attn_mask": self.attn_mask, "is_causal": self.is_causal,
        }  # fmt: skip

    @property
    def keys(self) -> int:
        """Returns the number of keys M."""
        return self.key.shape[-2]

    @property
    def batch(self) -> tuple[int, ...]:
        """Returns the leading dimensions, broadcast."""
        return tuple(
            torch.broadcast_shapes(*(x.shape[:-2] for x in (self.query, self.key, self.value)))
        )

    @property
    def is_empty(self) -> bool:
        """Returns whether there are no queries or no keys; any output is then zeros."""
        return 0 in (*self.batch, self.query.shape[-2], self.keys)

    def zeros(self) -> Float[Tensor, "*batch N V"]:
        """Returns the output of queries that see nothing."""
        return self.value.new_zeros(*self.batch, self.query.shape[-2], self.value.shape[-1])

    @cached_property
    def visible(self) -> Bool[Tensor, "*#batch #N M"] | None:
        """Combines `attn_mask` and `is_causal` into a mask of the visible pairs; None = all."""
        return visibility(self.attn_mask, self.is_causal, self.rows, self.keys)

    @cached_property
    def weights(self) -> Float[Tensor, "*batch N M"]:
        """Computes the exact attention distribution alpha."""
        return weights_over(self.query, self.key, self.kernel, self.visible)

    def output(self) -> Float[Tensor, "*batch N V"]:
        """Computes the exact output o, block by block."""
        return torch.cat(
            [
                attention_over(block.query, self.key, self.value, self.kernel, block.visible)
                for block in self.blocks()
            ],
            dim=-2,
        )

    @property
    def seen(self) -> "Call":
        """Replaces values that no query sees by 0."""
        if self.visible is None:
            return self
        return replace(self, value=self.value.where(self.visible.any(dim=-2)[..., None], 0.0))

    @cached_property
    def centred(self) -> "Call":
        """Subtracts from all values the mean of the values that the first row sees.

        Distances between values stay the same, and values far from the origin keep more digits. The
        first row that sees any key is used so that, under a causal mask, no value changes an
        earlier row, not even by rounding. Values that no query sees become 0.
        """
        if self.visible is None or 0 in self.visible.shape:
            return replace(self, value=self.value - self.value.mean(dim=-2, keepdim=True))
        visible = self.visible
        first = visible.any(dim=-1, keepdim=True).int().argmax(dim=-2, keepdim=True)
        first = visible.take_along_dim(first, dim=-2).mT
        total = self.value.where(first, 0.0).sum(dim=-2, keepdim=True)
        mean = total / first.sum(dim=-2, keepdim=True).clamp_min(1)
        return replace(self, value=(self.value - mean).where(visible.any(dim=-2)[..., None], 0.0))

    def largest_squared_norm(self) -> Float[Tensor, "*batch N"]:
        """Computes the largest ||v||^2 that each query sees, block by block."""
        if self.is_empty:
            return self.value.new_zeros(*self.batch, self.query.shape[-2])
        norms, largest = self.value.square().sum(dim=-1)[..., None, :], []
        for block in self.blocks():
            visible = norms if block.visible is None else norms.where(block.visible, 0.0)
            largest.append(visible.amax(dim=-1).expand(*self.batch, block.query.shape[-2]))
        return torch.cat(largest, dim=-1)

    def at(self, rows: Int[Tensor, "*#batch K"], dtype: torch.dtype | None = None) -> "Call":
        """Returns the call of the queries at `rows`, which may differ between heads.

        The new call has an explicit mask instead of `is_causal`. `dtype` None keeps the precision.
        """
        rows = rows.expand(*self.batch, -1)
        at, places = rows[..., None], self.rows[rows]
        mask = self.attn_mask
        if mask is not None:
            mask = mask.expand(*self.batch, self.query.shape[-2], -1).take_along_dim(at, dim=-2)
        mask = visibility(mask, self.is_causal, places, self.keys)
        call = replace(
            self, query=self.query.take_along_dim(at, dim=-2), attn_mask=mask, is_causal=False,
            rows=places,
        )  # fmt: skip
        if dtype is None:
            return call
        query, key, value = (x.to(dtype) for x in (call.query, call.key, call.value))
        return replace(call, query=query, key=key, value=value, dtype=dtype)

    def unit(
        self, number: int, *, heads: slice = slice(None), positions: int | None = None
    ) -> "Call":
        """Returns the call (B, H, N, .) of one unit; `positions` limits it to the first tokens."""
        row, tokens = slice(number, number + 1), slice(positions)
        query, key, value = (x[row, heads, tokens] for x in (self.query, self.key, self.value))
        mask = (
            None
            if self.attn_mask is None
            else self.attn_mask.expand(*self.batch, -1, -1)[row, heads, tokens, tokens]
        )
        return replace(
            self, query=query, key=key, value=value, attn_mask=mask, rows=self.rows[tokens]
        )

    def take(self, which: slice | Int[Tensor, " K"]) -> "Call":
        """Returns the call of some of the queries."""
        mask = self.attn_mask
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., which, :]
        return replace(
            self, query=self.query[..., which, :], attn_mask=mask, rows=self.rows[..., which]
        )

    def blocks(self, elements: int = 0) -> Iterator["Call"]:
        """Cuts the call into blocks of queries, to avoid holding the N x M weights of all heads.

        A call that fits is a single block. `elements` is the number per query, if it exceeds the M
        weights.
        """
        heads, queries = torch.Size(self.batch).numel(), self.query.shape[-2]
        rows = max(1, max_elements() // max(1, heads * max(self.keys, elements)))
        if queries <= rows:
            yield self
        else:
            for first in range(0, queries, rows):
                yield self.take(slice(first, first + rows))


Collected = list[tuple[Bool[Tensor, ""], Callable[[], str]]]
"""Conditions under which a call is refused, and the messages"""


@contextmanager
def collecting(refusals: Collected) -> Iterator[None]:
    """Lets `refuse` collect conditions within the context, since reading each waits for a GPU."""
    token = _COLLECTED.set(refusals)
    try:
        yield
    finally:
        _COLLECTED.reset(token)


def refuse(is_refused: Bool[Tensor, ""], message: Callable[[], str]) -> None:
    """Raises ValueError if a condition on the device holds, unless it is to be collected."""
    if (collected := _COLLECTED.get()) is not None:
        collected.append((is_refused, message))
    elif is_refused:
        raise ValueError(message())


def read_refusals(refusals: Collected) -> None:
    """Reads all collected conditions at once; raises ValueError for the first that holds."""
    if refusals and torch.stack([x.to(refusals[0][0].device) for x, _ in refusals]).any():
        raise ValueError(next(message() for is_refused, message in refusals if is_refused))


class Stopwatch:
    """Times pieces of work. It does not wait for a GPU until the seconds are read."""

    def __init__(self) -> None:
        self.pieces: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time within the context."""
        begun = _now()
        yield
        self.pieces.append((begun, _now()))

    def seconds(self) -> float:
        """Returns the seconds of all pieces, once they are done."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            return sum(begun.elapsed_time(ended) for begun, ended in self.pieces) / 1000
        return sum(ended - begun for begun, ended in self.pieces)


def _now() -> Any:
    """Returns the time on the device's clock: an event of a GPU, or seconds."""
    if not torch.accelerator.is_available():
        return perf_counter()
    event = torch.Event(enable_timing=True)
    event.record()
    return event


def seconds_now() -> float:
    """Reads the clock in seconds after all work is done, including a GPU's."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()
