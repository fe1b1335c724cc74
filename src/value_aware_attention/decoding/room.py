"""Holds the keys of a layer with room for later ones, so that appending copies no other key."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.decoding.pages import Pages

ROOM = 64
"""Least number of later keys that a head gets room for when its buffer is full"""


@dataclass(frozen=True)
class Room:
    """Holds pages and the later keys of C = B H caches in one buffer, and values in another.

    The slots of all pages come first, then each cache's later keys, with room for L of them.
    """

    key: Float[Tensor, "T D"]
    value: Float[Tensor, "T V"]
    later_key: Float[Tensor, "B H L D"]
    later_value: Float[Tensor, "B H L V"]
    pages: Pages | None
    """The same pages, as views of the buffers"""

    @classmethod
    def of(
        cls,
        key: Float[Tensor, "B H M D"],
        value: Float[Tensor, "B H M V"],
        pages: Pages | None,
        spare: int,
    ) -> Self:
        """Copies later keys and pages into buffers with room for `spare` more keys a cache."""
        paged = (None, None) if pages is None else (pages.key, pages.value)
        (keys, later_key), (values, later_value) = map(_buffer, paged, (key, value), (spare, spare))
        if pages is not None:
            slots = pages.slots
            pages = replace(
                pages,
                key=keys[:slots].view_as(pages.key),
                value=values[:slots].view_as(pages.value),
            )
        return cls(keys, values, later_key, later_value, pages)

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


def _buffer(
    paged: Float[Tensor, "P S D"] | None, later: Float[Tensor, "B H M D"], spare: int
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "B H L D"]]:
    """Allocates a buffer, copies rows into it, and returns it with its view of the later rows."""
    slots = 0 if paged is None else paged[..., 0].numel()
    texts, heads, length, dim = later.shape
    buffer = later.new_empty(slots + texts * heads * (length + spare), dim)
    if paged is not None:
        buffer[:slots] = paged.flatten(0, 1)
    room = buffer[slots:].view(texts, heads, length + spare, dim)
    room[:, :, :length] = later
    return buffer, room
