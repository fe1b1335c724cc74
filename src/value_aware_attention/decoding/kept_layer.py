"""Holds a layer of a key-value cache after most keys were dropped, once or repeatedly."""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from value_aware_attention.attention import attention_state, without_autocast, working_precision
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.call import uncompiled
from value_aware_attention.decoding import fused, later_token
from value_aware_attention.decoding.pages import ROOM, Pages, Room
from value_aware_attention.decoding.pages import Slots as Slots
from value_aware_attention.kernels import Kernel


def filled(layer: object) -> tuple[Float[Tensor, "B H M D"], Float[Tensor, "B H M V"]]:
    """Returns the keys and values of a cache layer that a model has filled."""
    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


class KeptLayer(DynamicLayer):
    """Holds the kept keys of a prefix, and the keys of all later tokens.

    If all caches keep equally many keys, `keys` and `values` hold the kept keys, then the later
    ones. Otherwise they hold the later keys, and `pages` the kept ones. Without gradients they are
    views of a `room`, so that later keys are appended in place. Positions and lengths count all
    tokens read. Only the attention of the `compressed_cache` that made the layer can read it,
    while open; any other attention would see wrong keys.

    Attributes:
        indices: Positions of the first choice's keys in their texts, without padding; -1 = an
            unused slot, None = not located.
        visible: The keys of the prefix that are not padding; None = all.
    """

    indices: Int[Tensor, "B H R"] | None = None
    visible: Bool[Tensor, "B 1 1 M"] | None = None

    def __init__(
        self, held: Slots, prefix: int, is_read: Callable[[], bool], bits: int | None = None
    ) -> None:
        super().__init__()
        self.is_read = is_read
        self.dtype, self.device, self.is_initialized = held.key.dtype, held.key.device, True
        self.hold(held, prefix, bits)

    def hold(self, held: Slots, prefix: int, bits: int | None = None) -> None:
        """Replaces the content by the kept keys of a prefix, in int8 if `bits` is 8."""
        self.prefix = prefix
        self.counts: Int[Tensor, "B H"] = held.used.sum(dim=-1)
        self.bias: Float[Tensor, "B H R"] | None = None
        self.pages: Pages | None = None
        self.room: Room | None = None
        (counts, is_weighted), slots = held.on_host, held.bias.shape[-1]
        if bits is None and self.is_even(counts, slots):
            self.slots, self.keys, self.values = slots, held.key, held.value
            self.bias = held.bias if is_weighted or min(counts) < slots else None
        else:
            self.slots, pages = 0, Pages.of(held)
            self.pages = pages if bits is None else pages.in_int8()
            self.keys, self.values = (x[:, :, :0].clone() for x in (held.key, held.value))

    def is_even(self, counts: Sequence[int], slots: int) -> bool:
        """Returns whether `keys` stores the kept keys, because no slots or only few are unused.

        The few pad the heads for the fused attention of a GPU.
        """
        waste = fused.WASTE if fused.is_fused(self.counts) else 0.0
        return sum(counts) >= (1 - waste) * len(counts) * slots

    def locate(self, choice: KeptKeys, visible: Bool[Tensor, "B 1 1 M"] | None) -> None:
        """Sets the positions of the prefix's tokens and of its kept keys."""
        indices, bias = (
            x.reshape(*self.counts.shape, -1) for x in (choice.indices, choice.log_weight)
        )
        self.visible = visible
        if visible is not None:
            places = visible[:, 0].long().cumsum(dim=-1) - 1
            indices = places.expand(-1, indices.shape[1], -1).gather(2, indices)
        self.indices = indices.int().masked_fill_(bias == -torch.inf, -1)

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
                "this cache is of a compressed_cache or load_compressed that is closed, or of "
                "another model; a model can read it only within that context"
            )
        if not self.is_filled or torch.is_grad_enabled() or key_states.dtype != self.dtype:
            self.room = None  # keys with gradients may not be overwritten
            return super().update(key_states, value_states, *args, **options)
        key, value = filled(self)
        length, tokens = key.shape[2], key_states.shape[2]
        if self.room is None or not self.room.has(key, tokens):
            is_rounded = self.pages is not None and self.pages.scale is not None
            self.room = Room.of(
                key, value, None if is_rounded else self.pages,
                tokens + max(ROOM, (length - self.slots) // 4),
            )  # fmt: skip
            self.pages = self.pages if is_rounded else self.room.pages
        self.keys, self.values = self.room.append(length, key_states, value_states)
        return self.keys, self.values

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
        key, value = filled(self)
        if (last := self.slots + first + query.shape[2]) < key.shape[2]:  # not in any later token
            key, value = key[:, :, :last], value[:, :, :last]
        output = later_token.attend(
            query, key, value, kernel, visible, first, pages=self.pages, bias=self.bias,
            slots=self.slots,
        )  # fmt: skip
        if output is not None:
            return output
        rows, pairs = query.shape[2], visible
        if visible is not None or rows > 1:
            past = torch.ones(rows, first + rows, dtype=torch.bool, device=query.device).tril(first)
            pairs = past if visible is None else past & visible[..., : first + rows]
            pairs = pairs.expand(*query.shape[:3], -1)
        with without_autocast(query):
            if fused.is_fused(query):
                if self.pages is None:
                    output = fused.padded(query, key, value, kernel, pairs, self.bias)
                elif pairs is None:
                    output = fused.trusted(
                        query.device,
                        lambda: fused.of_sequences(query, first + 1, kernel, self.room),
                        lambda: self._over_states(query, key, value, kernel, pairs),
                    )
            output = (
                self._over_states(query, key, value, kernel, pairs) if output is None else output
            )
        return output.to(value.dtype)

    def _over_states(
        self,
        query: Float[Tensor, "B heads N D"],
        key: Float[Tensor, "B H M D"],
        value: Float[Tensor, "B H M V"],
        kernel: Kernel,
        pairs: Bool[Tensor, "B heads N L"] | None,
    ) -> Float[Tensor, "B heads N V"]:
        """Computes attention by states of the pages and of the other keys, in at least fp32."""
        heads = query.unflatten(1, (self.counts.shape[1], -1))
        grouped = working_precision(heads.flatten(0, 1).flatten(1, 2))  # (C, G N, D)
        key, value = (working_precision(x.flatten(0, 1)) for x in (key, value))
        scores = kernel.log_similarity(grouped, key)
        if self.bias is not None:
            scores[..., : self.slots].add_(self.bias.flatten(0, 1)[:, None].to(scores.dtype))
        if pairs is not None:
            scores[..., self.slots :].masked_fill_(
                ~pairs.reshape(*scores.shape[:2], -1), -torch.inf
            )
        state = attention_state(scores, value)
        if self.pages is not None:
            state = state.merge(self.pages.state(grouped, kernel))
        return state.output().view(*query.shape[:-1], -1)

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
        """Counts the bytes of all keys, values and bookkeeping tensors, and of room for keys."""
        pages, room = 0 if self.pages is None else self.pages.nbytes, self.room
        later = (self.keys, self.values) if room is None else (room.later_key, room.later_value)
        return pages + sum(
            x.nbytes for x in (*later, self.bias, self.counts, self.indices) if x is not None
        )

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
        self.bias = self.pages = self.room = self.indices = self.visible = None
        self.slots = self.prefix = 0

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Applies `move` to the batch dimension of all tensors."""
        if self.keys is None or self.values is None:
            return
        if self.is_filled:
            texts, heads = self.counts.shape
            moved = move(torch.arange(texts, device=self.keys.device))
            self.pages = None if self.pages is None else self.pages.take(moved, heads)
            self.bias, self.indices, self.visible = (
                None if x is None else move(x) for x in (self.bias, self.indices, self.visible)
            )
            self.counts = move(self.counts)
        self.keys, self.values, self.room = move(self.keys), move(self.values), None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.move(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.move(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.move(lambda x: x[indices.to(x.device)])


class GrowingLayer(KeptLayer):
    """Chooses again among the kept and later keys after every `every` later tokens.

    It makes the same choices as `caches.AfterPrefix` with this `every`, each before the first query
    after the `every` tokens. Layers that share a budget choose together, before the first of them
    reads the next call. If a call has tokens on both sides of a choice, they then attend to the
    older keys. A layer with its own budget chooses within the call. So a layer holds at most
    `every` later keys, plus those of one call.

    Attributes:
        group: The layers that choose together, in order.
        at: Positions (B, H, R) of the kept keys; -1 in an unused slot.
        share: Number of keys r of a head of each text, on average.
        visible: The keys so far that are not padding; None = all.
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
        group: list["GrowingLayer"],
        choose: Callable[[Sequence["GrowingLayer"]], Iterable[KeptKeys]],
        share: Int[Tensor, " B"],
        query: Float[Tensor, "B heads M D"],
        rows: int | None,
        visible: Bool[Tensor, "B 1 1 M"] | None,
    ) -> None:
        """Starts with the first choice; holds the last `rows` queries. Joins the group."""
        super().__init__(Slots.of(choice, key, value), key.shape[2], is_read)
        self.every, self.choose, self.rows, self.share = every, choose, rows, share
        self.group, self.visible = group, visible
        group.append(self)
        # the positions of the kept keys
        self.at: Int[Tensor, "B H R"] = choice.positions.reshape(*key.shape[:2], -1)
        self.query = query[:, :, self._first_row(query.shape[2]) :].clone()

    def serve(
        self,
        query: Float[Tensor, "B heads N D"],
        kernel: Kernel,
        visible: Bool[Tensor, "#B #heads #N L"] | None,
    ) -> Float[Tensor, "B heads N V"]:
        """Computes attention like `KeptLayer`, and makes new choices when they are due."""
        self.query = torch.cat([self.query, query.detach()], dim=2)
        first, begun, parts, tokens = self.later - query.shape[2], 0, [], query.shape[2]
        while begun < tokens:
            while first >= self.every:
                self._check_whole(first)
                self._choose_again(None if visible is None else visible[..., -1:, : self.every])
                visible = None if visible is None else visible[..., self.every :]
                first -= self.every
            ended = tokens if self.group[1:] else min(tokens, begun + self.every - first)
            rows = slice(begun, ended) if visible is not None and visible.shape[2] > 1 else slice(1)
            pairs = None if visible is None else visible[:, :, rows]
            parts.append(self.attend(query[:, :, begun:ended], kernel, pairs, first))
            first, begun = first + ended - begun, ended
        return torch.cat(parts, dim=2)

    def _check_whole(self, first: int) -> None:
        """Raises ValueError if a layer with its own budget was interrupted while it chose."""
        if len(self.group) == 1 and first > self.every:
            raise ValueError(
                "a call that was interrupted has left this cache half read; give a new one"
            )

    def _first_row(self, tokens: int) -> int:
        """Returns the first query, among all tokens so far, that a later choice observes."""
        rows = tokens if self.rows is None else self.rows
        if self.visible is None:
            return max(0, tokens - rows)
        return int((self.visible[:, 0, 0].flip(-1).cumsum(dim=-1).flip(-1) > rows).all(dim=0).sum())

    def _choose_again(self, visible: Bool[Tensor, "#B #heads 1 E"] | None) -> None:
        """Lets the group choose, and holds the chosen keys; `visible` is False for padding."""
        for layer in self.group:
            if visible is not None or layer.visible is not None:
                pieces = zip((layer.visible, visible), (self.prefix, self.every), strict=True)
                layer.visible = torch.cat(
                    [
                        self.at.new_ones(len(self.at), 1, 1, tokens).bool()
                        if mask is None
                        else mask[:, :1].expand(len(self.at), -1, -1, -1)
                        for mask, tokens in pieces
                    ],
                    dim=-1,
                )
        for layer, choice in zip(self.group, self.choose(self.group), strict=True):
            layer._keep(choice)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values before the next choice, at their positions.

        Those that are not held are zeros.
        """
        start, rest = self.prefix + self.every, self.later - self.every
        query = self.query[:, :, : self.query.shape[2] - rest]
        at, pages, whole = self.at.flatten(0, 1), self.pages, []
        held = (at >= 0).nonzero(as_tuple=True)
        stored = (
            [x.flatten(0, 1)[held] for x in filled(self)]
            if pages is None
            else [x[pages.is_used] for x in (pages.key, pages.value)]
        )
        for x, of_prefix in zip(filled(self), stored, strict=True):
            later = x[:, :, self.slots : self.slots + self.every]
            spread = pad(later, (0, 0, self.prefix, 0)).flatten(0, 1)
            spread = spread.index_put((held[0], at[held]), of_prefix)
            whole.append(spread.view(*x.shape[:2], start, -1))
        return pad(query, (0, 0, start - query.shape[2], 0)), whole[0], whole[1]

    def _keep(self, choice: KeptKeys) -> None:
        """Holds the keys that were chosen before the `every`-th later token."""
        rest = [x[:, :, self.slots + self.every :] for x in filled(self)]
        (_, key, value), start = self.tensors(), self.prefix + self.every
        self.at = choice.positions.reshape(*key.shape[:2], -1)
        self.hold(Slots.of(choice, key, value), start)
        self.keys, self.values = (
            torch.cat([x, later], dim=2) for x, later in zip(filled(self), rest, strict=True)
        )
        if self.rows is not None:
            rows = self.query.shape[2] - rest[0].shape[2]
            self.query = self.query[:, :, rows - start + self._first_row(start) :].clone()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.query = self.query[:, :, : self.query.shape[2] - abs(tokens_to_remove)]

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        super().move(move)
        if self.is_filled:
            self.at, self.query, self.share = move(self.at), move(self.query), move(self.share)
