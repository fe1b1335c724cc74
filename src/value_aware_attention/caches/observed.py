"""Collects the queries that a cache method observes, for the query heads of a key-value head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention.attention import (
    AttentionState,
    attention_state,
    finite,
    working_precision,
)
from value_aware_attention.call import Arguments, Call, Layer, Rotary
from value_aware_attention.kernels import Kernel

AT_ONCE = {"cpu": 2**17}
"""Weights over a query's own past that are computed at once: they fit a CPU's cache"""
ELSEWHERE = 2**26


@dataclass(frozen=True)
class KeptKeys:
    """Holds the R slots that one cache keeps for all queries after its choice."""

    indices: Int[Tensor, "*batch R"]
    """Keys, ascending and each in range; an unused slot has log-weight -inf."""
    log_weight: Float[Tensor, "*batch R"]
    """Added to log kappa of its key: 0 = as it was, log 2 = counted twice, -inf = unused."""
    value: Float[Tensor, "*batch R V"] | None = None
    """In the place of the values of these keys; None = the originals."""

    def where(self, mine: Bool[Tensor, " B"], other: "KeptKeys") -> "KeptKeys":
        """Takes the slots of each text, the first dimension, from one of two choices."""
        a, b = self.padded(other.indices.shape[-1]), other.padded(self.indices.shape[-1])
        is_mine = mine.to(a.indices.device).view(-1, *(1,) * (a.indices.ndim - 1))
        value = None
        if a.value is not None and b.value is not None:
            value = a.value.where(is_mine[..., None], b.value)
        return KeptKeys(
            a.indices.where(is_mine, b.indices), a.log_weight.where(is_mine, b.log_weight), value
        )

    def padded(self, slots: int) -> "KeptKeys":
        """Returns at least so many slots; those added are unused copies of the last one."""
        more = max(0, slots - self.indices.shape[-1])
        value = None if self.value is None else pad(self.value, (0, 0, 0, more))
        last = self.indices[..., -1:].expand(*self.indices.shape[:-1], more)
        weight = pad(self.log_weight, (0, more), value=-torch.inf)
        return KeptKeys(torch.cat([self.indices, last], dim=-1), weight, value)


@dataclass(frozen=True)
class Observed:
    """Holds the queries that a choice of keys is judged by, and the keys to choose from.

    The G query heads of a group share the keys of one key-value head; W queries of each are seen.
    Everything derived is in at least fp32.
    """

    query: Float[Tensor, "*batch G W D"]
    key: Float[Tensor, "*batch M D"]
    value: Float[Tensor, "*batch M V"]
    kernel: Kernel
    visible: Bool[Tensor, "*#batch #G #W M"] | None = None
    """The pairs that attend, None = all."""
    protected: Int[Tensor, "*#batch P"] | None = None
    """Positions of keys that must be kept, counted in r; one may be named twice."""
    projection: Float[Tensor, "*#batch G V E"] | None = None
    """The layer's output projection W_o of each head, where it is known."""
    rotary: Rotary | None = None
    """Turns queries to later positions, where the model rotates them."""
    positions: Int[Tensor, " W"] | None = None
    """The positions of the queries, which `rotary` counts from."""
    start: int | None = None
    """Position of the first query to come; None = the number of keys"""
    available: Bool[Tensor, "*#batch M"] | None = None
    """False: padding, which is never kept. None = every key."""
    beside: AttentionState | None = None
    """State (G, W) of each query over further keys, which it sees whatever is kept"""

    def cache(self, place: tuple[int, ...]) -> "Observed":
        """Returns the queries and keys of one cache, without leading dimensions."""
        pairs = (*self.query.shape[:-1], self.keys)
        groups = (*self.batch, -1, -1, -1)

        def at(x: Tensor | None, *shape: int) -> Tensor | None:
            return None if x is None else x.expand(*shape)[place]

        beside = self.beside
        return replace(
            self,
            query=self.query[place],
            key=self.key[place],
            value=self.value[place],
            visible=at(self.visible, *pairs),
            protected=at(self.protected, *self.batch, -1),
            projection=at(self.projection, *groups),
            available=at(self.available, *self.batch, -1),
            beside=None if beside is None else beside.rearranged(lambda x: x[place]),
        )

    def take(self, rows: slice) -> "Observed":
        """Returns some of the queries, and all keys."""
        visible, beside = self.visible, self.beside
        if visible is not None and visible.shape[-2] > 1:
            visible = visible[..., rows, :]
        return replace(
            self,
            query=self.query[..., rows, :].clone(),  # no view, which would hold all queries
            visible=visible,
            positions=None if self.positions is None else self.positions[rows],
            beside=None if beside is None else beside.rearranged(lambda x: x[..., rows, :].clone()),
        )

    @property
    def keys(self) -> int:
        """Returns the number of keys M."""
        return self.key.shape[-2]

    @property
    def batch(self) -> torch.Size:
        """Returns the leading dimensions: one set of keys is kept for each."""
        return self.key.shape[:-2]

    @cached_property
    def log_mass_beside(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of the unnormalised mass beside the keys; -inf = none."""
        if self.beside is None:
            query = working_precision(self.query)
            return torch.full_like(query[..., :1], -torch.inf)
        return self.beside.total.log() + self.beside.log_scale

    @cached_property
    def log_similarity(self) -> Float[Tensor, "*batch G W M"]:
        """Computes log kappa of every pair, -inf where it does not attend."""
        query, key = working_precision(self.query), working_precision(self.key)
        scores = self.kernel.log_similarity(query, key[..., None, :, :])
        return scores if self.visible is None else scores.masked_fill(~self.visible, -torch.inf)

    @cached_property
    def log_total(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of the mass over the keys and beside them; 0 where nothing is seen."""
        among_keys = self.log_similarity.logsumexp(dim=-1, keepdim=True)
        return finite(torch.logaddexp(among_keys, self.log_mass_beside))

    @property
    def log_beside(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of the weight that each query has beside the keys; -inf = none."""
        return self.log_mass_beside - self.log_total

    @property
    def log_weights(self) -> Float[Tensor, "*batch G W M"]:
        """Computes log alpha, normalised over the keys and the mass beside them."""
        return self.log_similarity - self.log_total

    @cached_property
    def weights(self) -> Float[Tensor, "*batch G W M"]:
        """Computes alpha; a row that sees nothing is zeros."""
        return self.log_weights.exp()

    @cached_property
    def output(self) -> Float[Tensor, "*batch G W V"]:
        """Computes the exact output o over the keys and `beside`."""
        return self._with_beside(
            attention_state(self.log_similarity, self._value[..., None, :, :])
        ).output()

    def squared_layer_output(
        self, output: Float[Tensor, "*batch G W V"] | None = None
    ) -> Float[Tensor, " B"]:
        """Computes sum_i ||sum_h W_o,h o_hi||^2 of each text, the first dimension; 1 where it is 0.

        Sums over all heads, which are the other leading dimensions, of the exact output, given
        where it is known. Where W_o is not known, the sum over heads of ||o_hi||^2.
        """
        output = self.output if output is None else output
        if self.projection is not None:  # of all heads at once
            projection = working_precision(self.projection).expand(*output.shape[:-2], -1, -1)
            output = output.movedim(-2, 1).flatten(2) @ projection.flatten(1, -2)
        norm = output.double().square().flatten(1).sum(dim=-1)
        return norm.where(norm > 0, 1.0)

    def error(self, choice: KeptKeys) -> Float[Tensor, " *batch"]:
        """Computes sum ||o - o~||^2 over the group's queries, the cost of a choice."""
        state = kept_state(
            working_precision(self.query), working_precision(self.key), self._value,
            self.kernel, self.visible, choice,
        )  # fmt: skip
        approximate = self._with_beside(state).output()
        return (self.output - approximate).square().sum(dim=(-3, -2, -1))

    @property
    def _value(self) -> Float[Tensor, "*batch M V"]:
        return working_precision(self.value)

    def _with_beside(self, state: AttentionState) -> AttentionState:
        return state if self.beside is None else state.merge(self.beside)


def kept_state(
    query: Float[Tensor, "*batch #G W D"],
    key: Float[Tensor, "*batch M D"],
    value: Float[Tensor, "*batch M V"],
    kernel: Kernel,
    visible: Bool[Tensor, "*#batch #G #W M"] | None,
    choice: KeptKeys,
) -> AttentionState:
    """Computes the attention state of queries over the kept keys that they see."""
    at = choice.indices[..., None]
    taken = value.take_along_dim(at, dim=-2) if choice.value is None else choice.value
    scores = kernel.log_similarity(query, key.take_along_dim(at, dim=-2)[..., None, :, :])
    scores = scores + choice.log_weight[..., None, None, :].to(scores.dtype)
    if visible is not None:
        visible = visible.take_along_dim(choice.indices[..., None, None, :], dim=-1)
    return attention_state(scores, taken.to(scores.dtype)[..., None, :, :], visible)


@dataclass(frozen=True)
class Groups:
    """Tells which leading dimensions of a call have caches of their own, and which share them.

    Queries share a cache along a dimension in which keys and values have size 1: a call of
    grouped-query attention is query (B, heads, G, N, D) with key and value (B, heads, 1, M, .).
    """

    leading: tuple[int, ...]
    separate: tuple[int, ...]
    """Dimensions along which caches differ."""
    shared: tuple[int, ...]
    """Dimensions along which queries share one."""

    @classmethod
    def of(cls, call: Call) -> "Groups":
        """Reads them from the shapes of a call."""
        leading = call.batch
        caches = torch.broadcast_shapes(
            call.key.shape[:-2], call.value.shape[:-2], (1,) * len(leading)
        )
        shared = tuple(d for d, size in enumerate(leading) if size > 1 and caches[d] == 1)
        separate = tuple(d for d in range(len(leading)) if d not in shared)
        return cls(leading, separate, shared)

    def call(self, call: Call) -> Call:
        """Returns the call as query (*own, G, N, D), key (*own, 1, M, D), value (*own, 1, M, V)."""
        query = call.query.expand(*self.leading, -1, -1)
        mask = None if call.attn_mask is None else self.of_queries(call.attn_mask)
        key, value = (self.of_keys(x)[..., None, :, :] for x in (call.key, call.value))
        query, layer = self.of_queries(query), self._layer(call.layer)
        return replace(call, query=query, key=key, value=value, attn_mask=mask, layer=layer)

    def _layer(self, layer: Layer) -> Layer:
        """Returns the facts about a layer with its heads in the same order."""
        projection, repeated = layer.projection, layer.repeated
        if projection is not None:
            projection = self.of_queries(projection)
        if repeated is not None:
            query, key, value = repeated
            repeated = (self.of_queries(query), self.of_keys(key), self.of_keys(value))
        return replace(layer, projection=projection, repeated=repeated)

    def of_queries(self, x: Tensor) -> Tensor:
        """Moves shared dimensions of (..., a, b) behind the others, as one: (*own, G, a, b).

        A dimension of size 1 that broadcasts stays one.
        """
        x = x.reshape(*(1,) * (len(self.leading) + 2 - x.ndim), *x.shape)
        if any(x.shape[d] > 1 for d in self.shared):
            sizes = [self.leading[d] if d in self.shared else x.shape[d] for d in range(x.ndim - 2)]
            x = x.expand(*sizes, -1, -1)
        x = x.permute(*self.separate, *self.shared, -2, -1)
        return x.reshape(*x.shape[: len(self.separate)], -1, *x.shape[-2:])

    def of_keys(self, x: Tensor) -> Tensor:
        """Drops the shared dimensions, of size 1, from keys or values: (*own, M, .)."""
        x = x.reshape(*(1,) * (len(self.leading) + 2 - x.ndim), *x.shape)
        sizes = [self.leading[d] for d in self.separate]
        x = x.permute(*self.separate, *self.shared, -2, -1)
        return x.reshape(*x.shape[: len(sizes)], *x.shape[-2:]).expand(*sizes, -1, -1)

    def restored(self, x: Float[Tensor, "*own G N V"]) -> Float[Tensor, "*batch N V"]:
        """Puts outputs back in the order of the call's leading dimensions."""
        order = [*self.separate, *self.shared]
        x = x.reshape(*(self.leading[d] for d in order), *x.shape[-2:])
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.permute(*back, -2, -1)


@dataclass(frozen=True)
class Choice:
    """Holds a choice among a pool of keys, made when the queries `served` are still to come."""

    call: Call
    """query (*own, G, N, D), key (*own, 1, M, D)"""
    pool: Int[Tensor, "*own K"]
    past: range
    served: range
    start: int
    """Position of the first key outside the choice, which is kept for every query"""
    rows: int
    seed: int = 0

    def attending(self, rows: Int[Tensor, " W"]) -> Arguments:
        """Returns queries of the text with the pairs of the pool that they see."""
        call = self.call.take(rows)
        visible = visible_pairs(call)
        if visible is not None:
            visible = visible.take_along_dim(self.pool[..., None, None, :], dim=-1)
        return {"query": call.query, "visible": visible, "positions": rows}

    def spaced(self, among: range) -> Int[Tensor, " W"]:
        """Draws one of these rows in each of `rows` equal strides.

        Evenly spaced rows would all fall on one part of a text with a period, such as its values.
        """
        count = min(self.rows, len(among))
        cuts = torch.arange(count + 1) * len(among) // count
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(self.seed))
        places = cuts[:-1] + (drawn * cuts.diff()).long()
        return (among.start + places * among.step).to(self.pool.device)


def visible_pairs(call: Call) -> Bool[Tensor, "*#own #G N M"] | None:
    """Returns the visible pairs of a call with as many dimensions as its queries; None = all."""
    visible = call.visible
    if visible is None:
        return None
    return visible.reshape(*(1,) * (call.query.ndim - visible.ndim), *visible.shape)


def last(choice: Choice) -> Arguments:
    """Takes the last queries of the past, which attend as in the text."""
    rows = choice.past[-choice.rows :]
    return choice.attending(torch.tensor(rows, device=choice.pool.device))


def causal(choice: Choice) -> Arguments:
    """Takes queries of the whole past, which attend as in the text."""
    return choice.attending(choice.spaced(choice.past))


def noncausal(choice: Choice) -> Arguments:
    """Takes queries of the whole past, which see every key, rotated to later positions."""
    rows = choice.spaced(choice.past)
    query = choice.call.query[..., rows, :]
    if choice.past == choice.served:  # an encoder: nothing is later
        return choice.attending(rows)
    if choice.call.layer.rotary is not None:
        query = choice.call.layer.rotary(query, torch.full_like(rows, choice.start))
    return {"query": query, "positions": rows + choice.start}


def continued(choice: Choice) -> Arguments:
    """Takes the queries of `noncausal`, each of which sees its own past once more beside the keys.

    The past at its true distances: neither queries nor keys are turned there.
    """
    rows, call = choice.spaced(choice.past), choice.call
    beside = own_past(choice, call.query[..., rows, :], call.key, call.value, rows)
    return noncausal(choice) | {"beside": beside}


def own_past(
    choice: Choice, query: Tensor, key: Tensor, value: Tensor, rows: Int[Tensor, " W"]
) -> AttentionState:
    """Returns the state of queries over the keys up to them."""
    groups = query.shape[-3]
    key, value = (working_precision(x[..., 0, : choice.start, :]) for x in (key, value))
    places = torch.arange(key.shape[-2], device=rows.device)
    weights = AT_ONCE.get(key.device.type, ELSEWHERE)
    at_once = max(1, weights // max(1, query.shape[:-2].numel() * len(places)))
    # filled in place: parts that are kept between blocks that are freed scatter the memory
    values = value.new_empty(*query.shape[:-1], value.shape[-1])
    total, log_scale = (value.new_empty(*query.shape[:-1], 1) for _ in range(2))
    for start in range(0, len(rows), at_once):
        block = slice(start, start + at_once)
        at = rows[block]
        keys = min(len(places), int(at[-1]) + 1)  # rows ascend
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
    """Takes queries of the prefix read once more, which see every key and their own past."""
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
    """Takes the queries to come, with the later keys that they see beside.

    Evenly spaced from the first query; with an encoder among those that `noncausal` leaves out.
    """
    # a text that ends with the prefix is not served
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


OBSERVED: Mapping[str, Callable[[Choice], Arguments]] = {
    way.__name__: way for way in (last, causal, noncausal, continued, repeat, hindsight)
}
"""By name: query (*own, G, W, D), visible, positions and beside of `Observed`."""
