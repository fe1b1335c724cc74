"""Measures the cost of cache methods to a model, split into four losses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity, kl_div
from tqdm import tqdm

from value_aware_attention.attention import attention
from value_aware_attention.caches import (
    AfterPrefix,
    AttentionMatching,
    CacheMethod,
    CacheProfile,
    KeptKeys,
    Observed,
    Recent,
    ValueAware,
)
from value_aware_attention.call import Call
from value_aware_attention.decoding.after_prefix import Given
from value_aware_attention.hugging_face import own_kernel, replace_attention
from value_aware_attention.hugging_face.recording import recording
from value_aware_attention.measurement.cache_record import CacheCell, CacheGaps, CacheRecord
from value_aware_attention.measurement.layers import POOLS
from value_aware_attention.measurement.record import Estimate, estimate
from value_aware_attention.measurement.recorded import ExactRows
from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.measurement.task import Task, Text, joined
from value_aware_attention.measurement.windows import vocabulary_size

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
Array = NDArray[np.float64]


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


def _by_query(seen: Observed) -> Observed:
    """Gives every observed query a cache of its own."""
    count = seen.query[..., 0].flatten(-2).shape[-1]

    def apart(x: Tensor) -> Tensor:  # (*batch, G, W, .) -> (*batch, G W, 1, 1, .)
        return x.flatten(-3, -2)[..., None, None, :]

    def of_keys(x: Tensor | None) -> Tensor | None:  # (*batch, M) -> (*batch, G W, M)
        return None if x is None else x.expand(*seen.batch, -1)[..., None, :].expand(*rows, -1)

    rows = (*seen.batch, count)
    visible, beside = seen.visible, seen.beside
    return replace(
        seen,
        query=apart(seen.query),
        key=seen.key[..., None, :, :].expand(*rows, -1, -1),
        value=seen.value[..., None, :, :].expand(*rows, -1, -1),
        visible=None if visible is None else apart(visible.expand(seen.log_similarity.shape)),
        protected=of_keys(seen.protected),
        available=of_keys(seen.available),
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
            found: dict[str, Any] = {
                gap: estimate(pooled[above][:, *place], pooled[below][:, *place], least=0.0)
                for gap, (above, below) in GAPS.items()
            }
            yield CacheGaps(**setting, layer=layer, head=head, **found)


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
    """The heads that share their keys, or a profile's name; empty: every head keeps r"""
    gaps: bool = False
    """True: its four gaps are measured, by layer and head."""

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
    only: Mapping[str, Sequence[str]] | None = None,
    after: Mapping[str, Mapping[str, float]] | None = None,
    pools: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    profiles: Mapping[str, CacheProfile] | None = None,
    **options: Any,
) -> list[CacheSetting]:
    """Lists every method at every size with every way to observe; `options` are `AfterPrefix`'s.

    A way is what `AfterPrefix` observes, with a number of rows where it has one of its own: "last
    32". `only` gives methods other ways, of which those are measured whose word is in `observed`;
    `after` gives methods options of their own, where a float is a share of r. A method that chooses
    alike whatever the queries is listed once, as observing "nothing". `pools` adds a method with
    other budgets, "layer", "model" or the name of one of `profiles`, each with its ways.
    """
    found, words = [], {look.split()[0] for look in observed}
    for r, (name, build) in product(sizes, methods.items()):
        method, own = build(r), (after or {}).get(name, {})
        given = {key: round(x * r) if isinstance(x, float) else x for key, x in own.items()}
        every = {"": (only or {}).get(name, observed)} | dict((pools or {}).get(name, {}))
        for pool, ways in every.items():
            looks = [one for one in ways if one.split()[0] in words]
            budget = {"pool": (profiles or {}).get(pool, pool)} if pool else {}
            for look in looks if method.observes else looks[:1]:
                word, _, rows = look.partition(" ")
                way = {"observed": word, **({"rows": int(rows)} if rows else {})}
                label = word if method.observes else "nothing"
                placed = AfterPrefix(method, **options | given | way | budget)
                gaps = name in gaps_of and not pool
                found.append(CacheSetting(name, label, r, placed, pool, gaps))
    return found


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
    parts, exact = _measured(task, settings, progress)
    call, pairs = exact.measured_on[0].call, list(zip(parts, settings, strict=True))
    return CacheRecord(
        model=model_name,
        task=task_name,
        description=description,
        kernel=type(own_kernel(task.model)).__name__.lower(),
        prefix=first.prefix,
        length=call.query.shape[-2],
        seeds=tuple(parts[0].seeds.tolist()),
        layers=len(exact.measured_on),
        key_value_heads=call.query.shape[1],
        query_heads=call.query.shape[1] * call.query.shape[2],
        head_dim=call.query.shape[-1],
        exact=_estimates(parts[0].exact),
        prefill_seconds=float(np.median([part.prefill for part in parts])),
        cells=tuple(part.cell(setting) for part, setting in pairs),
        gaps=tuple(found for part, setting in pairs for found in part.gaps(setting)),
        run_on=run_on(call.query.device.type),
    )


def _measured(
    task: Task, settings: Sequence[CacheSetting], progress: bool
) -> tuple[list["_Part"], "_ExactPart"]:
    """Measures every setting on all parts; returns the last part of the exact model too."""
    found: list[list[_Part]] = []
    work = task.parts * len(settings)
    with tqdm(total=work, disable=None if progress else True, leave=False) as bar:
        for part in range(task.parts):
            exact = _ExactPart.of(task, part, settings)
            found.append([])
            for setting in settings:
                bar.set_postfix_str(f"{setting.method} {setting.observed} r={setting.r}")
                found[-1].append(exact.measured(setting))
                bar.update()
    return [joined(of_setting) for of_setting in zip(*found, strict=True)], exact


@dataclass(frozen=True)
class _Part:
    """Holds the measurements of one setting on some units."""

    seeds: NDArray[np.int64]
    norm: Array
    """||o||^2 (units, layers, heads)"""
    errors: Mapping[str, Array]
    """"method", and the references where gaps are measured: (units, layers, heads)"""
    ends: Mapping[str, Array]
    """By name (units)"""
    exact: Mapping[str, Array]
    keys: Array
    """Keys kept (units, layers, heads)"""
    seconds: Array
    """Time of a choice (parts)"""
    prefill: Array
    """Time of exact attention over the keys that are chosen from (parts)"""
    multiply_adds: float

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
            error=_mean((by_layer + relative - by_layer * norm).mean(axis=1)),
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
class _ExactPart:
    """Holds a part of the task as the exact model reads it."""

    task: Task
    text: Text
    measured_on: Sequence[ExactRows]
    """By layer"""
    served: Tensor
    """The places of all served queries"""
    output: Tensor
    """Logits, or last hidden states, of the exact model"""
    known: dict[str, Array] = field(default_factory=dict)
    """Errors that best sets leave, once searched for, by their setting"""

    @classmethod
    def of(cls, task: Task, part: int, settings: Sequence[CacheSetting]) -> "_ExactPart":
        """Lets the exact model read it."""
        like, text = settings[0].after, task.texts[part]
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
        measured_on = [ExactRows.served(call, at) for call in calls]
        return cls(task, text, measured_on, served, _output(task, text))

    @cached_property
    def exact(self) -> Mapping[str, Array]:
        """End metrics of the exact model."""
        return self.ends(self.output)

    def measured(self, setting: CacheSetting) -> _Part:
        """Measures one setting."""
        after = setting.after
        begun = _time()
        kept = self._chosen(after)
        seconds = _time() - begun
        once = after.like(after.method, sinks=0, recent=0, pool=None)
        # a growing cache chooses again as it is served, an encoder as its layers change
        chosen = [after if after.every else once.like(Given(one)) for one in kept]
        is_given = after.prefix is not None or after.pool == "model"
        served = chosen if is_given else [after] * len(kept)
        with replace_attention(self.task.model, served.__getitem__):
            output = _output(self.task, self.text)
        pairs = zip(self.measured_on, chosen, strict=True)
        errors = {"method": _stacked([each.squared_error(one) for each, one in pairs])}
        if setting.gaps:
            errors |= self._references(setting)
        used = [one.log_weight.isfinite().sum(dim=-1) for one in kept]
        keys = _stacked([counts.double().flatten(1) for counts in used])
        return _Part(
            seeds=np.full(len(output), self.text.seed),
            norm=_stacked([each.squared_norm() for each in self.measured_on]),
            errors=errors,
            ends=self.ends(output),
            exact=self.exact,
            keys=keys,
            seconds=np.array([seconds / keys.size]),
            prefill=np.array([self.prefill_seconds(after)]),
            multiply_adds=self.multiply_adds(after),
        )

    def _chosen(self, after: AfterPrefix) -> list[KeptKeys]:
        """Chooses keys of all layers on the exact model's calls."""
        if after.pool != "checked":
            calls = [each.call for each in self.measured_on]
            return after.choose([call.arguments() | {"layer": call.layer} for call in calls])
        found: list[KeptKeys] = []

        def record(_: Any, __: Any, options: dict[str, Any]) -> None:
            found.append(options["layer"].kept)

        handle = after.register_forward_pre_hook(record, with_kwargs=True)
        try:
            with replace_attention(self.task.model, after):
                _output(self.task, self.text)
        finally:
            handle.remove()
        return found[-len(self.measured_on) :]

    def ends(self, output: Tensor) -> dict[str, Array]:
        """Computes end metrics by unit: the distance from the exact model's output, and others."""
        here, exact = output[:, self.served], self.output[:, self.served]
        if here.shape[-1] == vocabulary_size(self.task.model):
            logs = here.log_softmax(-1), exact.log_softmax(-1)
            found = {"kl": kl_div(*logs, reduction="none", log_target=True).sum(-1).mean(-1)}
        else:
            found = {"cosine_distance": 1 - cosine_similarity(here, exact, dim=-1).mean(-1)}
        if self.task.ends is not None:
            found |= self.task.ends(output, self.text)
        return {name: units.double().cpu().numpy() for name, units in found.items()}

    def _references(self, setting: CacheSetting) -> dict[str, Array]:
        """Computes the errors of the best sets, found as the method's is."""
        after, r = setting.after, setting.r
        best = ValueAware(r, search=getattr(after.method, "search", "default"))
        refit = AttentionMatching(r, best)
        served, refitted = (after.like(one, observed="hindsight") for one in (best, refit))

        return {
            "observed": self._once(repr(after.like(best)), lambda: self._errors(after.like(best))),
            "served": self._once(repr(served), lambda: self._errors(served)),
            "refitted": self._once(repr(refitted), lambda: self._errors(refitted)),
            "alone": self._once(
                f"alone {(r, after.sinks, after.recent)}",
                lambda: _stacked([alone_errors(each, after) for each in self.measured_on]),
            ),
        }

    def _once(self, name: str, compute: Callable[[], Array]) -> Array:
        """Computes errors that several settings are compared with for the first of them."""
        if name not in self.known:
            self.known[name] = compute()
        return self.known[name]

    def _errors(self, after: AfterPrefix) -> Array:
        return _stacked([each.squared_error(after) for each in self.measured_on])

    def prefill_seconds(self, after: AfterPrefix) -> float:
        """Times exact attention of a middle layer over the keys chosen from, by key-value head."""
        call = self.measured_on[len(self.measured_on) // 2].call
        every = [x.expand(*call.batch, -1, -1) for x in (call.query, call.key, call.value)]
        read = [x[..., : after.prefix, :].flatten(1, -3) for x in every]
        begun = _time()
        attention(*read, kernel=call.kernel, is_causal=after.prefix is not None)
        return (_time() - begun) / call.key.shape[:2].numel()

    def multiply_adds(self, after: AfterPrefix) -> float:
        """Counts the multiply-adds of a choice for a key-value head."""
        call = self.measured_on[0].call
        rows = call.query.shape[2] * min(after.rows, after.prefix or call.keys)
        sizes = rows, after.prefix or call.keys, call.key.shape[-1], call.value.shape[-1]
        return after.method.multiply_adds(*sizes)


def _time() -> float:
    """Reads the clock when all work is done, a GPU's too."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()


def _output(task: Task, text: Text) -> Tensor:
    """Computes logits, or last hidden states, of all positions."""
    inputs, _ = text.take(range(len(text.inputs)))
    options = {"use_cache": False} if task.metric == "perplexity" else {}
    return task.model(input_ids=inputs.to(task.device), **options)[0].float()


def _observed_by(after: AfterPrefix, calls: Sequence[Call]) -> Tensor:
    """Finds the places of the queries that a method observes."""
    positions = after.observe(**calls[0].arguments(), layer=calls[0].layer).positions
    assert positions is not None
    return positions


def _stacked(layers: Sequence[Float[Tensor, "B H"]]) -> Array:
    """Stacks numbers of all layers as (units, layers, heads)."""
    return torch.stack(list(layers), dim=1).double().cpu().numpy()


def _mean(units: Array, most: float = np.inf) -> Estimate:
    return estimate(units, np.ones_like(units), least=0.0, most=most)


def _estimates(ends: Mapping[str, Array]) -> dict[str, Estimate]:
    return {name: _mean(units, MOST.get(name, np.inf)) for name, units in ends.items()}
