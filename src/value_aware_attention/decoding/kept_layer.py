"""Holds a layer of a key-value cache after most keys were dropped, once or repeatedly."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from value_aware_attention.attention import (
    AttentionState,
    attention_state,
    finite,
    working_precision,
)
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.call import uncompiled
from value_aware_attention.kernels import Kernel

PAGES = 32
"""Pages of a head of average size, if heads keep different numbers of keys; each head wastes half a
page"""


@dataclass(frozen=True)
class Pages:
    """Holds the kept keys of C = B H caches as P pages of S slots; a page belongs to one cache.

    A cache has as many pages as it needs, so memory and time are proportional to its kept keys.
    """

    key: Float[Tensor, "P S D"]
    value: Float[Tensor, "P S V"]
    bias: Float[Tensor, "P S"] | None
    """Added to log kappa: the log-weight of a key, -inf in an unused slot; None = all 0."""
    cache: Int[Tensor, " P"]
    """The cache of each page, ascending"""
    caches: int

    @classmethod
    def of(cls, held: "Slots") -> Self:
        """Cuts the used slots of each cache into pages."""
        used = held.used.flatten(0, 1)
        counts = used.sum(dim=-1)
        order = used.int().argsort(dim=-1, descending=True, stable=True)
        size = max(1, int(counts.float().mean()) // PAGES)
        places = torch.arange(-(-int(counts.max()) // size) * size, device=used.device)
        is_used = (places < counts[:, None]).unflatten(-1, (-1, size))
        slots = order[:, places.clamp_max(order.shape[-1] - 1)].unflatten(-1, (-1, size))
        cache, number = is_used.any(dim=-1).nonzero(as_tuple=True)
        at = cache[:, None], slots[cache, number]
        key, value, bias = (x.flatten(0, 1)[at] for x in (held.key, held.value, held.bias))
        bias = bias.masked_fill(~is_used[cache, number], -torch.inf)
        return cls(key, value, bias if (bias != 0).any() else None, cache, len(used))

    def take(self, texts: Int[Tensor, " T"], heads: int) -> Self:
        """Returns the pages of some texts; repeats are allowed."""
        of_text = [(self.cache // heads == text).nonzero()[:, 0] for text in texts]
        sizes = torch.tensor([len(pages) for pages in of_text], device=self.cache.device)
        at = torch.cat(of_text)
        cache = self.cache[at] % heads
        cache += torch.arange(len(texts), device=at.device).repeat_interleave(sizes) * heads
        bias = None if self.bias is None else self.bias[at]
        return replace(
            self, key=self.key[at], value=self.value[at], bias=bias, cache=cache,
            caches=len(texts) * heads,
        )  # fmt: skip

    def state(self, query: Float[Tensor, "C N D"], kernel: Kernel) -> AttentionState:
        """Computes the attention state of each cache's queries over its keys."""
        scores = kernel.log_similarity(query[self.cache], working_precision(self.key))
        if self.bias is not None:
            scores = scores + self.bias[:, None].to(scores.dtype)
        state = attention_state(scores, working_precision(self.value))
        return _summed(state, self.cache, self.caches)

    @property
    def slots(self) -> int:
        """Counts the slots of all pages."""
        return self.key[..., 0].numel()

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all tensors."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))


@dataclass(frozen=True)
class Slots:
    """Holds copies of the kept keys of a layer's caches, in R slots each."""

    key: Float[Tensor, "B H R D"]
    value: Float[Tensor, "B H R V"]
    bias: Float[Tensor, "B H R"]
    """Added to log kappa: the log-weight of a key, -inf in an unused slot"""

    @classmethod
    def of(
        cls, choice: KeptKeys, key: Float[Tensor, "B H M D"], value: Float[Tensor, "B H M V"]
    ) -> Self:
        """Copies the kept keys of a layer, with refitted values if there are any."""
        indices, bias = (x.reshape(*key.shape[:2], -1) for x in (choice.indices, choice.log_weight))
        at = indices[..., None]
        values = value.take_along_dim(at, dim=-2) if choice.value is None else choice.value
        shape, taken = (*indices.shape, value.shape[-1]), key.take_along_dim(at, dim=-2)
        if choice.value is not None and taken.requires_grad:
            taken.register_hook(_refuse_gradient)
        return cls(taken, values.reshape(shape).to(value.dtype), bias)

    @property
    def used(self) -> Bool[Tensor, "B H R"]:
        """Returns a mask of the slots that hold a key."""
        return self.bias > -torch.inf


def _refuse_gradient(_: Tensor) -> None:
    raise ValueError("refitted values have no gradients; choose keys without a refit to train")


def _summed(state: AttentionState, cache: Int[Tensor, " P"], caches: int) -> AttentionState:
    """Merges the states of the pages of each cache."""
    shape = (caches, *state.log_scale.shape[1:])
    largest = state.log_scale.new_full(shape, -torch.inf)
    at = cache[:, None, None].expand_as(state.log_scale)
    largest = largest.scatter_reduce(0, at, state.log_scale, "amax")
    factor = (state.log_scale - finite(largest)[cache]).exp()
    values = state.values.new_zeros(caches, *state.values.shape[1:])
    return AttentionState(
        values.index_add(0, cache, factor * state.values),
        torch.zeros_like(largest).index_add(0, cache, factor * state.total),
        largest,
    )


def filled(layer: object) -> tuple[Float[Tensor, "B H M D"], Float[Tensor, "B H M V"]]:
    """Returns the keys and values of a cache layer that a model has filled."""
    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


class KeptLayer(DynamicLayer):
    """Holds the kept keys of a prefix, and the keys of all later tokens.

    If all caches keep equally many keys, `keys` and `values` hold the kept keys, then the later
    ones. Otherwise they hold the later keys, and `pages` the kept ones. Positions and lengths count
    all tokens read. Only the attention of the `compressed_cache` that made the layer can read it,
    while open; any other attention would see wrong keys.
    """

    def __init__(self, held: Slots, prefix: int, is_read: Callable[[], bool]) -> None:
        super().__init__()
        self.is_read = is_read
        self.lazy_initialization(held.key, held.value)
        self.hold(held, prefix)

    def hold(self, held: Slots, prefix: int) -> None:
        """Replaces the content by the kept keys of a prefix, without later keys."""
        self.prefix = prefix
        self.counts: Int[Tensor, "B H"] = held.used.sum(dim=-1)
        self.bias: Float[Tensor, "B H R"] | None = None
        self.pages: Pages | None = None
        if self.is_even(self.counts, slots := held.bias.shape[-1]):
            self.slots, self.keys, self.values = slots, held.key, held.value
            self.bias = held.bias if (held.bias != 0).any() else None
        else:
            self.slots, self.pages = 0, Pages.of(held)
            self.keys, self.values = (x[:, :, :0].clone() for x in (held.key, held.value))

    def is_even(self, counts: Int[Tensor, "B H"], slots: int) -> bool:
        """Returns whether `keys` stores the kept keys, because no cache has an unused slot."""
        return bool((counts == slots).all())

    @property
    def is_filled(self) -> bool:
        """Returns whether the layer holds a prefix."""
        return self.prefix > 0

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values; returns `keys` and `values`."""
        if self.is_filled and not self.is_read():
            raise ValueError(
                "this cache was compressed in a compressed_cache that is closed, or of another "
                "model; a model can read it only within that context"
            )
        return super().update(key_states, value_states, *args, **options)

    def serve(
        self,
        query: Float[Tensor, "B heads N D"],
        kernel: Kernel,
        visible: Bool[Tensor, "#B #heads #N L"] | None,
    ) -> Float[Tensor, "B heads N V"]:
        """Computes attention over the kept and later keys, including those of these queries.

        `visible` masks the later keys that each query sees, none after itself; None = all.
        """
        return self.attend(query, kernel, visible, self.later - query.shape[2])

    def attend(
        self,
        query: Float[Tensor, "B heads N D"],
        kernel: Kernel,
        visible: Bool[Tensor, "#B #heads #N L"] | None,
        first: int,
    ) -> Float[Tensor, "B heads N V"]:
        """Computes attention of queries that start `first` tokens after the prefix."""
        rows, heads = query.shape[2], self.counts.shape[1]
        last = self.slots + first + rows
        grouped = working_precision(query).unflatten(1, (heads, -1))
        grouped = grouped.flatten(0, 1).flatten(1, 2)  # (C, G N, D)
        key, value = (working_precision(x[:, :, :last].flatten(0, 1)) for x in filled(self))
        scores = kernel.log_similarity(grouped, key)
        if self.bias is not None:
            bias = self.bias.flatten(0, 1)[:, None].to(scores.dtype)
            scores[..., : self.slots].add_(bias)
        if visible is not None or rows > 1:
            past = torch.ones(rows, first + rows, dtype=torch.bool, device=query.device).tril(first)
            if visible is not None:
                past = past & visible[..., : first + rows]
            past = past.expand(*query.shape[:3], -1).reshape(*scores.shape[:2], -1)
            scores[..., self.slots :].masked_fill_(~past, -torch.inf)
        state = attention_state(scores, value)
        if self.pages is not None:
            state = state.merge(self.pages.state(grouped, kernel))
        return state.output().view(*query.shape[:-1], -1).to(filled(self)[1].dtype)

    @property
    def later(self) -> int:
        """Returns the number of tokens after the prefix."""
        return 0 if self.keys is None else self.keys.shape[-2] - self.slots

    @property
    def held(self) -> int:
        """Counts the slots for kept keys in all caches, including unused ones."""
        return self.counts.numel() * self.slots if self.pages is None else self.pages.slots

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all keys, values and bookkeeping tensors."""
        pages = 0 if self.pages is None else self.pages.nbytes
        held = (self.keys, self.values, self.bias, self.counts)
        return pages + sum(x.nbytes for x in held if x is not None)

    def get_seq_length(self) -> int:
        return self.prefix + self.later

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and offset of the later keys; only these are masked."""
        return self.later + query_length, self.prefix

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -`tokens_to_remove` later tokens; ValueError if there are fewer."""
        if -tokens_to_remove > self.later:  # transformers refuses a positive number
            raise ValueError(
                f"{-tokens_to_remove} tokens are to be removed; only the {self.later} after "
                f"the compressed prefix can be (assisted decoding needs an uncompressed cache)"
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Empties the layer, as if it had never been filled."""
        super().reset()
        self.bias = self.pages = None
        self.slots = self.prefix = 0

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Applies `move` to the batch dimension of all tensors."""
        if self.keys is None or self.values is None:
            return
        if self.is_filled:
            texts, heads = self.counts.shape
            moved = move(torch.arange(texts, device=self.keys.device))
            self.pages = None if self.pages is None else self.pages.take(moved, heads)
            self.bias = None if self.bias is None else move(self.bias)
            self.counts = move(self.counts)
        self.keys, self.values = move(self.keys), move(self.values)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.move(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.move(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.move(lambda x: x[indices.to(x.device)])


class GrowingLayer(KeptLayer):
    """Chooses again among the kept and later keys after every `every` later tokens.

    It makes the same choices as `caches.AfterPrefix` with this `every`, each before the first query
    after the `every` tokens. It thus holds at most `every` later keys, plus those of one call.
    """

    is_croppable = False

    def __init__(
        self,
        choice: KeptKeys,
        key: Float[Tensor, "B H M D"],
        value: Float[Tensor, "B H M V"],
        is_read: Callable[[], bool],
        *,
        every: int,
        choose: Callable[..., KeptKeys],
        query: Float[Tensor, "B heads M D"],
        rows: int | None,
        visible: Bool[Tensor, "B 1 1 M"] | None,
    ) -> None:
        """Starts with the first choice; holds the last `rows` queries."""
        super().__init__(Slots.of(choice, key, value), key.shape[2], is_read)
        self.every, self.choose, self.rows = every, choose, rows
        self.at: Int[Tensor, "B H R"] = choice.indices.reshape(*key.shape[:2], -1)
        """The positions of the kept keys"""
        self.visible = visible
        """The keys of the prefix that are not padding; None = all"""
        self.query = query[:, :, self._first_row(query.shape[2]) :].clone()

    def is_even(self, counts: Int[Tensor, "B H"], slots: int) -> bool:
        return True  # padding keeps its slots, because a later choice fills them

    def serve(
        self,
        query: Float[Tensor, "B heads N D"],
        kernel: Kernel,
        visible: Bool[Tensor, "#B #heads #N L"] | None,
    ) -> Float[Tensor, "B heads N V"]:
        """Computes attention like `KeptLayer`, and makes new choices when they are due."""
        self.query = torch.cat([self.query, query.detach()], dim=2)
        first, begun, parts = self.later - query.shape[2], 0, []
        if first > self.every:
            raise ValueError(
                "a call that was interrupted has left this cache half read; give a new one"
            )
        while begun < query.shape[2]:
            if first == self.every:
                self._choose_again(None if visible is None else visible[..., -1:, : self.every])
                visible = None if visible is None else visible[..., self.every :]
                first = 0
            ended = min(query.shape[2], begun + self.every - first)
            rows = slice(begun, ended) if visible is not None and visible.shape[2] > 1 else slice(1)
            pairs = None if visible is None else visible[:, :, rows]
            parts.append(self.attend(query[:, :, begun:ended], kernel, pairs, first))
            first, begun = first + ended - begun, ended
        return torch.cat(parts, dim=2)

    def _first_row(self, tokens: int) -> int:
        """Returns the first query, among all tokens so far, that a later choice observes."""
        rows = tokens if self.rows is None else self.rows
        if self.visible is None:
            return max(0, tokens - rows)
        tokens_from = self.visible[:, 0, 0].flip(-1).cumsum(dim=-1).flip(-1)
        return int((tokens_from > rows).all(dim=0).sum())

    def _choose_again(self, visible: Bool[Tensor, "#B #heads 1 E"] | None) -> None:
        """Chooses among the kept keys and the next `every` ones; `visible` is False for padding."""
        start, held = self.prefix + self.every, self.slots + self.every
        later = torch.arange(self.prefix, start, device=self.at.device)
        pool = torch.cat([self.at, later.expand(*self.at.shape[:2], -1)], dim=-1)
        key, value = (
            x.new_zeros(*x.shape[:2], start, x.shape[-1]).scatter(
                2, pool[..., None].expand(-1, -1, -1, x.shape[-1]), x[:, :, :held]
            )
            for x in filled(self)
        )
        rest = [x[:, :, held:] for x in filled(self)]
        if visible is not None or self.visible is not None:
            whole = self.query.new_ones(len(key), 1, 1, start, dtype=torch.bool)
            if self.visible is not None:
                whole[..., : self.prefix] &= self.visible
            if visible is not None:
                whole[..., self.prefix :] &= visible[:, :1]
            self.visible = whole
        rows = self.query.shape[2] - rest[0].shape[2]
        query = pad(self.query[:, :, :rows], (0, 0, start - rows, 0))
        choice = self.choose(self.counts[:, 0], pool, query, key, value, self.visible)
        self.hold(Slots.of(choice, key, value), start)
        self.keys, self.values = (
            torch.cat([x, later], dim=2) for x, later in zip(filled(self), rest, strict=True)
        )
        self.at = choice.indices.reshape(*key.shape[:2], -1)
        if self.rows is not None:
            self.query = self.query[:, :, rows - start + self._first_row(start) :].clone()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.query = self.query[:, :, : self.query.shape[2] - abs(tokens_to_remove)]

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        super().move(move)
        if self.is_filled:
            self.at, self.query = move(self.at), move(self.query)
            self.visible = None if self.visible is None else move(self.visible)
