"""Queries that a cache method observes when it chooses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from value_aware_attention.call import Call
from value_aware_attention.partial import attention_state

__all__ = ["OBSERVED", "Choice", "turned", "visible_pairs"]


@dataclass(frozen=True)
class Choice:
    """Holds a choice among a pool of keys, made when the queries `served` are still to come."""

    call: Call
    """query (*own, G, N, D), key (*own, 1, M, D)"""
    pool: Int[Tensor, "*own K"]
    in_pool: Bool[Tensor, "*own K"]
    """False: padding"""
    available: Bool[Tensor, "*own M"]
    past: range
    served: range
    start: int
    """The first key that is not chosen from, but seen by all that see it."""
    rows: int

    def attending(self, rows: Int[Tensor, " W"]) -> dict[str, Any]:
        """Returns queries of the text with the pairs of the pool that they see."""
        part = self.call.take(rows)
        visible = visible_pairs(part)
        if visible is not None:
            visible = visible.take_along_dim(self.pool[..., None, None, :], dim=-1)
        return {"query": part.query, "visible": visible, "positions": rows}

    def spaced(self, among: range) -> Int[Tensor, " W"]:
        """Returns `rows` of these rows, evenly spaced, the last among them."""
        count = min(self.rows, len(among))
        spaced = [among[(i + 1) * len(among) // count - 1] for i in range(count)]
        return torch.tensor(spaced, device=self.pool.device)

    def unpadded(self, rows: Int[Tensor, " W"]) -> Bool[Tensor, "*own 1 W K"]:
        """Returns the pairs of rows and keys of which neither is padding."""
        of_rows = self.available[..., rows.clamp_max(self.available.shape[-1] - 1)]
        return (of_rows[..., :, None] & self.in_pool[..., None, :])[..., None, :, :]


def visible_pairs(call: Call) -> Bool[Tensor, "*#own #G N M"] | None:
    """Returns the visible pairs of a call with as many dimensions as its queries; None = all."""
    visible = call.visible
    if visible is None:
        return None
    return visible.reshape(*(1,) * (call.query.ndim - visible.ndim), *visible.shape)


def last(choice: Choice) -> dict[str, Any]:
    """Takes the last queries of the past, which attend as in the text."""
    rows = choice.past[-choice.rows :]
    return choice.attending(torch.tensor(rows, device=choice.pool.device))


def causal(choice: Choice) -> dict[str, Any]:
    """Takes queries of the whole past, which attend as in the text."""
    return choice.attending(choice.spaced(choice.past))


def noncausal(choice: Choice) -> dict[str, Any]:
    """Takes queries of the whole past, which see every key, rotated to later positions."""
    return turned(choice, choice.start)


def turned(choice: Choice, by: int) -> dict[str, Any]:
    """Takes queries of the whole past, which see every key, rotated by `by` positions."""
    rows = choice.spaced(choice.past)
    query = choice.call.query[..., rows, :]
    if choice.past == choice.served:  # an encoder: nothing is later
        return choice.attending(rows)
    if choice.call.layer.rotary is not None:
        query = choice.call.layer.rotary(query, torch.full_like(rows, by))
    return {
        "query": query,
        "visible": choice.unpadded(rows),
        "positions": rows + by,
    }


def repeat(choice: Choice) -> dict[str, Any]:
    """Takes queries of the prefix read once more, which see every key and their own past."""
    if choice.call.layer.repeated is None:
        raise ValueError(
            "observed is 'repeat': its queries are recorded by hugging_face.replace_attention in a "
            "second pass; bare tensors have none"
        )
    query, key, value = choice.call.layer.repeated
    rows = choice.spaced(range(query.shape[-2]))
    seen = choice.unpadded(rows)
    own = torch.arange(key.shape[-2], device=rows.device) <= rows[:, None]
    own = own & choice.available[..., None, None, : key.shape[-2]] & seen.any(-1, keepdim=True)
    scores = choice.call.kernel.log_similarity(query[..., rows, :], key[..., None, :, :])
    return {
        "query": query[..., rows, :],
        "visible": seen,
        "positions": rows + choice.start,
        "beside": attention_state(scores, value[..., None, :, :], own),
    }


def hindsight(choice: Choice) -> dict[str, Any]:
    """Takes the queries to come, with the later keys that they see beside.

    Evenly spaced from the first query. With an encoder and `rows = N // 2`, these are the queries
    that `noncausal` leaves out.
    """
    count = min(choice.rows, len(choice.served))
    spaced = [choice.served[i * len(choice.served) // count] for i in range(count)]
    rows = torch.tensor(spaced, device=choice.pool.device)
    found = choice.attending(rows)
    if choice.start == choice.call.keys:
        return found
    part = choice.call.take(rows)
    scores = part.kernel.log_similarity(part.query, part.key[..., choice.start :, :])
    pairs = visible_pairs(part)
    visible = None if pairs is None else pairs[..., choice.start :]
    later = part.value[..., choice.start :, :]
    return found | {"beside": attention_state(scores, later, visible)}


OBSERVED: Mapping[str, Callable[[Choice], dict[str, Any]]] = {
    found.__name__: found for found in (last, causal, noncausal, repeat, hindsight)
}
"""By name: query (*own, G, W, D), visible, positions and beside of `Observed`."""
