"""Holds the kept keys of a layer's caches, which may keep different numbers of keys."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from value_aware_attention.attention import (
    AttentionState,
    attention_state,
    finite,
    without_autocast,
    working_precision,
)
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.kernels import Kernel

PAGES = 32  # of a head of average size; each head wastes half a page
ROOM = 64  # least number of later keys that a head gets room for when a buffer is full
INT8_MOST = 127
LEAST_SCALE = 1e-30  # in place of 0, that of a key of zeros


@dataclass(frozen=True)
class Pages:
    """Holds the kept keys of C = B H caches as P pages of S slots; a page belongs to one cache.

    A cache has as many pages as it needs, so memory and time are proportional to its kept keys. Its
    pages lie one after another, and only the last slots of its last page are unused.

    Attributes:
        bias: Added to log kappa: the log-weight of a key, -inf in an unused slot; None = all 0.
        cache: The cache of each page, ascending.
        is_weighted: Whether a key has a log-weight other than 0.
        scale: Scales of keys and of values in int8; None = they are stored as they are.
    """

    key: Float[Tensor, "P S D"] | Int8[Tensor, "P S D"]
    value: Float[Tensor, "P S V"] | Int8[Tensor, "P S V"]
    bias: Float[Tensor, "P S"] | None
    cache: Int[Tensor, " P"]
    caches: int
    is_weighted: bool
    scale: Float[Tensor, "2 P S"] | None = None

    @classmethod
    def of(cls, held: "Slots") -> Self:
        """Cuts the used slots of each cache into pages."""
        counts, is_weighted = held.on_host
        size = max(1, sum(counts) // len(counts) // PAGES)
        pages = [-(-count // size) for count in counts]
        used = held.used.flatten(0, 1)
        cache = torch.arange(len(pages)).repeat_interleave(torch.tensor(pages)).to(used.device)
        first = [number * size for of_cache in pages for number in range(of_cache)]
        places = torch.tensor(first, dtype=torch.long)[:, None] + torch.arange(size)
        ends = torch.tensor(counts).repeat_interleave(torch.tensor(pages))[:, None]
        is_used = (places < ends).to(used.device)
        order = used.int().argsort(dim=-1, descending=True, stable=True)
        places = places.clamp_max(order.shape[-1] - 1).to(used.device)
        at = cache[:, None], order[cache[:, None], places]
        key, value, bias = (x.flatten(0, 1)[at] for x in (held.key, held.value, held.bias))
        needs_bias = is_weighted or any(count % size for count in counts)
        bias = bias.masked_fill(~is_used, -torch.inf)
        return cls(key, value, bias if needs_bias else None, cache, len(counts), is_weighted)

    def in_int8(self) -> Self:
        """Rounds each key and value to multiples of its largest magnitude over 127, in fp32.

        Raises ValueError for tensors that require gradients, which rounding has not.
        """
        if self.key.requires_grad or self.value.requires_grad:
            raise ValueError(
                "bits is 8, and rounded keys have no gradients: call the model under "
                "torch.no_grad(), or take bits=None"
            )
        wide = self.key.float(), self.value.float()
        scales = [(x.abs().amax(dim=-1) / INT8_MOST).clamp_min(LEAST_SCALE) for x in wide]
        key, value = (
            (x / scale[..., None]).round().to(torch.int8)
            for x, scale in zip(wide, scales, strict=True)
        )
        return replace(self, key=key, value=value, scale=torch.stack(scales))

    def restored(self) -> Self:
        """Returns the pages with floating-point keys and values: fp32 where they are in int8."""
        if self.scale is None:
            return self
        key, value = self.scale[..., None]
        return replace(self, key=self.key * key, value=self.value * value, scale=None)

    @property
    def is_used(self) -> Bool[Tensor, "P S"]:
        """Returns a mask of the slots that hold a key."""
        of_every_slot = torch.zeros_like(self.key[..., 0])
        return (of_every_slot if self.bias is None else self.bias) > -torch.inf

    def take(self, texts: Int[Tensor, " T"], heads: int) -> Self:
        """Returns the pages of some texts; repeats are allowed."""
        of_text = [(self.cache // heads == text).nonzero()[:, 0] for text in texts]
        sizes = torch.tensor([len(pages) for pages in of_text], device=self.cache.device)
        at = torch.cat(of_text)
        cache = self.cache[at] % heads
        cache += torch.arange(len(texts), device=at.device).repeat_interleave(sizes) * heads
        return replace(
            self, key=self.key[at], value=self.value[at], cache=cache, caches=len(texts) * heads,
            bias=None if self.bias is None else self.bias[at],
            scale=None if self.scale is None else self.scale[:, at],
        )  # fmt: skip

    def state(self, query: Float[Tensor, "C N D"], kernel: Kernel) -> AttentionState:
        """Computes the attention state of each cache's queries over its keys."""
        pages = self.restored()
        scores = kernel.log_similarity(query[self.cache], working_precision(pages.key))
        if self.bias is not None:
            scores = scores + self.bias[:, None].to(scores.dtype)
        return _summed(
            attention_state(scores, working_precision(pages.value)), self.cache, self.caches
        )

    @cached_property
    def spans(self) -> Int[Tensor, "2 C"]:
        """Holds the slot where each cache begins, and the number of its keys."""
        sizes, used = torch.full_like(self.cache, self.key.shape[1]), self.is_used.sum(dim=-1)
        taken, counts = (
            sizes.new_zeros(self.caches).index_add(0, self.cache, x) for x in (sizes, used)
        )
        return torch.stack([taken.cumsum(dim=0) - taken, counts])

    def moved(self, key: Float[Tensor, "T D"], value: Float[Tensor, "T V"]) -> Self:
        """Returns the pages whose keys and values are the first rows of buffers."""
        return replace(
            self,
            key=key[: self.slots].view_as(self.key),
            value=value[: self.slots].view_as(self.value),
        )

    @property
    def slots(self) -> int:
        """Counts the slots of all pages."""
        return self.key[..., 0].numel()

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all tensors."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))


@dataclass(frozen=True)
class Room:
    """Holds pages and the later keys of C = B H caches in one buffer, and values in another.

    The slots of all pages come first, then each cache's later keys, with room for L of them. So a
    later key is appended without a copy of the others.
    """

    key: Float[Tensor, "T D"]
    value: Float[Tensor, "T V"]
    later_key: Float[Tensor, "B H L D"]
    later_value: Float[Tensor, "B H L V"]
    pages: Pages | None  # the same pages, as views of the buffers

    @classmethod
    def of(
        cls,
        key: Float[Tensor, "B H M D"],
        value: Float[Tensor, "B H M V"],
        pages: Pages | None,
        spare: int,
    ) -> Self:
        """Copies later keys and pages into buffers with room for `spare` more keys a cache."""
        slots = 0 if pages is None else pages.slots
        paged = (key[:0], value[:0]) if pages is None else (pages.key, pages.value)
        room = [
            torch.cat([x, x.new_empty(*x.shape[:2], spare, x.shape[3])], dim=2)
            for x in (key, value)
        ]
        keys, values = (
            torch.cat([x.reshape(-1, y.shape[3]), y.flatten(0, 2)])
            for x, y in zip(paged, room, strict=True)
        )
        later = keys[slots:].view_as(room[0]), values[slots:].view_as(room[1])
        return cls(keys, values, *later, None if pages is None else pages.moved(keys, values))

    def has(self, key: Float[Tensor, "B H M D"], tokens: int) -> bool:
        """Returns whether `key` lies in this buffer, which can take this many tokens after it."""
        return (
            key.data_ptr() == self.later_key.data_ptr()
            and key.shape[2] + tokens <= self.later_key.shape[2]
            and (torch.is_inference_mode_enabled() or not self.key.is_inference())
        )

    def append(
        self, length: int, key: Float[Tensor, "B H N D"], value: Float[Tensor, "B H N V"]
    ) -> tuple[Float[Tensor, "B H M D"], Float[Tensor, "B H M V"]]:
        """Writes keys and values after the first `length`; returns all up to these."""
        tokens = key.shape[2]
        self.later_key.narrow(2, length, tokens).copy_(key)
        self.later_value.narrow(2, length, tokens).copy_(value)
        after = length + tokens
        return self.later_key.narrow(2, 0, after), self.later_value.narrow(2, 0, after)

    @cached_property
    def bounds(self) -> Int[Tensor, " 2C+1"]:
        """Returns the rows of the buffers where the pages, then the later keys of caches begin."""
        assert self.pages is not None
        ends = torch.arange(self.pages.caches + 1, device=self.key.device)
        ends = self.pages.slots + ends * self.later_key.shape[2]
        return torch.cat([self.pages.spans[0], ends]).int()


@dataclass(frozen=True)
class Slots:
    """Holds copies of the kept keys of a layer's caches, in R slots each.

    Attributes:
        bias: Added to log kappa: the log-weight of a key, -inf in an unused slot.
        sizes: Those of `KeptKeys`; None = a device has to be asked.
    """

    key: Float[Tensor, "B H R D"]
    value: Float[Tensor, "B H R V"]
    bias: Float[Tensor, "B H R"]
    sizes: list[int] | None = None

    @classmethod
    def of(
        cls, choice: KeptKeys, key: Float[Tensor, "B H M D"], value: Float[Tensor, "B H M V"]
    ) -> Self:
        """Copies the kept keys of a layer, with refitted values if there are any."""
        indices, bias = (x.reshape(*key.shape[:2], -1) for x in (choice.indices, choice.log_weight))
        at = indices[..., None]
        taken = key.gather(2, at.expand(*indices.shape, key.shape[-1]))
        values = (
            value.gather(2, at.expand(*indices.shape, value.shape[-1]))
            if choice.value is None
            else choice.value.reshape(*indices.shape, -1).to(value.dtype)
        )
        if choice.value is not None and taken.requires_grad:
            taken.register_hook(_refuse_gradient)
        return cls(taken, values, bias, choice.sizes)

    def with_mean(
        self, choice: KeptKeys, key: Float[Tensor, "B H M D"], value: Float[Tensor, "B H M V"],
        visible: Bool[Tensor, "B 1 1 M"] | None,
    ) -> Self:  # fmt: skip
        """Adds a slot with the mean of the keys that each cache dropped, and of their values.

        Its log-weight is the log of their number. It is unused in a cache that dropped none, and
        padding is not counted.
        """
        kept = torch.zeros(key.shape[:3], dtype=self.bias.dtype, device=key.device)
        kept.scatter_add_(2, choice.indices.reshape(self.bias.shape), self.used.to(kept.dtype))
        dropped = (kept == 0).to(kept.dtype)
        dropped = dropped if visible is None else dropped * visible[:, 0]
        number = dropped.sum(dim=-1, keepdim=True)
        shares = (dropped / number.clamp_min(1))[..., None, :]
        with without_autocast(key):
            of_keys, of_values = (
                torch.cat([held, (shares @ x.to(shares.dtype)).to(x.dtype)], dim=2)
                for held, x in ((self.key, key), (self.value, value))
            )
        return type(self)(of_keys, of_values, torch.cat([self.bias, number.log()], dim=-1))

    @property
    def used(self) -> Bool[Tensor, "B H R"]:
        """Returns a mask of the slots that hold a key."""
        return self.bias > -torch.inf

    @cached_property
    def on_host(self) -> tuple[list[int], bool]:
        """Returns the number of keys of each cache, and whether one has a log-weight other than 0.

        If the choice does not say, this waits for the device once.
        """
        if self.sizes is not None:
            return self.sizes, False
        is_weighted = ((self.bias != 0) & self.used).any()
        *numbers, weighted = torch.cat(
            [self.used.flatten(0, 1).sum(dim=-1), is_weighted[None].long()]
        ).tolist()
        return numbers, bool(weighted)


def _refuse_gradient(_: Tensor) -> None:
    raise ValueError("refitted values have no gradients; choose keys without a refit to train")


def _summed(state: AttentionState, cache: Int[Tensor, " P"], caches: int) -> AttentionState:
    """Merges the states of the pages of each cache."""
    largest = state.log_scale.new_full((caches, *state.log_scale.shape[1:]), -torch.inf)
    at = cache[:, None, None].expand_as(state.log_scale)
    largest = largest.scatter_reduce(0, at, state.log_scale, "amax")
    factor = (state.log_scale - finite(largest)[cache]).exp()
    none = state.values.new_zeros(caches, *state.values.shape[1:])
    return AttentionState(
        none.index_add(0, cache, factor * state.values),
        torch.zeros_like(largest).index_add(0, cache, factor * state.total),
        largest,
    )
