"""Holds a layer of a key-value cache from which keys are dropped again as it grows."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention.hugging_face.kept_layer import KeptLayer, Slots
from value_aware_attention.kernels import Kernel


class GrowingLayer(KeptLayer):
    """Chooses again among the kept keys and the later ones after every `every` later tokens.

    The choice is that of `caches.AfterPrefix` with the same `every`: it comes before the first
    query that does not see it, so that `every` later keys are held at most, and those of one call.
    """

    is_croppable = False

    def __init__(
        self,
        kept: Any,
        key: Float[Tensor, "B H M D"],
        value: Float[Tensor, "B H M V"],
        is_read: Callable[[], bool],
        *,
        every: int,
        choose: Callable[..., Any],
        query: Float[Tensor, "B heads M D"],
        rows: int | None,
        visible: Bool[Tensor, "B 1 1 M"] | None,
    ) -> None:
        """`kept` is the first choice, a `caches.KeptKeys`; of queries the last `rows` are held."""
        super().__init__(Slots.of(kept, key, value), key.shape[2], is_read)
        self.every, self.choose, self.rows = every, choose, rows
        self.at: Int[Tensor, "B H R"] = kept.indices.reshape(*key.shape[:2], -1)
        """The positions of the kept keys"""
        self.visible = visible
        """The keys of the prefix that are no padding; None: all"""
        self.query = query[:, :, self._first_row(query.shape[2]) :].clone()

    def is_even(self, counts: Int[Tensor, "B H"], slots: int) -> bool:
        return True  # slots of padding stay: a later choice fills them

    def serve(
        self,
        query: Float[Tensor, "B heads N D"],
        kernel: Kernel,
        visible: Bool[Tensor, "#B #heads #N L"] | None,
    ) -> Float[Tensor, "B heads N V"]:
        """Computes attention as a layer that is kept does, and chooses when it is time."""
        self.query = torch.cat([self.query, query.detach()], dim=2)
        first, begun, parts = self.later - query.shape[2], 0, []
        while begun < query.shape[2]:
            if first == self.every:
                self._choose_again(None if visible is None else visible[..., -1:, : self.every])
                visible = None if visible is None else visible[..., self.every :]
                first = 0
            ended = min(query.shape[2], begun + self.every - first)
            rows = slice(begun, ended) if visible is not None and visible.shape[2] > 1 else slice(1)
            seen = None if visible is None else visible[:, :, rows]
            parts.append(self.attend(query[:, :, begun:ended], kernel, seen, first))
            first, begun = first + ended - begun, ended
        return torch.cat(parts, dim=2)

    def _first_row(self, tokens: int) -> int:
        """Finds the first of the queries of all tokens so far that a later choice observes."""
        if self.rows is None or self.visible is None:
            return 0 if self.rows is None else max(0, tokens - self.rows)
        left = self.visible[:, 0, 0].flip(-1).cumsum(dim=-1).flip(-1)
        return int((left > self.rows).all(dim=0).sum())

    def _choose_again(self, visible: Bool[Tensor, "#B #heads 1 E"] | None) -> None:
        """Keeps keys of the prefix and of the next tokens, of which `visible` are no padding."""
        assert self.keys is not None and self.values is not None
        start, held = self.prefix + self.every, self.slots + self.every
        later = torch.arange(self.prefix, start, device=self.at.device)
        pool = torch.cat([self.at, later.expand(*self.at.shape[:2], -1)], dim=-1)
        key, value = (
            x.new_zeros(*x.shape[:2], start, x.shape[-1]).scatter(
                2, pool[..., None].expand(-1, -1, -1, x.shape[-1]), x[:, :, :held]
            )
            for x in (self.keys, self.values)
        )
        rest = self.keys[:, :, held:], self.values[:, :, held:]
        if visible is not None or self.visible is not None:
            whole = self.query.new_ones(len(key), 1, 1, start, dtype=torch.bool)
            if self.visible is not None:
                whole[..., : self.prefix] &= self.visible
            if visible is not None:
                whole[..., self.prefix :] &= visible[:, :1]
            self.visible = whole
        seen = self.query.shape[2] - rest[0].shape[2]
        query = pad(self.query[:, :, :seen], (0, 0, start - seen, 0))
        assert self.counts is not None
        kept = self.choose(self.counts[:, 0], pool, query, key, value, self.visible)
        self.hold(Slots.of(kept, key, value), start)
        self.keys, self.values = (
            torch.cat([x, later], dim=2)
            for x, later in zip((self.keys, self.values), rest, strict=True)
        )
        self.at = kept.indices.reshape(*key.shape[:2], -1)
        if self.rows is not None:
            first = seen - start + self._first_row(start)
            self.query = self.query[:, :, max(0, first) :].clone()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.query = self.query[:, :, : self.query.shape[2] - abs(tokens_to_remove)]

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        super().move(move)
        if self.is_filled:
            self.at, self.query = move(self.at), move(self.query)
            self.visible = None if self.visible is None else move(self.visible)
