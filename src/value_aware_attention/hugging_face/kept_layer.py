"""Holds a layer of a key-value cache after most of its keys were dropped."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from value_aware_attention.attention import (
    AttentionState,
    attention_state,
    finite,
    working_precision,
)
from value_aware_attention.kernels import Kernel

PAGES = 32
"""Pages of a head of the mean size, where heads keep different numbers of keys: half of a page is
wasted by each"""


@dataclass(frozen=True)
class Pages:
    """Holds the kept keys of C = B H caches as P pages of S slots, each of one cache.

    Where all caches keep r keys each is one page of r slots; else a cache has as many pages as it
    needs, so that memory and time follow the keys that are kept.
    """

    key: Float[Tensor, "P S D"]
    value: Float[Tensor, "P S V"]
    bias: Float[Tensor, "P S"] | None
    """Added to log kappa: the log-weight of a key, -inf in an unused slot. None: all are 0."""
    cache: Int[Tensor, " P"]
    """The cache of each page, ascending"""
    counts: Int[Tensor, "B H"]
    """Keys of each cache"""
    is_even: bool
    """True: every cache has one page."""

    @classmethod
    def of(cls, kept: Any, key: Float[Tensor, "B H M D"], value: Float[Tensor, "B H M V"]) -> Self:
        """Copies the kept keys of a layer, with their refitted values where there are any.

        `kept` is a `caches.KeptKeys`.
        """
        indices, weight = (x.reshape(*key.shape[:2], -1) for x in (kept.indices, kept.log_weight))
        used = weight > -torch.inf
        counts = used.sum(dim=-1)
        order = used.int().argsort(dim=-1, descending=True, stable=True).flatten(0, 1)
        size = max(1, int(counts.max()))
        is_even = bool((counts == size).all())
        if not is_even:
            size = max(1, int(counts.float().mean()) // PAGES)
        places = torch.arange(-(-int(counts.max()) // size) * size, device=key.device)
        is_used = (places < counts.flatten()[:, None]).unflatten(-1, (-1, size))
        slots = order[:, places.clamp_max(order.shape[-1] - 1)].unflatten(-1, (-1, size))
        cache, number = is_used.any(dim=-1).nonzero(as_tuple=True)
        owner, slot, is_used = cache[:, None], slots[cache, number], is_used[cache, number]
        at = indices.flatten(0, 1)[owner, slot]
        bias = weight.flatten(0, 1)[owner, slot].masked_fill(~is_used, -torch.inf)
        if kept.value is None:
            values = value.flatten(0, 1)[owner, at]
        else:
            values = kept.value.flatten(0, -3)[owner, slot].to(value.dtype)
        keys = key.flatten(0, 1)[owner, at]
        return cls(keys, values, bias if (bias != 0).any() else None, cache, counts, is_even)

    def take(self, texts: Int[Tensor, " T"]) -> Self:
        """Returns the pages of some of the texts, which may be named several times."""
        heads = self.counts.shape[1]
        of_text = [(self.cache // heads == text).nonzero()[:, 0] for text in texts]
        sizes = torch.tensor([len(pages) for pages in of_text], device=self.cache.device)
        at = torch.cat(of_text)
        cache = self.cache[at] % heads
        cache += torch.arange(len(texts), device=at.device).repeat_interleave(sizes) * heads
        bias = None if self.bias is None else self.bias[at]
        return replace(
            self, key=self.key[at], value=self.value[at], bias=bias, cache=cache,
            counts=self.counts[texts],
        )  # fmt: skip

    def state(self, query: Float[Tensor, "C N D"], kernel: Kernel) -> AttentionState:
        """Computes the attention state of each cache's queries over its keys."""
        query = query if self.is_even else query[self.cache]
        scores = kernel.log_similarity(query, working_precision(self.key))
        if self.bias is not None:
            scores = scores + self.bias[:, None].to(scores.dtype)
        state = attention_state(scores, working_precision(self.value))
        return state if self.is_even else _summed(state, self.cache, self.counts.numel())

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all tensors."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))


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


class KeptLayer(DynamicLayer):
    """Holds the keys that a cache method kept of a prefix, and those of all later tokens.

    `keys` and `values` are the later ones; positions and lengths count every token that was seen.
    Only the attention of the open `compressed_cache` that made it can read it: any other would see
    the later keys alone.
    """

    def __init__(self, pages: Pages, prefix: int, is_open: Callable[[], bool]) -> None:
        super().__init__()
        self.pages: Pages | None = pages
        self.prefix = prefix
        self.is_open = is_open
        self.lazy_initialization(pages.key, pages.value)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values; returns those after the prefix."""
        if not self.is_open():
            raise ValueError(
                "this cache was compressed in a compressed_cache that is closed; a model can read "
                "it only within that context"
            )
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **options)
        return found

    def attend(
        self,
        query: Float[Tensor, "B heads N D"],
        kernel: Kernel,
        visible: Bool[Tensor, "#B #heads #N L"] | None,
        *,
        is_causal: bool,
    ) -> Float[Tensor, "B heads N V"]:
        """Computes attention over the kept keys and the visible later ones; None = all.

        `is_causal`: the queries are the last of the later tokens, and see those up to them.
        """
        assert self.pages is not None and self.keys is not None and self.values is not None
        texts, heads = self.pages.counts.shape
        shape = (texts, heads, -1, *query.shape[2:])
        own = working_precision(query).reshape(shape).flatten(0, 1)  # (C, G, N, D)
        rows = own.flatten(1, 2)
        key, value = (working_precision(x.flatten(0, 1)) for x in (self.keys, self.values))
        scores = kernel.log_similarity(rows, key)
        if is_causal:
            own_past = torch.ones_like(scores[0, : query.shape[2]], dtype=torch.bool)
            own_past = own_past.tril(key.shape[1] - query.shape[2])
            visible = own_past[None, None] if visible is None else visible & own_past
        if visible is not None:
            seen = visible.expand(*query.shape[:3], -1).reshape(scores.shape)
            scores = scores.masked_fill(~seen, -torch.inf)
        state = self.pages.state(rows, kernel).merge(attention_state(scores, value))
        return state.output().view(*query.shape[:-1], -1).to(self.values.dtype)

    @property
    def later(self) -> int:
        """Returns the number of tokens after the prefix."""
        length: int = super().get_seq_length()
        return length

    @property
    def nbytes(self) -> int:
        """Counts the bytes of the kept keys and of those of later tokens."""
        later = sum(x.nbytes for x in (self.keys, self.values) if x is not None)
        return later + (0 if self.pages is None else self.pages.nbytes)

    def get_seq_length(self) -> int:
        return self.prefix + self.later

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and offset of the later keys, the only ones that are masked."""
        return self.later + query_length, self.prefix

    def crop(self, tokens_to_remove: int) -> None:
        """Removes later tokens, a negative number of them; ValueError beyond."""
        if abs(tokens_to_remove) > self.later:
            raise ValueError(
                f"{abs(tokens_to_remove)} tokens are to be removed; only the {self.later} after "
                f"the compressed prefix can be (assisted decoding needs an uncompressed cache)"
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Empties the layer, which is then as one that was never filled."""
        super().reset()
        self.pages, self.prefix = None, 0

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Moves the batch dimension of what it holds."""
        if self.pages is not None:
            texts = torch.arange(len(self.pages.counts), device=self.pages.cache.device)
            self.pages = self.pages.take(move(texts))
        if self.keys is not None and self.values is not None and self.later:
            self.keys, self.values = move(self.keys), move(self.values)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._move(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._move(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._move(lambda x: x[indices.to(x.device)])
