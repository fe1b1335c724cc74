"""Removes padding from a batch, so that what a text keeps does not depend on other texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.call import Call

Part = tuple[Call, Int[Tensor, "*part K"], int]
"""A call of texts without padding, the keys to choose from, the number of keys before `start`"""


@dataclass(frozen=True)
class Parts:
    """Splits a call (`Groups.call`) into groups of texts with tokens at the same positions.

    Attributes:
        is_token: None = all.
        places: Texts, their token positions, and how many of these precede `start`, for each part;
            None = a single part without padding.
    """

    is_token: Bool[Tensor, "*own M"] | None
    places: Sequence[tuple[Int[Tensor, " T"], Int[Tensor, " n"], int]] | None

    @classmethod
    def of(cls, call: Call, start: int, share: Int[Tensor, " B"] | None = None) -> "Parts":
        """Splits by padding and, if `share` is passed, by the number of keys that a text keeps.

        A key that no query of a text sees is padding. Texts without tokens before `start` have no
        keys to keep and are left out. This waits for the device once.
        """
        if call.attn_mask is None and share is None:  # does not wait for a GPU
            return cls(None, None)
        visible = (
            call.key.new_ones(1, 1, call.keys, dtype=torch.bool)
            if call.attn_mask is None
            else call.attn_mask
        )
        is_token = visible.any(dim=(-3, -2)).expand(*call.key.shape[:-3], -1)
        texts = is_token.shape[:-1][:1].numel()  # 1 without leading dimensions
        kind = is_token.reshape(texts, -1, call.keys).any(dim=1).long()
        kind = (kind if share is None else torch.cat([kind, share[:, None]], dim=1)).cpu()
        if kind[:, : call.keys].all() and (kind == kind[:1]).all():
            return cls(is_token, None)
        kinds, number = kind.unique(dim=0, return_inverse=True)
        device, tokens = is_token.device, kinds[:, :start].sum(dim=1).tolist()
        places = [
            (
                (number == place).nonzero()[:, 0].to(device),
                kinds[place, : call.keys].nonzero()[:, 0].to(device),
                before,
            )
            for place, before in enumerate(tokens)
            if before
        ]
        return cls(is_token, places)

    def cut(
        self, call: Call, pool: Int[Tensor, "*own K"], start: int, *, is_alone: bool = True
    ) -> Iterator[Part]:
        """Yields each part, with its keys from a pool before `start`.

        A place of -1 in a pool has no key. Places without a key in all caches of a part are left
        out, unless several layers choose together: their pools stay equally wide.
        """
        if self.places is None:
            yield call, pool, start
        for texts, tokens, before in self.places or ():
            rank = torch.full((call.keys + 1,), -1, device=tokens.device)  # the last for -1
            rank[tokens] = torch.arange(len(tokens), device=tokens.device)
            ranks = rank[_of_texts(pool, texts, call)].sort(dim=-1).values
            hidden = start - before
            if pool.shape[-1] < start:  # the pool lacks dropped keys
                hidden = int((ranks < 0).sum(dim=-1).min()) if is_alone else 0
            yield _cut(call, texts, tokens), ranks[..., hidden:], before

    def of_first(self, x: Int[Tensor, " B"]) -> list[int]:
        """Returns the entry of each part's first text."""
        if self.places is None:
            return [int(x[0])]
        return [int(x[int(texts[0])]) for texts, *_ in self.places]

    def joined(self, choices: Sequence[KeptKeys]) -> KeptKeys:
        """Joins the choices of all parts in the order of texts; unused slots point to padding."""
        if self.places is None or self.is_token is None:
            return choices[0]
        slots = max((choice.indices.shape[-1] for choice in choices), default=1)
        indices = torch.atleast_2d(self.is_token).int().argsort(dim=-1, stable=True)[..., :slots]
        dtype = choices[0].log_weight.dtype if choices else torch.float32
        weight = torch.full(indices.shape, -torch.inf, device=indices.device, dtype=dtype)
        value = None
        for (texts, tokens, _), choice in zip(self.places, choices, strict=True):
            at = texts, ..., slice(-choice.indices.shape[-1], None)
            indices[at], weight[at] = tokens[choice.indices], choice.log_weight
            if choice.value is not None:
                width = choice.value.shape[-1]
                value = weight.new_zeros(*indices.shape, width) if value is None else value
                value[(*at, slice(None))] = choice.value
        order, shape = indices.argsort(dim=-1), (*self.is_token.shape[:-1], slots)
        if value is not None:
            value = value.take_along_dim(order[..., None], dim=-2).view(*shape, -1)
        weight = weight.gather(-1, order).view(shape)
        return KeptKeys(indices.gather(-1, order).view(shape), weight, value)


def _of_texts(x: Tensor, texts: Int[Tensor, " T"], call: Call) -> Tensor:
    """Selects texts along the first dimension of a grouped call, if there is one of size > 1."""
    return x[texts] if call.key.ndim > 3 and len(x) > 1 else x


def _cut(call: Call, texts: Int[Tensor, " T"], tokens: Int[Tensor, " n"]) -> Call:
    """Selects texts and their token positions."""

    def cut(x: Tensor, dim: int = -2) -> Tensor:
        at = tokens if x.shape[dim] == call.keys else tokens[tokens < x.shape[dim]]
        return _of_texts(x, texts, call).index_select(dim, at)

    mask = None if call.attn_mask is None else cut(call.attn_mask, -1)
    query, layer, rows = _of_texts(call.query, texts, call), call.layer, call.rows
    if query.shape[-2] == call.keys:  # else no query is padding
        query, rows = query.index_select(-2, tokens), rows[: len(tokens)]
        mask = mask if mask is None or mask.shape[-2] == 1 else mask.index_select(-2, tokens)
    if layer.repeated is not None:
        query_again, key_again, value_again = map(cut, layer.repeated)
        layer = replace(layer, repeated=(query_again, key_again, value_again))
    if layer.projection is not None:
        layer = replace(layer, projection=_of_texts(layer.projection, texts, call))
    # the parts come from a mask of this kind, of each text's keys alone
    is_of_keys = mask is not None and call.key.ndim > 3 and mask.shape[1:-1].numel() == 1
    is_open = mask is None or is_of_keys or bool(mask.all())
    return replace(
        call, query=query, key=cut(call.key), value=cut(call.value), rows=rows, layer=layer,
        queries=len(rows), attn_mask=None if is_open else mask,
    )  # fmt: skip
