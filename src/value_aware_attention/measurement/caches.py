"""Measures the cost of cache methods to a model, split into four losses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from value_aware_attention.attention import attention
from value_aware_attention.caches import (
    AfterPrefix,
    AttentionMatching,
    CacheMethod,
    KeptKeys,
    Observed,
    Recent,
    ValueAware,
)
from value_aware_attention.call import Call, seconds_now
from value_aware_attention.decoding.after_prefix import Given
from value_aware_attention.hugging_face import own_kernel, replace_attention
from value_aware_attention.hugging_face.recording import recording
from value_aware_attention.measurement.layers import POOLS
from value_aware_attention.measurement.recorded import ExactRows
from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.measurement.task import Task, Text, kl_from_exact, measured_by_text
from value_aware_attention.measurement.windows import vocabulary_size
from value_aware_attention.records.cache_record import CacheCell, CacheGaps, CacheRecord
from value_aware_attention.records.estimate import Array, Estimate, estimate, mean

MOST = {"accuracy": 1.0, "exact_match": 1.0, "cosine_distance": 2.0}
"""Largest values of end metrics that have one"""
REFERENCES = ("observed", "served", "alone", "refitted")
"""Sets that a method is compared with, found by its own search, or by the default one: on the
queries that it observed, on as many served ones, for each served query alone, and those on served
queries with refitted biases and values."""
GAPS: Mapping[str, tuple[str, str]] = {
    "criterion": ("method", "observed"),
    "information": ("observed", "served"),
    "sharing": ("served", "alone"),
    "weights": ("served", "refitted"),
}
"""Each gap as a ratio of two errors"""


@torch.inference_mode()
def alone_errors(measured: ExactRows, like: AfterPrefix) -> Float[Tensor, "B H"]:
    """Computes the errors that a set of r keys for each served query alone leaves on it.

    `like` tells r and which keys are protected.
    """
    best = ValueAware(like.method.r)
    rows = like.rows if like.prefix is None else measured.rows.query.shape[-2]
    served = like.like(best, observed="hindsight", rows=rows)
    alone = _by_query(served.observe(**measured.call.arguments(), layer=measured.call.layer))
    errors = alone.error(best.keep(alone)).sum(dim=-1)
    return errors.double().reshape(measured.call.query.shape[:2])


def _by_query(observed: Observed) -> Observed:
    """Gives every observed query a cache of its own."""
    rows = (*observed.batch, observed.query[..., 0].flatten(-2).shape[-1])
    visible, beside = observed.visible, observed.beside

    def apart(x: Tensor) -> Tensor:  # (*batch, G, W, .) -> (*batch, G W, 1, 1, .)
        return x.flatten(-3, -2)[..., None, None, :]

    def of_keys(x: Tensor | None) -> Tensor | None:  # (*batch, M) -> (*batch, G W, M)
        return None if x is None else x.expand(*observed.batch, -1)[..., None, :].expand(*rows, -1)

    return replace(
        observed,
        query=apart(observed.query),
        key=observed.key[..., None, :, :].expand(*rows, -1, -1),
        value=observed.value[..., None, :, :].expand(*rows, -1, -1),
        visible=None if visible is None else apart(visible.expand(observed.log_similarity.shape)),
        protected=of_keys(observed.protected),
        available=of_keys(observed.available),
        beside=None if beside is None else beside.rearranged(apart),
        projection=None,
        positions=None,
    )


def gaps(errors: Mapping[str, Array], **setting: Any) -> Iterator[CacheGaps]:
    """Computes the gaps of a setting from errors (units, layers, heads), pooled and for each head.

    `errors` has those of the method under "method", and those of `REFERENCES`.
    """
    for axes in POOLS:
        pooled = {name: error.sum(axis=axes) for name, error in errors.items()}
        for place in np.ndindex(pooled["method"].shape[1:]):
            layer, head = (*place, None, None)[:2]
            ratios: dict[str, Any] = {
                gap: estimate(pooled[above][:, *place], pooled[below][:, *place], least=0.0)
                for gap, (above, below) in GAPS.items()
            }
            yield CacheGaps(**setting, layer=layer, head=head, **ratios)


SERVED = 64
"""Queries of each head and unit, after a prefix, that errors are measured on, at most"""


@dataclass(frozen=True)
class CacheSetting:
    """A method with r keys that observes some queries."""

    method: str
    observed: str
    r: int
    after: AfterPrefix
    pool: str = ""
    """The heads that share their keys; empty: every head keeps r"""
    gaps: bool = False
    """True: its four gaps are measured, by layer and head."""

    def __str__(self) -> str:
        return f"{self.method} {self.observed} r={self.r}"

    @property
    def named(self) -> dict[str, Any]:
        """Names it in a record; a method that looks at no query observes 0 rows."""
        rows = self.after.rows if self.after.method.observes else 0
        return {"method": self.method, "observed": self.observed, "rows": rows, "r": self.r}


def cache_settings(
    methods: Mapping[str, Callable[[int], CacheMethod]],
    *,
    sizes: Sequence[int],
    observed: Sequence[str],
    gaps_of: Sequence[str] = (),
    pools: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    **options: Any,
) -> list[CacheSetting]:
    """Lists every method at every size with every way to observe; `options` are `AfterPrefix`'s.

    A way is what `AfterPrefix` observes, with a number of rows where it has one of its own: "last
    32". A method that chooses alike whatever the queries is listed once, as observing "nothing".
    `pools` adds a method with other budgets, such as "layer" or "model", each with its ways.
    """
    settings = []
    for r, (name, build) in product(sizes, methods.items()):
        method = build(r)
        for pool, ways in {"": observed, **(pools or {}).get(name, {})}.items():
            budget = {"pool": pool} if pool else {}
            for look in ways if method.observes else ways[:1]:
                word, _, rows = look.partition(" ")
                way = {"observed": word} | ({"rows": int(rows)} if rows else {})
                label = word if method.observes else "nothing"
                placed = AfterPrefix(method, **options | way | budget)
                has_gaps = name in gaps_of and not pool
                settings.append(CacheSetting(name, label, r, placed, pool, has_gaps))
    return settings


@torch.inference_mode()
def measure_caches(
    task: Task,
    settings: Sequence[CacheSetting],
    *,
    model_name: str,
    task_name: str,
    description: str = "",
    progress: bool = True,
) -> CacheRecord:
    """Measures every setting on the same texts: output errors, end metrics, gaps, time to choose.

    Errors are those of each layer on the exact model's queries; end metrics have the method in all
    layers: "kl", KL(exact || compressed) of the tokens in nats a served position (without a
    language-model head "cosine_distance", 1 - cosine of the last hidden states), and those of
    `task.ends`. A query is served that comes after the prefix; of an encoder, one not observed.
    Settings may observe different numbers of rows, those of an encoder equal ones.
    """
    first = settings[0].after
    if any(s.after.prefix != first.prefix for s in settings):
        raise ValueError("the settings differ in prefix; measure them one by one")
    if first.prefix is None and any(s.after.rows != first.rows for s in settings):
        raise ValueError("the settings differ in rows, which of an encoder are not served")
    if first.prefix is None and any(s.after.observed == "last" for s in settings):
        raise ValueError("observed is 'last'; of an encoder it must be noncausal or hindsight")
    results = measured_by_text(
        task, settings, lambda text: partial(_measured, _Exact.of(task, text, settings)), progress
    )
    pairs, units = list(zip(results, settings, strict=True)), results[0]
    _, key_value_heads, groups, length, head_dim = units.shape
    return CacheRecord(
        model=model_name,
        task=task_name,
        description=description,
        kernel=type(own_kernel(task.model)).__name__.lower(),
        prefix=first.prefix,
        length=length,
        seeds=tuple(units.seeds.tolist()),
        layers=units.norm.shape[1],
        key_value_heads=key_value_heads,
        query_heads=key_value_heads * groups,
        head_dim=head_dim,
        exact=_estimates(units.exact),
        prefill_seconds=float(np.median([result.prefill for result in results])),
        cells=tuple(result.cell(setting) for result, setting in pairs),
        gaps=tuple(gap for result, setting in pairs for gap in result.gaps(setting)),
        run_on=run_on(task.device.type),
    )


@dataclass(frozen=True)
class _Result:
    """Holds the measurements of one setting on some units."""

    seeds: NDArray[np.int64]
    norm: Array  # ||o||^2 (units, layers, heads)
    errors: Mapping[str, Array]  # of "method", and of `REFERENCES` for gaps: as `norm`
    ends: Mapping[str, Array]  # end metrics by name (units)
    exact: Mapping[str, Array]  # those of the exact model
    keys: Array  # kept (units, layers, heads)
    seconds: Array  # of a choice (texts)
    prefill: Array  # seconds of exact attention over the keys that are chosen from (texts)
    multiply_adds: float
    shape: Sequence[int]  # of queries: texts, key-value heads, query heads of each, positions, D

    def cell(self, setting: CacheSetting) -> CacheCell:
        relative, norm = self._relative(self.errors["method"]), self._relative(self.norm)
        by_layer = relative.mean(axis=0)
        numbers = {"error": relative.mean(axis=1), **self.ends}
        return CacheCell(
            **setting.named,
            pool=setting.pool,
            joint=isinstance(setting.after.method, ValueAware),
            refits=setting.after.method.refits,
            # each layer's ratio of sums, linearised: its norms are a sample too
            error=mean((by_layer + relative - by_layer * norm).mean(axis=1)),
            by_layer=tuple(map(float, by_layer)),
            keys=tuple(map(tuple, self.keys.mean(axis=0).tolist())) if setting.pool else (),
            ends=_estimates(self.ends),
            by_unit={name: tuple(units.tolist()) for name, units in numbers.items()},
            multiply_adds=self.multiply_adds,
            seconds=float(self.seconds.mean()),
        )

    def gaps(self, setting: CacheSetting) -> Sequence[CacheGaps]:
        if len(self.errors) == 1:
            return ()
        norm = self._mean_norm()[:, None]
        errors = {name: error / norm for name, error in self.errors.items()}
        return tuple(gaps(errors, **setting.named))

    def _relative(self, sums: Array) -> Array:
        """Divides each unit's and layer's sum over heads by the layer's mean norm."""
        return sums.sum(axis=2) / self._mean_norm()

    def _mean_norm(self) -> Array:
        """Averages ||o||^2 of a unit, by layer, so that no layer dominates; 1 where it is 0."""
        norm = self.norm.sum(axis=2).mean(axis=0)
        return np.where(norm > 0, norm, 1)


@dataclass(frozen=True)
class _Exact:
    """Holds a text as the exact model reads it, with which methods are compared."""

    task: Task
    text: Text
    layers: Sequence[ExactRows]  # the served queries on which errors are measured
    served: Int[Tensor, " n"]  # places of all served queries
    output: Tensor  # logits, or last hidden states
    best: dict[str, Array] = field(default_factory=dict)  # errors of best sets, by their method

    @classmethod
    def of(cls, task: Task, text: Text, settings: Sequence[CacheSetting]) -> "_Exact":
        """Lets the exact model read the text."""
        like = settings[0].after
        repeats = any(setting.after.observed == "repeat" for setting in settings)
        with recording(
            task.model, shares_keys=True, repeated=like.prefix if repeats else None
        ) as calls:
            _output(task, text)
        length = calls[0].query.shape[-2]
        # an encoder's are those beside as many rows as the methods observe
        rows = like.rows if like.prefix is None else min(SERVED, length - like.prefix)
        at = _observed_by(like.like(Recent(like.method.r), observed="hindsight", rows=rows), calls)
        served = torch.arange(length, device=at.device)
        if like.prefix is None:
            observed = _observed_by(like.like(like.method, observed="noncausal"), calls)
            served = served[~torch.isin(served, observed)]
        else:
            served = served[like.prefix :]
        layers = [ExactRows.served(call, at) for call in calls]
        return cls(task, text, layers, served, _output(task, text))

    @property
    def calls(self) -> list[Call]:
        """Lists the layers' calls."""
        return [layer.call for layer in self.layers]

    @cached_property
    def exact_ends(self) -> Mapping[str, Array]:
        """End metrics of the exact model."""
        return self.ends(self.output)

    def ends(self, output: Tensor) -> dict[str, Array]:
        """Computes end metrics by unit: the distance from the exact model's output, and others."""
        here, exact = output[:, self.served], self.output[:, self.served]
        if here.shape[-1] == vocabulary_size(self.task.model):
            units = {"kl": kl_from_exact(here, exact).mean(-1)}
        else:
            units = {"cosine_distance": 1 - cosine_similarity(here, exact, dim=-1).mean(-1)}
        if self.task.ends is not None:
            units |= self.task.ends(output, self.text)
        return {name: numbers.double().cpu().numpy() for name, numbers in units.items()}

    def errors(self, methods: Sequence[nn.Module]) -> Array:
        """Measures ||o - o~||^2 (units, layers, heads) of a method in each layer."""
        pairs = zip(self.layers, methods, strict=True)
        return _stacked([layer.squared_error(method) for layer, method in pairs])


def _measured(exact: _Exact, setting: CacheSetting) -> _Result:
    """Measures one setting on a text."""
    after, calls = setting.after, exact.calls
    begun = seconds_now()
    choices = _chosen(exact, after)
    seconds = seconds_now() - begun
    once = after.like(after.method, sinks=0, recent=0, pool=None)
    # a growing cache chooses again as it is served, an encoder as its layers change
    methods = [after if after.every else once.like(Given(choice)) for choice in choices]
    serves_choice = after.prefix is not None or after.pool == "model"
    served = methods if serves_choice else [after] * len(methods)
    with replace_attention(exact.task.model, served.__getitem__):
        output = _output(exact.task, exact.text)
    counts = [choice.log_weight.isfinite().sum(dim=-1) for choice in choices]
    keys = _stacked([count.double().flatten(1) for count in counts])
    return _Result(
        seeds=np.full(len(output), exact.text.seed),
        norm=_stacked([layer.squared_norm() for layer in exact.layers]),
        errors={"method": exact.errors(methods)}
        | (_references(exact, setting) if setting.gaps else {}),
        ends=exact.ends(output),
        exact=exact.exact_ends,
        keys=keys,
        seconds=np.array([seconds / keys.size]),
        prefill=np.array([_prefill_seconds(calls[len(calls) // 2], after.prefix)]),
        multiply_adds=_multiply_adds(calls[0], after),
        shape=calls[0].query.shape,
    )


def _chosen(exact: _Exact, after: AfterPrefix) -> list[KeptKeys]:
    """Chooses keys of all layers on the exact model's calls."""
    if after.pool != "checked":
        return after.choose([call.arguments() | {"layer": call.layer} for call in exact.calls])
    choices: list[KeptKeys] = []

    def record(method: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        choices.append(options["layer"].kept)

    handle = after.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with replace_attention(exact.task.model, after):
            _output(exact.task, exact.text)
    finally:
        handle.remove()
    return choices[-len(exact.layers) :]


def _references(exact: _Exact, setting: CacheSetting) -> dict[str, Array]:
    """Measures the errors of the best sets, found as the method's is, once for all settings."""
    after, r = setting.after, setting.r
    best = ValueAware(r, search=getattr(after.method, "search", "default"))
    methods = {
        "observed": after.like(best),
        "served": after.like(best, observed="hindsight"),
        "refitted": after.like(AttentionMatching(r, best), observed="hindsight"),
    }
    for method in methods.values():
        if repr(method) not in exact.best:
            exact.best[repr(method)] = exact.errors([method] * len(exact.layers))
    alone = f"alone {(r, after.sinks, after.recent)}"
    if alone not in exact.best:
        exact.best[alone] = _stacked([alone_errors(layer, after) for layer in exact.layers])
    errors = {name: exact.best[repr(method)] for name, method in methods.items()}
    return errors | {"alone": exact.best[alone]}


def _prefill_seconds(call: Call, prefix: int | None) -> float:
    """Times exact attention of a layer over the keys chosen from, for a key-value head."""
    tensors = [x.expand(*call.batch, -1, -1) for x in (call.query, call.key, call.value)]
    read = [x[..., :prefix, :].flatten(1, -3) for x in tensors]
    begun = seconds_now()
    attention(*read, kernel=call.kernel, is_causal=prefix is not None)
    return (seconds_now() - begun) / call.key.shape[:2].numel()


def _multiply_adds(call: Call, after: AfterPrefix) -> float:
    """Counts the multiply-adds of a choice for a key-value head."""
    keys = after.prefix or call.keys
    rows = call.query.shape[2] * min(after.rows, keys)
    return after.method.multiply_adds(rows, keys, call.key.shape[-1], call.value.shape[-1])


def _output(task: Task, text: Text) -> Tensor:
    """Computes logits, or last hidden states, of all positions."""
    inputs, _ = text.take(range(len(text.inputs)))
    options = {"use_cache": False} if task.metric == "perplexity" else {}
    return task.model(input_ids=inputs.to(task.device), **options)[0].float()


def _observed_by(after: AfterPrefix, calls: Sequence[Call]) -> Int[Tensor, " n"]:
    """Finds the places of the queries that a method observes."""
    positions = after.observe(**calls[0].arguments(), layer=calls[0].layer).positions
    assert positions is not None
    return positions


def _stacked(layers: Sequence[Float[Tensor, "B H"]]) -> Array:
    """Stacks numbers of all layers as (units, layers, heads)."""
    return torch.stack(list(layers), dim=1).double().cpu().numpy()


def _estimates(ends: Mapping[str, Array]) -> dict[str, Estimate]:
    return {name: mean(units, MOST.get(name, np.inf)) for name, units in ends.items()}
