"""Measures what cache methods cost a trained model on queries that they have not observed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from transformers import PreTrainedModel

from value_aware_attention.caches import AfterPrefix, CacheMethod, Recent, ValueAware
from value_aware_attention.hugging_face import own_kernel, replace_attention
from value_aware_attention.measurement.cache_gaps import gaps, served_errors
from value_aware_attention.measurement.cache_record import (
    CacheCell,
    CacheGaps,
    CacheRecord,
    Estimate,
    estimate,
)
from value_aware_attention.measurement.recorded import ExactRows, recording
from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.measurement.windows import vocabulary_size

__all__ = ["CacheBatch", "CacheSetting", "Ends", "cache_settings", "measure_caches"]

Ends = Callable[[Tensor, Any], Mapping[str, Tensor]]
"""(model output, batch) -> end metrics, one number a row of the batch."""
Array = NDArray[np.float64]
SERVED = 64
"""Queries of each head and unit that errors are measured on; fewer where fewer are served."""


@dataclass(frozen=True)
class CacheBatch:
    """Holds texts of one length as the model is given them, and the seed they were drawn by."""

    inputs: Mapping[str, Any]
    rest: Mapping[str, Tensor] | None = None
    """What end metrics are computed with beside the model's output: labels"""
    seed: int = 0


@dataclass(frozen=True)
class CacheSetting:
    """A method with r keys that observes some queries."""

    method: str
    observed: str
    r: int
    after: AfterPrefix
    gaps: bool = False
    """True: its four gaps are measured, by layer and head."""


def cache_settings(
    methods: Mapping[str, Callable[[int], CacheMethod]],
    *,
    sizes: Sequence[int],
    observed: Sequence[str],
    gaps_of: Sequence[str] = (),
    only: Mapping[str, Sequence[str]] | None = None,
    **options: Any,
) -> list[CacheSetting]:
    """Lists every method at every size with every way to observe; `options` are `AfterPrefix`'s.

    `only` names methods that observe in fewer ways, with these ways. A method that chooses alike
    whatever the queries is listed once, as observing "nothing".
    """
    found = []
    for r, (name, build) in product(sizes, methods.items()):
        method = build(r)
        looks = [one for one in observed if one in (only or {}).get(name, observed)]
        for look in looks if method.observes else looks[:1]:
            after = AfterPrefix(method, observed=look, **options)
            label = look if method.observes else "nothing"
            found.append(CacheSetting(name, label, r, after, gaps=name in gaps_of))
    return found


@torch.inference_mode()
def measure_caches(
    model: PreTrainedModel,
    batches: Sequence[CacheBatch],
    settings: Sequence[CacheSetting],
    *,
    model_name: str,
    task: str,
    description: str = "",
    ends: Ends | None = None,
    progress: bool = True,
) -> CacheRecord:
    """Measures every setting on the same texts: output errors, end metrics, gaps, time to choose.

    Errors are those of each layer on the exact model's queries; end metrics have the method in all
    layers: "kl", KL(exact || compressed) of the tokens in nats a served position (without a
    language-model head "cosine_distance", 1 - cosine of the last hidden states), and those of
    `ends`. A query is served that comes after the prefix; of an encoder, one not observed.
    """
    first = settings[0].after
    if any((s.after.prefix, s.after.rows) != (first.prefix, first.rows) for s in settings):
        raise ValueError("the settings differ in prefix or rows; measure them one by one")
    repeated = first.prefix if any(s.after.observed == "repeat" for s in settings) else None
    parts: list[list[_Part]] = []
    work = len(batches) * len(settings)
    with tqdm(total=work, disable=None if progress else True, leave=False) as bar:
        for batch in batches:
            texts = _Texts.of(model, batch, first, repeated, ends)
            parts.append([])
            for setting in settings:
                bar.set_postfix_str(f"{setting.method} {setting.observed} r={setting.r}")
                parts[-1].append(texts.measured(setting))
                bar.update()
    exact = _Part.joined([batch[0] for batch in parts]).exact
    joined = [_Part.joined([batch[i] for batch in parts]) for i in range(len(settings))]
    call = texts.measured_on[0].call
    return CacheRecord(
        model=model_name,
        task=task,
        description=description,
        kernel=type(own_kernel(model)).__name__.lower(),
        prefix=first.prefix,
        length=call.query.shape[-2],
        rows=first.rows,
        seeds=tuple(joined[0].seeds.tolist()),
        layers=len(texts.measured_on),
        key_value_heads=call.query.shape[1],
        query_heads=call.query.shape[1] * call.query.shape[2],
        head_dim=call.query.shape[-1],
        sharpest=tuple(_sharpest(each) for each in texts.measured_on),
        exact={name: _mean(units) for name, units in exact.items()},
        cells=tuple(part.cell(s) for part, s in zip(joined, settings, strict=True)),
        gaps=tuple(
            found for part, s in zip(joined, settings, strict=True) for found in part.gaps(s)
        ),
        run_on=run_on(call.query.device.type),
    )


@dataclass(frozen=True)
class _Part:
    """What one setting left on some units."""

    seeds: NDArray[np.int64]
    norm: Array
    """||o||^2 (units, layers, heads)"""
    errors: Mapping[str, Array]
    """"method", and the references where gaps are measured: (units, layers, heads)"""
    ends: Mapping[str, Array]
    """By name (units)"""
    exact: Mapping[str, Array]
    seconds: float
    multiply_adds: float

    @classmethod
    def joined(cls, parts: Sequence["_Part"]) -> "_Part":
        """Joins the units of several batches."""

        def together(name: str) -> dict[str, Array]:
            first = getattr(parts[0], name)
            return {key: np.concatenate([getattr(p, name)[key] for p in parts]) for key in first}

        return cls(
            np.concatenate([part.seeds for part in parts]),
            np.concatenate([part.norm for part in parts]),
            together("errors"),
            together("ends"),
            together("exact"),
            float(np.mean([part.seconds for part in parts])),
            parts[0].multiply_adds,
        )

    def cell(self, setting: CacheSetting) -> CacheCell:
        relative = self._relative("method").sum(axis=2)
        error = relative.mean(axis=1)
        numbers = {"error": error, **self.ends}
        return CacheCell(
            method=setting.method,
            observed=setting.observed,
            r=setting.r,
            joint=isinstance(setting.after.method, ValueAware),
            refits=setting.after.method.refits,
            error=_mean(error),
            by_layer=tuple(map(float, relative.mean(axis=0))),
            ends={name: _mean(units) for name, units in self.ends.items()},
            by_unit={name: tuple(units.tolist()) for name, units in numbers.items()},
            multiply_adds=self.multiply_adds,
            seconds=self.seconds,
        )

    def gaps(self, setting: CacheSetting) -> Sequence[CacheGaps]:
        if len(self.errors) == 1:
            return ()
        errors = {name: self._relative(name) for name in self.errors}
        return tuple(gaps(errors, method=setting.method, observed=setting.observed, r=setting.r))

    def _relative(self, name: str) -> Array:
        """Errors as parts of each layer's mean ||o||^2 a unit: no layer decides by its size.

        A layer whose outputs are all 0 has errors of 0.
        """
        norm = self.norm.sum(axis=2).mean(axis=0)[:, None]
        relative: Array = self.errors[name] / np.where(norm > 0, norm, 1)
        return relative


@dataclass(frozen=True)
class _Texts:
    """One batch as the exact model reads it."""

    model: PreTrainedModel
    batch: CacheBatch
    given_ends: Ends | None
    measured_on: Sequence[ExactRows]
    """By layer"""
    served: Tensor
    """The places of all served queries"""
    output: Tensor
    """Logits, or last hidden states, of the exact model"""
    exact: Mapping[str, Array]
    best: dict[int, dict[str, Array]]
    """What the best sets of r keys leave, once looked for"""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        batch: CacheBatch,
        like: AfterPrefix,
        repeated: int | None,
        ends: Ends | None,
    ) -> "_Texts":
        """Lets the exact model read it; `like` tells which queries are served."""
        with recording(model, shares_keys=True, repeated=repeated) as calls:
            model(**batch.inputs)
        length = calls[0].query.shape[-2]
        rows = min(SERVED, length - (like.prefix or length // 2))
        oracle = like.like(Recent(like.method.r), observed="hindsight", rows=rows)
        at = oracle.observe(**calls[0].arguments(), layer=calls[0].layer).positions
        assert at is not None
        every = torch.arange(length, device=at.device)
        if like.prefix is None:
            seen = like.like(like.method, observed="noncausal")
            observed = seen.observe(**calls[0].arguments(), layer=calls[0].layer).positions
            assert observed is not None
            served = every[~torch.isin(every, observed)]
        else:
            served = every[like.prefix :]
        output = model(**batch.inputs)[0].float()
        found = cls(
            model, batch, ends, [ExactRows.served(c, at) for c in calls], served, output, {}, {}
        )
        return replace(found, exact=found.ends(output))

    def measured(self, setting: CacheSetting) -> _Part:
        """Measures one setting."""
        after = setting.after
        with replace_attention(self.model, after):
            output = self.model(**self.batch.inputs)[0].float()
        errors = {"method": self._errors(after)}
        if setting.gaps:
            errors |= self._references(setting)
        seconds, counted = self._choice(after)
        return _Part(
            seeds=np.full(len(output), self.batch.seed),
            norm=_stacked([each.squared_norm() for each in self.measured_on]),
            errors=errors,
            ends=self.ends(output),
            exact=self.exact,
            seconds=seconds,
            multiply_adds=counted,
        )

    def ends(self, output: Tensor) -> dict[str, Array]:
        """Computes end metrics by unit: the distance from the exact model's output, and others."""
        here, exact = output[:, self.served], self.output[:, self.served]
        if here.shape[-1] == vocabulary_size(self.model):
            logs = here.log_softmax(-1), exact.log_softmax(-1)
            found = {"kl": kl_div(*logs, reduction="none", log_target=True).sum(-1).mean(-1)}
        else:
            found = {"cosine_distance": 1 - cosine_similarity(here, exact, dim=-1).mean(-1)}
        if self.given_ends is not None:
            found |= self.given_ends(output, self.batch.rest or {})
        return {name: units.double().cpu().numpy() for name, units in found.items()}

    def _references(self, setting: CacheSetting) -> dict[str, Array]:
        """Errors of the best sets found; those of the served queries are looked for once a size."""
        after, r = setting.after, setting.r
        if r not in self.best:
            found = [served_errors(each, after, r) for each in self.measured_on]
            self.best[r] = {name: _stacked([layer[name] for layer in found]) for name in found[0]}
        same = after.like(ValueAware(r))
        return {"observed": self._errors(same), **self.best[r]}

    def _errors(self, after: AfterPrefix) -> Array:
        return _stacked([each.squared_error(after) for each in self.measured_on])

    def _choice(self, after: AfterPrefix) -> tuple[float, float]:
        """Times one choice in the middle layer, by key-value head; counts its multiply-adds."""
        call = self.measured_on[len(self.measured_on) // 2].call
        seen = after.observe(**call.arguments(), layer=call.layer)
        begun = perf_counter()
        after.method.keep(seen)
        seconds = (perf_counter() - begun) / seen.batch.numel()
        rows = seen.query.shape[-2] * seen.query.shape[-3]
        sizes = rows, seen.keys, seen.key.shape[-1], seen.value.shape[-1]
        return seconds, after.method.multiply_adds(*sizes)


def _stacked(layers: Sequence[Float[Tensor, "B H"]]) -> Array:
    """Numbers of all layers as (units, layers, heads)."""
    array: Array = torch.stack(list(layers), dim=1).double().cpu().numpy()
    return array


def _mean(units: Array) -> Estimate:
    return estimate(units, np.ones_like(units))


def _sharpest(measured: ExactRows) -> tuple[float, ...]:
    """Averages the largest attention weight of served queries, by query head."""
    weights = measured.rows.weights
    return tuple(weights.amax(-1).mean(dim=(0, -1)).flatten().tolist())
