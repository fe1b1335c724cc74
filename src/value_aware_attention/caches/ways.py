"""Defines the ways to select the queries that a choice of keys observes."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.attention import AttentionState, attention_state, working_precision
from value_aware_attention.caches.groups import visible_pairs
from value_aware_attention.call import Arguments, Call, Rotary

AT_ONCE = {"cpu": 2**17}
"""Weights over a query's own past computed at once, so that they fit a CPU's cache"""
ELSEWHERE = 2**26


@dataclass(frozen=True)
class Choice:
    """Holds a choice among a pool of keys, made before the queries `served` arrive.

    Attributes:
        call: query (*own, G, N, D), key (*own, 1, M, D).
        start: Position of the first later key; such keys are kept for every query.
        own_past: State of each past query over the keys up to its own, heads in any shape; None =
            unknown.
        shared: Tensors that are the same in all layers of a prompt, by what they depend on.
    """

    call: Call
    pool: Int[Tensor, "*own K"]
    past: range
    served: range
    start: int
    rows: int
    seed: int = 0
    own_past: AttentionState | None = None
    shared: dict[Hashable, Tensor] = field(default_factory=dict)

    def once(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Returns a tensor that is made for the first layer."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

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
    return choice.attending(torch.tensor(choice.past[-choice.rows :], device=choice.pool.device))


def causal(choice: Choice) -> Arguments:
    """Takes queries of the whole past; they attend as in the text."""
    return choice.attending(choice.spaced(choice.past))


def noncausal(choice: Choice, rows: Int[Tensor, " W"] | None = None) -> Arguments:
    """Takes queries of the whole past, rotated to later positions; they see all keys.

    `rows` are those of `Choice.spaced`, if already drawn.
    """
    rows = choice.spaced(choice.past) if rows is None else rows
    if choice.past == choice.served:  # encoder: there is no later position
        return choice.attending(rows)
    query, rotary = choice.call.query[..., rows, :], choice.call.layer.rotary
    if rotary is not None:
        name = rotary, choice.start, query.shape[-1], query.dtype, query.device
        query = query @ choice.once(name, lambda: _turn(rotary, choice.start, query))
    return {"query": query, "positions": rows + choice.start}


def _turn(rotary: Rotary, shift: int, query: Float[Tensor, "*own G W D"]) -> Float[Tensor, "D D"]:
    """Returns the matrix that a row is multiplied by to be rotated by a number of positions."""
    identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
    identity = identity[(None,) * (query.ndim - 2)]  # some models index dimensions from the first
    return rotary(identity, torch.full((1,), shift, device=query.device)).flatten(0, -2)


def continued(choice: Choice) -> Arguments:
    """Takes the queries of `noncausal`; next to the keys, each sees its own past again.

    In this second copy, distances are the true ones: neither queries nor keys are rotated.
    """
    rows, call = choice.spaced(choice.past), choice.call
    query = call.query[..., rows, :]
    beside = (
        choice.own_past.rearranged(lambda x: x.reshape(*query.shape[:-1], -1))
        if choice.own_past is not None and len(rows) == choice.own_past.total.shape[-2]
        else own_past(choice, query, call.key, call.value, rows)
    )
    return noncausal(choice, rows) | {"beside": beside}


def own_past(
    choice: Choice, query: Tensor, key: Tensor, value: Tensor, rows: Int[Tensor, " W"]
) -> AttentionState:
    """Returns the state of queries over the keys up to their own position."""
    key, value = (working_precision(x[..., 0, : choice.start, :]) for x in (key, value))
    key, value = (x.reshape(-1, *x.shape[-2:]) for x in (key, value))
    heads = working_precision(query).reshape(len(key), *query.shape[-3:])
    most, whole, shape = key.shape[1], None, query.shape[:-1]
    weights, near = AT_ONCE.get(key.device.type, ELSEWHERE), (key, value)
    at_once = max(1, weights // max(1, shape[:-1].numel() * most))
    for number, (block, at) in enumerate(
        zip(heads.split(at_once, dim=2), rows.split(at_once), strict=True)
    ):
        if len(at) < len(rows):  # they ascend; if they are all rows, no call waits for the device
            last_row = number * at_once + len(at) - 1 if len(rows) == most else int(at[-1])
            near = key[:, : last_row + 1], value[:, : last_row + 1]
        scores = choice.call.kernel.log_similarity(block.flatten(1, 2), near[0])
        is_later = torch.arange(near[0].shape[1], device=at.device) > at[:, None]
        scores.view(*block.shape[:3], -1).masked_fill_(is_later, -torch.inf)
        scale = scores.amax(dim=-1, keepdim=True)
        mass = scores.sub_(scale).exp_()
        state = AttentionState(torch.bmm(mass, near[1]), mass.sum(dim=-1, keepdim=True), scale)
        if len(at) < len(rows):
            # filled in place: keeping parts while blocks are freed would fragment the memory
            whole = whole or state.rearranged(lambda x: x.new_empty(*heads.shape[:3], x.shape[-1]))
            place = slice(number * at_once, number * at_once + len(at))
            for of_all, x in zip(vars(whole).values(), vars(state).values(), strict=True):
                of_all[:, :, place] = x.view(*block.shape[:3], -1)
    return (whole or state).rearranged(lambda x: x.view(*shape, -1))


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

    They are evenly spaced from the first query. For an encoder, they are queries that `noncausal`
    omits.
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
    beside = attention_state(scores, call.value[..., choice.start :, :], visible)
    return queries | {"beside": beside}
