"""Turns a cache method into an approximation: later queries see the kept keys of a prefix."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from itertools import chain, islice
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention.approximations.approximation import Approximation, refuse_non_finite
from value_aware_attention.arguments import check_at_least, check_choice, check_seed
from value_aware_attention.attention import (
    AttentionState,
    attention,
    attention_state,
    working_precision,
)
from value_aware_attention.caches.budgets import Ranking
from value_aware_attention.caches.groups import Groups, visible_pairs
from value_aware_attention.caches.kept import KeptKeys, kept_state
from value_aware_attention.caches.method import (
    CacheMethod,
    available,
    check_cache_method,
    first_kept,
)
from value_aware_attention.caches.observed import OBSERVED, Observed
from value_aware_attention.caches.ways import Choice
from value_aware_attention.call import Arguments, Call, Layer
from value_aware_attention.decoding.padding import Part, Parts
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Exponential, Kernel

ROWS = 32
"""Default number of observed queries"""
OF_MODEL = ("model", "checked")
"""Pools over all layers, whose keys are chosen together"""


class Given(CacheMethod):
    """Keeps keys that were chosen before."""

    def __init__(self, choice: KeptKeys) -> None:
        super().__init__(choice.indices.shape[-1])
        self.choice = choice
        self.refits = choice.value is not None

    def keep(self, observed: Observed) -> KeptKeys:
        shape = (*observed.batch, -1)  # a group of one query head has a dimension too
        value = self.choice.value
        return KeptKeys(
            self.choice.indices.reshape(shape),
            self.choice.log_weight.reshape(shape),
            None if value is None else value.reshape(*shape, value.shape[-1]),
        )


class AfterPrefix(Approximation):
    """Lets queries from `prefix` on see the keys that a cache method kept, and all later keys.

    Earlier queries attend exactly. A key carries its position, so one causal pass over a text
    computes the same as decoding with the compressed cache, without a cache. Query heads with the
    same key-value head (`Groups`) share its kept keys. Padding does not change what a text keeps,
    unless the method draws at random. A text of fewer than r tokens keeps all keys. Keys that no
    later query sees, such as those before a sliding window, are not kept.

    Queries that a method may observe:

    - last: the last queries of the prefix, attending causally.
    - causal: queries of the whole prefix, attending causally.
    - noncausal: queries of the whole prefix, each seeing all of it. Rotary queries are rotated by
      the length of the prefix, to later positions.
    - continued: the same, each also seeing its own causal past again, next to the prefix. In the
      first layer of a rotary model this equals reading the prefix a second time.
    - repeat: queries of the prefix read a second time, recorded by `hugging_face`.
    - hindsight: the later queries themselves, an oracle.

    With `pool` "layer" or "model", the heads of a layer or of all layers keep r keys on average: in
    each text, the cheapest key of any head is dropped first (`CacheMethod.rank`). "checked"
    compares the model's outputs over the prefix read a second time with the exact ones. Per text it
    uses "model" if that is closer than r keys in every head, and r keys otherwise.

    Args:
        method: Chooses the r keys that each key-value head keeps.
        prefix: Number of tokens whose keys are compressed. None: one set for all queries of an
            encoder, without protected keys.
        observed: Which queries choose the keys, one of the above.
        rows: Most observed queries per head. None: all with "continued", else 32.
        sinks: Number of first keys of the prefix that are always kept, included in r.
        recent: Number of last keys of the prefix that are always kept, included in r.
        every: Number of rows after which the method chooses r again, among the kept keys and all
            later keys (a growing cache). None: it chooses once. With `pool` "model" the model reads
            the text once more for each choice, as later choices see what earlier ones left.
        pool: "layer", "model" or "checked", see above. None: each head keeps r keys.
        floor: Least number of keys per head with `pool`.
        seed: Draws the observed queries, one in each of `rows` equal strides.
    """

    shares_keys = True  # tells the adapter to pass key-value heads unrepeated, and its `Layer`

    def __init__(
        self,
        method: CacheMethod,
        *,
        prefix: int | None,
        observed: str = "last",
        rows: int | None = None,
        sinks: int = 2,
        recent: int = 4,
        every: int | None = None,
        pool: str | None = None,
        floor: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_cache_method(method)
        self.method = method
        self.prefix = prefix if prefix is None else check_at_least(1, prefix=prefix)
        self.observed = check_choice(OBSERVED, observed=observed)
        if rows is None:
            rows = prefix if prefix and observed == "continued" else ROWS
        self.rows = check_at_least(1, rows=rows)
        self.sinks, self.recent = check_at_least(0, sinks=sinks), check_at_least(0, recent=recent)
        self.every = every if every is None else check_at_least(1, every=every)
        self.pool = check_choice((None, "layer", *OF_MODEL), pool=pool)
        self.floor = check_at_least(0, floor=floor)
        self.seed = check_seed(seed)
        self.kernels = method.kernels
        self.supports_causal = prefix is not None
        self._check_arguments()

    def _check_arguments(self) -> None:
        r = self.method.r
        if self.prefix is None:
            if self.observed in ("causal", "continued", "repeat"):
                raise ValueError(
                    f"observed is {self.observed!r}; without a prefix it must be one of last, "
                    f"noncausal, hindsight"
                )
            if self.every is not None:
                raise ValueError(f"every is {self.every}; without a prefix no cache grows")
        elif r > self.prefix:
            raise ValueError(f"r is {r}; the prefix has {self.prefix} keys to keep")
        elif r < (least := min(self.sinks + self.recent, self.prefix)):
            raise ValueError(
                f"r is {r}; it counts {self.sinks} sinks and {self.recent} recent keys, so it must "
                f"be at least {least}"
            )
        if self.pool is not None:
            self._check_pool()
        if self.every is not None:
            self._check_growing()

    def _check_pool(self) -> None:
        if self.pool == "checked" and self.prefix is None:
            raise ValueError("pool is 'checked'; without a prefix there is none to read again")
        if self.method.r < self._least:
            raise ValueError(
                f"heads may keep {self.method.r} keys; with pool each must keep {self._least}: "
                f"floor, or {self.sinks} sinks and {self.recent} recent keys"
            )

    def _check_growing(self) -> None:
        if self.method.refits:
            raise ValueError(
                f"every is {self.every}; {type(self.method).__name__} refits values, so it chooses "
                f"once"
            )
        if self.observed == "repeat":
            raise ValueError(f"every is {self.every}; repeated queries are recorded once")
        if self.observed == "continued":
            raise ValueError(
                f"every is {self.every} and observed is 'continued'; its queries see their own "
                f"past, of which keys are dropped by then: last, causal or noncausal"
            )
        if self.pool == "checked":
            raise ValueError(
                f"every is {self.every}; pool 'checked' compares one choice: model, layer or None"
            )

    def forward(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
        layer: Layer | None = None,
    ) -> Float[Tensor, "*batch N V"]:
        """Returns the approximate output in the dtype of `value`; fully masked rows give zeros.

        `layer` holds the adapter's facts about a model's layer. Raises ValueError in the cases of
        every approximation, for a text shorter than the prefix or `every`, and if there are not as
        many queries as keys (generation with a cache).
        """
        call = self.check(
            Call.of(
                query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal,
                layer=layer,
            )
        )  # fmt: skip
        if call.is_empty:
            return call.zeros().to(value.dtype)
        with torch.autocast(value.device.type, enabled=False):
            return self.approximate(call).to(value.dtype)

    def like(self, method: CacheMethod, **changed: Any) -> "AfterPrefix":
        """Returns a copy with another method and optionally other options."""
        options = {name: getattr(self, name) for name in signature(type(self)).parameters}
        return AfterPrefix(**options | {"method": method} | changed)

    @torch.no_grad()
    def observe(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
        layer: Layer | None = None,
    ) -> Observed:
        """Returns the input of the method's first choice, for `method.keep`.

        Raises ValueError like `forward`, and for texts with padding, which only `choose` supports.
        """
        parts, each = self.parted(
            query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal, layer=layer
        )
        if parts.places is not None:
            raise ValueError(
                "attn_mask hides keys from all queries, as padding; use choose, which takes it"
            )
        return self.observe_part(*next(each))

    def parted(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        kernel: Kernel = Exponential(),
        start: int | None = None,
        pool: Tensor | None = None,
        share: Tensor | None = None,
        **options: Any,
    ) -> tuple[Parts, Iterator[Part]]:
        """Splits a call by padding, for a choice among all keys before `start` (None: the prefix).

        Arguments and errors are those of `forward`; `pool` is that of `joined_pools`.
        """
        call = self.check(Call.of(query, key, value, kernel=kernel, **options))
        start = start or self.prefix or call.keys
        grouped = Groups.of(call).call(call)
        all_keys, parts = _every_key(grouped)[..., :start], Parts.of(grouped, start, share)
        pool = all_keys if pool is None else pool.reshape(*all_keys.shape[:-1], -1)
        return parts, parts.cut(grouped, pool, start, is_alone=self.pool not in OF_MODEL)

    def check(self, call: Call) -> Call:
        super().check(call)
        keys, queries = call.keys, call.query.shape[-2]
        if self.prefix is None:
            if self.method.r > keys:
                raise ValueError(f"r is {self.method.r}; there are {keys} keys to keep")
            return call
        if queries != keys:
            raise ValueError(
                f"AfterPrefix got {queries} queries and {keys} keys; it needs a whole text, "
                f"as many of each (a model must run with use_cache=False)"
            )
        if self.prefix > keys:
            raise ValueError(f"prefix is {self.prefix}; the text has {keys} positions")
        if self.every is not None and self.every > keys:
            raise ValueError(f"every is {self.every}; the text has {keys} positions")
        return call

    def check_finite(self, call: Call) -> None:
        """Checks hidden keys too: a choice based on NaN has no meaning."""
        refuse_non_finite(call, None)

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        groups = Groups.of(call)
        grouped = groups.call(call)
        pool = _every_key(grouped)
        if self.pool is not None and call.layer.number is None:
            raise ValueError(
                "heads are pooled by hugging_face.replace_attention, which knows the layers; bare "
                "tensors have none"
            )
        if self.prefix is None:
            return groups.restored(
                _served(grouped, self._choose(grouped, pool, call.keys), call.keys)
            )
        exact = _exact(call.take(slice(0, self.prefix)))
        if self.prefix == call.keys:
            return exact
        return torch.cat([exact, groups.restored(self._after(grouped, pool))], dim=-2)

    def _after(self, call: Call, all_keys: Int[Tensor, "*own M"]) -> Float[Tensor, "*own G n V"]:
        """Computes the rows after the prefix, choice by choice."""
        assert self.prefix is not None
        pool, parts = all_keys[..., : self.prefix], []
        for number, start in enumerate(starts := self.starts(call.keys)):
            choice = self._choose(call, pool, start, number)
            rows = range(start, min(start + starts.step, call.keys))
            parts.append(_served(call.take(slice(rows.start, rows.stop)), choice, start))
            (pool,) = joined_pools([choice.positions], rows)
        return torch.cat(parts, dim=-2)

    def starts(self, keys: int) -> range:
        """Returns the first row after each choice in a text with this many keys."""
        return range(self.prefix or 0, keys, self.every or max(1, keys))

    @torch.no_grad()
    def _choose(
        self, call: Call, pool: Int[Tensor, "*own K"], start: int, number: int = 0
    ) -> KeptKeys:
        """Lets the method make choice `number` from a pool of keys; indices are those of the call.

        Choices already made for all layers come first. The last one stands in for choices that are
        still to be made, because their output is not used.
        """
        if call.layer.kept is not None:
            return call.layer.kept[min(number, len(call.layer.kept) - 1)]
        if isinstance(self.method, Given):  # one choice for all texts, by position
            return self.method.keep(self.observe_part(call, pool, start))
        parts = Parts.of(call, start)
        return parts.joined([self.choose_part(*texts) for texts in parts.cut(call, pool, start)])

    @torch.no_grad()
    def choose_part(self, call: Call, pool: Int[Tensor, "*part K"], start: int) -> KeptKeys:
        """Lets the method choose for texts without padding; indices are those of the call."""
        return placed(self.choose_layer(self.observe_part(call, pool, start)), pool)

    @torch.no_grad()
    def choose_layer(self, observed: Observed) -> KeptKeys:
        """Keeps keys of one layer; raises ValueError for a pool of the model."""
        if self.method.r > observed.keys:
            return self._all_kept(observed)
        if self.pool is None:
            return self.method.keep(observed)
        if self.pool in OF_MODEL:
            raise ValueError(
                f"pool is {self.pool!r}; it needs a call of the whole model that was given to "
                f"replace_attention, whose layers are read first"
            )
        ranking = self.method.rank(observed)
        (counts,) = self.method.share(
            [ranking], self.method.r * ranking.keys.shape[1:-1].numel(), self._least
        )
        return self.method.cut(observed, ranking, counts.view(ranking.keys.shape[:-1]))

    def _all_kept(self, observed: Observed) -> KeptKeys:
        """Keeps all keys of a text with fewer than r."""
        choice = CacheMethod.pack(observed, torch.ones_like(available(observed)))
        value = working_precision(observed.value) if self.method.refits else choice.value
        return replace(choice, value=value)

    @property
    def _least(self) -> int:
        """Returns the least number of keys per head with `pool`."""
        always = 0 if self.prefix is None else min(self.sinks + self.recent, self.prefix)
        return max(always, self.floor)

    @torch.no_grad()
    def choose(self, calls: Collection[Arguments]) -> list[KeptKeys]:
        """Chooses the keys of all layers from the arguments of their calls, pooled layers together.

        Indices refer to the text. A call whose layer has `kept`, its choices so far, gets the next
        one. Pool "checked" would have to run the model: here it acts like "model". Raises
        ValueError like `forward`.
        """
        return self.choose_ways(calls)[0]

    @torch.no_grad()
    def choose_ways(self, calls: Collection[Arguments]) -> list[list[KeptKeys]]:
        """Like `choose`. With the pool "checked" it also returns r keys of every head."""
        with torch.autocast(next(iter(calls))["query"].device.type, enabled=False):
            parts, cuts = zip(*(self.parted(**call) for call in self._grown(calls)), strict=True)
            if self.pool not in OF_MODEL:
                return [
                    [
                        texts.joined([self.choose_part(*texts_call) for texts_call in cut])
                        for texts, cut in zip(parts, cuts, strict=True)
                    ]
                ]
            chosen = []
            for layers in zip(*cuts, strict=True):
                ways = self.choose_model(
                    [self.ranked(self.observe_part(*texts_call)) for texts_call in layers]
                )
                pools = [pool for _, pool, _ in layers]
                chosen.append([list(map(placed, way, pools)) for way in ways])
        return [
            [texts.joined([choice[way][n] for choice in chosen]) for n, texts in enumerate(parts)]
            for way in range(2 if self.pool == "checked" else 1)
        ]

    def _grown(self, calls: Collection[Arguments]) -> list[Arguments]:
        """Adds to calls the pools of their next choice, if it is not the first."""
        earlier = [layer.kept for call in calls if (layer := call.get("layer")) and layer.kept]
        if not earlier:
            return list(calls)
        keys, number = next(iter(calls))["key"].shape[-2], len(earlier[0])
        rows = range(*self.starts(keys)[number - 1 : number + 1])
        pools = joined_pools([choices[-1].positions for choices in earlier], rows)
        return [
            call | {"start": rows.stop, "pool": pool}
            for call, pool in zip(calls, pools, strict=True)
        ]

    @torch.no_grad()
    def ranked(self, observed: Observed) -> tuple[Observed, Ranking | None]:
        """Ranks the keys of a layer (None if all are kept), and frees what `cut` does not need."""
        if self.method.r > observed.keys:
            return observed, None
        ranking = self.method.rank(replace(observed))  # a copy, to free its derived tensors
        if self._cuts_by_rank:
            empty = observed.query.new_empty(*observed.query.shape[:-2], 0, observed.key.shape[-1])
            observed = replace(observed, query=empty, visible=None, positions=None, beside=None)
        return observed, ranking

    @property
    def _cuts_by_rank(self) -> bool:
        """Returns whether the method keeps the first keys of its ranking, whatever the queries."""
        return type(self.method).cut is CacheMethod.cut

    @torch.no_grad()
    def choose_model(
        self, layers: Sequence[tuple[Observed, Ranking | None]]
    ) -> list[list[KeptKeys]]:
        """Chooses the keys of all layers together, from the results of `ranked`.

        With the pool "checked", it also returns r keys of every head, from the same rankings.
        """
        ways = 2 if self.pool == "checked" else 1
        rankings = [ranking for _, ranking in layers if ranking is not None]
        if not rankings:  # all layers have the same number of keys
            return [[self._all_kept(observed) for observed, _ in layers]] * ways
        heads = sum(ranking.keys.shape[1:-1].numel() for ranking in rankings)
        counts = [self.method.share(rankings, self.method.r * heads, self._least)]
        if self.pool == "checked":
            counts.append([torch.full_like(count, self.method.r) for count in counts[0]])
        return [
            self._cut_all([observed for observed, _ in layers], rankings, of_way)
            for of_way in counts
        ]

    def _cut_all(
        self,
        layers: Sequence[Observed],
        rankings: Sequence[Ranking],
        counts: Sequence[Int[Tensor, "B H"]],
    ) -> list[KeptKeys]:
        """Keeps `counts` keys of each layer's heads; all numbers are read at once."""
        triples = [
            (observed, ranking, count.to(ranking.keys.device).view(*ranking.keys.shape[:-1], 1))
            for observed, ranking, count in zip(layers, rankings, counts, strict=True)
        ]
        if not self._cuts_by_rank:
            return [
                self.method.cut(replace(observed), ranking, count[..., 0])
                for observed, ranking, count in triples
            ]
        of_texts = iter(torch.cat(list(counts), dim=1).mT.tolist())
        sizes = [list(zip(*islice(of_texts, count.shape[1]), strict=True)) for count in counts]
        return [
            first_kept(observed, ranking.keys, count, list(chain(*of_layer)))
            for (observed, ranking, count), of_layer in zip(triples, sizes, strict=True)
        ]

    @torch.no_grad()
    def observe_part(
        self, call: Call, pool: Int[Tensor, "*own K"], start: int,
        own_past: AttentionState | None = None, shared: dict[Hashable, Tensor] | None = None,
    ) -> Observed:  # fmt: skip
        """Returns the method's input for a choice before row `start`.

        `own_past` is the state of all past queries over the keys up to their own, if known.
        `shared` holds tensors that are the same in all layers, from one layer to the next.
        """
        queries = range(call.query.shape[-2])
        past, served = (queries,) * 2 if self.prefix is None else (queries[:start], queries[start:])
        absent = pool < 0 if self.every is not None and (pool < 0).any() else None
        pool = pool if absent is None else pool.clamp_min(0)
        choice = Choice(
            call, pool, past, served, start, self.rows, self.seed, own_past,
            {} if shared is None else shared,
        )  # fmt: skip
        key, value = (x[..., 0, :start, :] for x in (call.key, call.value))
        if absent is not None or pool.shape[-1] < start:  # else the pool has all keys
            key, value = (x.take_along_dim(pool[..., None], -2) for x in (key, value))
        places, available = range(pool.shape[-1]), None if absent is None else ~absent
        always = (*places[: self.sinks], *places[::-1][: self.recent])
        protected = choice.once(
            (always, pool.device), lambda: torch.tensor(always, dtype=torch.long).to(pool.device)
        )
        if (mask := call.attn_mask) is not None:  # heads may have masks, layers windows
            pairs = mask[..., start:, :] if start < mask.shape[-2] else mask
            visible = pairs.any(dim=(-3, -2)).expand(*pool.shape[:-1], -1).gather(-1, pool)
            available = visible if available is None else visible & available
        fields = OBSERVED[self.observed](choice)
        if absent is not None:
            held, in_text = ~absent[..., None, None, :], fields.get("visible")
            fields["visible"] = held if in_text is None else held & in_text
            sinks = (protected < self.sinks) * absent.sum(dim=-1, keepdim=True)  # come after -1
            protected = (protected + sinks).clamp_max(places[-1])
        return Observed(
            key=key,
            value=value,
            kernel=call.kernel,
            protected=None if self.prefix is None else protected,
            available=available,
            projection=call.layer.projection,
            rotary=call.layer.rotary,
            start=start,
            **fields,
        )

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts multiply-adds for kept keys, later keys and the choice, averaged over all
        queries."""
        rows = min(self.rows, sizes.queries)
        if self.prefix is None:
            chosen = self.method.multiply_adds(rows, sizes.keys, sizes.head_dim, sizes.value_dim)
            return min(self.method.r, sizes.keys) * sizes.one_key + chosen / sizes.queries
        after = max(0, sizes.queries - self.prefix)
        before = sizes.queries - after
        chosen = self.method.multiply_adds(rows, self.prefix, sizes.head_dim, sizes.value_dim)
        keys = before * (before + 1) / 2 + after * (self.method.r + (after + 1) / 2)
        choices = 1 if self.every is None else -(-after // self.every)
        return (keys * sizes.one_key + choices * chosen) / sizes.queries


def _every_key(call: Call) -> Int[Tensor, "*own M"]:
    return torch.arange(call.keys, device=call.key.device).expand(*call.key.shape[:-3], -1)


def placed(choice: KeptKeys, pool: Int[Tensor, "*own K"]) -> KeptKeys:
    """Converts indices into a pool to positions in the text; unused slots may point anywhere."""
    return replace(choice, indices=pool.gather(-1, choice.indices).clamp_min(0))


def joined_pools(
    layers: Sequence[Int[Tensor, "*own R"]], later: range
) -> list[Int[Tensor, "*own K"]]:
    """Joins each layer's kept positions (-1 = none) and the later ones, for the next choice.

    Positions ascend. All pools are as wide as the largest head of all layers needs; other heads
    have -1 in their first places.
    """
    slots = max(positions.shape[-1] for positions in layers)
    return [
        torch.cat(
            [
                pad(positions, (slots - positions.shape[-1], 0), value=-1),
                torch.arange(later.start, later.stop, device=positions.device).expand(
                    *positions.shape[:-1], -1
                ),
            ],
            dim=-1,
        )
        .sort(dim=-1)
        .values
        for positions in layers
    ]


def _exact(call: Call) -> Float[Tensor, "*batch N V"]:
    """Computes exact attention of the first queries, with the same kernel as for a whole call.

    Fused attention takes two leading dimensions, so groups and heads are flattened into one.
    """
    visible_keys = call.query.shape[-2] if call.is_causal else call.keys
    tensors = [call.query, call.key[..., :visible_keys, :], call.value[..., :visible_keys, :]]
    mask = None if call.attn_mask is None else call.attn_mask[..., :visible_keys]
    if len(call.batch) > 2:
        tensors = [x.expand(*call.batch, -1, -1).flatten(1, -3) for x in tensors]
        if mask is not None and mask.ndim > 3:
            if any(size != 1 for size in mask.shape[1:-2]):
                mask = mask.expand(*call.batch[-(mask.ndim - 2) :], -1, -1)
            mask = mask.flatten(1, -3)
    output = attention(*tensors, kernel=call.kernel, attn_mask=mask, is_causal=call.is_causal)
    return output.view(*call.batch, *output.shape[-2:])


def _served(call: Call, choice: KeptKeys, start: int) -> Float[Tensor, "*own G N V"]:
    """Computes attention of queries over the kept keys and the keys from `start` on."""
    parts = []
    for block in call.blocks():
        visible = visible_pairs(block)
        state = kept_state(
            block.query, block.key[..., 0, :, :], block.value[..., 0, :, :], block.kernel,
            visible, choice,
        )  # fmt: skip
        if start < block.keys:
            scores = block.kernel.log_similarity(block.query, block.key[..., start:, :])
            later = None if visible is None else visible[..., start:]
            state = state.merge(attention_state(scores, block.value[..., start:, :], later))
        parts.append(state.output())
    return torch.cat(parts, dim=-2)
