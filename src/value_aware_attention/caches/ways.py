"""Defines the ways to select the queries that a choice of keys observes."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from value_aware_attention.attention import AttentionState, attention_state, working_precision
from value_aware_attention.caches.groups import visible_pairs
from value_aware_attention.call import Arguments, Call

AT_ONCE = {"cpu": 2**17}
"""Weights over a query's own past computed at once, so that they fit a CPU's cache"""
ELSEWHERE = 2**26


@dataclass(frozen=True)
class Choice:
    """Holds a choice among a pool of keys, made before the queries `served` arrive."""

    call: Call
    """query (*own, G, N, D), key (*own, 1, M, D)"""
    pool: Int[Tensor, "*own K"]
    past: range
    served: range
    start: int
    """Position of the first later key; such keys are kept for every query"""
    rows: int
    seed: int = 0
    own_past: AttentionState | None = None
    """State of each past query over the keys up to its own, heads in any shape; None = unknown"""

    def attending(self, rows: Int[Tensor, " W"]) -> Arguments:
        """Returns queries of the text and the pool keys that they see."""
        call = self.call.take(rows)
        visible = visible_pairs(call)
        if visible is not None:
            visible = visible.take_along_dim(self.pool[..., None, None, :], dim=-1)
        return {"query": call.query, "visible": visible, "positions": rows}

    def spaced(self, among: range) -> Int[Tensor, " W"]:
        """Draws one row from each of `rows` equal strides.

        In a periodic text, evenly spaced rows would all fall on one kind of token, such as values.
        """
        count = min(self.rows, len(among))
        if count == len(among):
            return torch.arange(among.start, among.stop, among.step, device=self.pool.device)
        cuts = torch.arange(count + 1) * len(among) // count
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(self.seed))
        places = cuts[:-1] + (drawn * cuts.diff()).long()
        return (among.start + places * among.step).to(self.pool.device)


def last(choice: Choice) -> Arguments:
    """Takes the last past queries; they attend as in the text."""
    rows = choice.past[-choice.rows :]
    return choice.attending(torch.tensor(rows, device=choice.pool.device))


def causal(choice: Choice) -> Arguments:
    """Takes queries of the whole past; they attend as in the text."""
    return choice.attending(choice.spaced(choice.past))


def noncausal(choice: Choice) -> Arguments:
    """Takes queries of the whole past, rotated to later positions; they see all keys."""
    rows = choice.spaced(choice.past)
    query = choice.call.query[..., rows, :]
    if choice.past == choice.served:  # encoder: there is no later position
        return choice.attending(rows)
    if choice.call.layer.rotary is not None:
        query = choice.call.layer.rotary(query, torch.full_like(rows[:1], choice.start))
    return {"query": query, "positions": rows + choice.start}


def continued(choice: Choice) -> Arguments:
    """Takes the queries of `noncausal`; next to the keys, each sees its own past again.

    In this second copy, distances are the true ones: neither queries nor keys are rotated.
    """
    rows, call = choice.spaced(choice.past), choice.call
    query = call.query[..., rows, :]
    if choice.own_past is not None and len(rows) == choice.own_past.total.shape[-2]:
        beside = choice.own_past.rearranged(lambda x: x.reshape(*query.shape[:-1], -1))
    else:
        beside = own_past(choice, query, call.key, call.value, rows)
    return noncausal(choice) | {"beside": beside}


def own_past(
    choice: Choice, query: Tensor, key: Tensor, value: Tensor, rows: Int[Tensor, " W"]
) -> AttentionState:
    """Returns the state of queries over the keys up to their own position."""
    groups = query.shape[-3]
    key, value = (working_precision(x[..., 0, : choice.start, :]) for x in (key, value))
    places = torch.arange(key.shape[-2], device=rows.device)
    weights = AT_ONCE.get(key.device.type, ELSEWHERE)
    at_once = max(1, weights // max(1, query.shape[:-2].numel() * len(places)))
    # filled in place: keeping parts while blocks are freed would fragment the memory
    values = value.new_empty(*query.shape[:-1], value.shape[-1])
    total, log_scale = (value.new_empty(*query.shape[:-1], 1) for _ in range(2))
    for start in range(0, len(rows), at_once):
        block = slice(start, start + at_once)
        at = rows[block]
        # rows ascend; with all of them there is no number to ask the device for
        keys = start + len(at) if len(rows) == len(places) else min(len(places), int(at[-1]) + 1)
        heads = working_precision(query[..., block, :]).flatten(-3, -2)
        scores = choice.call.kernel.log_similarity(heads, key[..., :keys, :])
        scores.unflatten(-2, (groups, -1)).masked_fill_(places[:keys] > at[:, None], -torch.inf)
        scale = scores.amax(dim=-1, keepdim=True)
        mass = scores.sub_(scale).exp_()
        values[..., block, :] = (mass @ value[..., :keys, :]).unflatten(-2, (groups, -1))
        total[..., block, :] = mass.sum(dim=-1, keepdim=True).unflatten(-2, (groups, -1))
        log_scale[..., block, :] = scale.unflatten(-2, (groups, -1))
    return AttentionState(values, total, log_scale)


def repeat(choice: Choice) -> Arguments:
    """Takes queries of the prefix read a second time; they see all keys and their own past."""
    if choice.call.layer.repeated is None:
        raise ValueError(
            "observed is 'repeat': its queries are recorded by hugging_face.replace_attention in a "
            "second pass; bare tensors have none"
        )
    query, key, value = map(working_precision, choice.call.layer.repeated)
    rows = choice.spaced(range(query.shape[-2]))
    query = query[..., rows, :]
    return {
        "query": query,
        "positions": rows + choice.start,
        "beside": own_past(choice, query, key[..., None, :, :], value[..., None, :, :], rows),
    }


def hindsight(choice: Choice) -> Arguments:
    """Takes the future queries, and the later keys that they see as `beside`.

    They are evenly spaced from the first query; for an encoder, among those that `noncausal` omits.
    """
    # a text that ends with the prefix has no future queries
    served = torch.tensor(choice.served or choice.past[-1:], device=choice.pool.device)
    if choice.past == choice.served and choice.rows < len(served):
        served = served[~torch.isin(served, choice.spaced(choice.past))]
    count = min(choice.rows, len(served))
    rows = served[torch.arange(count, device=served.device) * len(served) // count]
    queries = choice.attending(rows)
    if choice.start == choice.call.keys:
        return queries
    call = choice.call.take(rows)
    scores = call.kernel.log_similarity(call.query, call.key[..., choice.start :, :])
    pairs = visible_pairs(call)
    visible = None if pairs is None else pairs[..., choice.start :]
    later = call.value[..., choice.start :, :]
    return queries | {"beside": attention_state(scores, later, visible)}
