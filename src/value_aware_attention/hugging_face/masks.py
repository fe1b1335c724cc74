"""Converts transformers' attention masks to this library's boolean masks."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.masking_utils import sdpa_mask


def additive_mask(
    *sizes: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> Float[Tensor, "batch 1 N M"]:
    """Creates transformers' additive mask: 0 = visible, the dtype's lowest number = hidden.

    It is the `eager` mask, so that a model handles it in the same way, with two differences. It is
    never omitted, because None would not distinguish all visible keys from only the past. If all
    queries see the same keys, their rows share memory. Its attribute `positions` counts the tokens
    before each key in its text, including those that the layer hides or a cache has dropped.
    """
    visible: Any = sdpa_mask(
        *sizes, **(options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    )
    first = visible[..., :1, :]
    rows = first if bool((visible == first).all()) else visible
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=rows.device)
    mask: Any = torch.where(rows, hidden.new_zeros(()), hidden).expand(visible.shape)
    mask.positions = positions_in_texts(visible, **options)
    return mask


def positions_in_texts(
    visible: Bool[Tensor, "*batch N M"],
    attention_mask: Bool[Tensor, "batch L"] | None = None,
    kv_offset: int = 0,
    local_size: int | None = None,
    config: Any = None,
    **_: object,
) -> Int[Tensor, "... M"]:
    """Returns the position of each key in its text; 0 if packed texts may be chunks of one text.

    `attention_mask` covers all tokens read; `kv_offset` of them precede the first key.
    """
    place = torch.arange(visible.shape[-1], device=visible.device) + kv_offset
    if attention_mask is not None:
        count = (attention_mask.cumsum(dim=-1) - 1).clamp_min(0)[:, None, None]
        return count[..., place.clamp_max(count.shape[-1] - 1)]
    if visible.shape[-2] != len(place):  # transformers packs texts only without a cache
        return place
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        place = place * (local_size >= len(place))
    # The first token of a text does not see the token before it.
    sees_it = visible.diagonal(offset=-1, dim1=-2, dim2=-1)
    first = torch.where(sees_it, 0, place[1:]).cummax(dim=-1).values
    return (place - torch.nn.functional.pad(first, (1, 0)))[..., None, :]


def trim(
    key: Float[Tensor, "batch heads M D"],
    value: Float[Tensor, "batch heads M V"],
    attention_mask: Tensor | None,
    queries: int,
) -> tuple[Float[Tensor, "batch heads m D"], Float[Tensor, "batch heads m V"], Tensor | None]:
    """Cuts off the unfilled end of a static cache, which no query sees yet.

    Methods based on positions assume that the queries are the last keys. A mask longer than the
    keys loses its end, as in transformers.
    """
    keys = key.shape[2]
    if attention_mask is None:
        return key, value, None
    mask = attention_mask[..., :keys]
    if keys > queries:
        visible = _visible(mask).flatten(0, -2).any(dim=0).nonzero()
        keys = max(queries, int(visible[-1]) + 1 if len(visible) else 0)
    return key[:, :, :keys], value[:, :, :keys], mask[..., :keys]


def split_mask(
    attention_mask: Tensor | None, query: Tensor, key: Tensor, *, is_causal: bool
) -> tuple[Bool[Tensor, "..."] | None, bool]:
    """Splits transformers' mask into an `attn_mask` and `is_causal` that hide the same pairs.

    If there is a mask, it alone decides, as in `eager`. A mask that combines causality and padding
    (keys hidden from all queries) is split into the two, so that methods can be faster and refuse
    earlier. Without a mask, `is_causal` decides, and the queries are the last keys. Raises
    ValueError for a mask that is a bias.
    """
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        if not is_causal or queries in (1, keys):
            return None, is_causal and queries > 1
        return causal_pairs(queries, keys, query.device), False
    visible = _visible(attention_mask)
    first = visible[..., :1, :]
    if _rows_share_memory(attention_mask) or bool((visible == first).all()):
        return _unless_all(first), False
    if queries == keys:
        padding = visible[..., -1:, :]  # the last query sees all keys except padding
        if bool((visible == padding & causal_pairs(queries, keys, visible.device)).all()):
            return _unless_all(padding), True
    return visible, False


def _visible(attention_mask: Tensor) -> Bool[Tensor, "..."]:
    if attention_mask.dtype == torch.bool:
        return attention_mask
    if _rows_share_memory(attention_mask):  # read one row instead of all copies
        return _visible(attention_mask[..., :1, :]).expand(attention_mask.shape)
    visible = attention_mask == 0
    if not (visible | (attention_mask < -1e4)).all():
        raise ValueError("the model adds a bias to its scores: approximations cannot honour it")
    return visible


def _rows_share_memory(mask: Tensor) -> bool:
    return mask.shape[-2] > 1 and mask.stride(-2) == 0


def _unless_all(visible: Tensor) -> Tensor | None:
    return None if visible.all() else visible


def causal_pairs(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "N M"]:
    """Returns the causal mask of queries that are the last keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
