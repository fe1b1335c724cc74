"""Measures what a compressed cache loses: of a model's predictions, and of its layers' outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from value_aware_attention.caches import AfterPrefix, CacheMethod, KeptKeys, Recent
from value_aware_attention.decoding.after_prefix import Given
from value_aware_attention.decoding.reading import SharedReading
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.measurement.gaps import REFERENCES, ServedQueries, observed_places
from value_aware_attention.measurement.gaps import gaps as gaps_of_errors
from value_aware_attention.measurement.run_on import Progress, run_on
from value_aware_attention.measurement.store import RecordCache
from value_aware_attention.measurement.task import Task, kl_from_exact
from value_aware_attention.measurement.windows import vocabulary_size
from value_aware_attention.records.cache_record import (
    BY_TEXT,
    FULL,
    CacheCell,
    CacheGaps,
    CacheRecord,
)
from value_aware_attention.records.estimate import Array, mean

Build = Callable[[int, int], AfterPrefix]
"""(r, prefix) -> how r keys of a prompt are chosen"""
Numbers = dict[str, list[Any]]
"""Measurements of a cache on a text by name, each a list over the texts of a batch"""


@dataclass(frozen=True)
class Prompt:
    """Holds a prompt and its continuation, whose last tokens are predicted.

    Attributes:
        tokens: Tokens of both.
        prefix: Tokens of the prompt.
        answer: Place of the first token that is predicted, above `prefix`.
    """

    tokens: Int[Tensor, " N"]
    prefix: int
    answer: int


@dataclass(frozen=True)
class CacheSetting:
    """A cache to be measured.

    Attributes:
        keep: Share of the keys, for records. None: r divided by the number of keys to choose from.
        gaps: True: its four gaps are measured, by layer and head.
    """

    cache: str
    after: AfterPrefix
    keep: float | None = None
    gaps: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """Names it in a record; a method that looks at no query has 0 rows of "nothing"."""
        method, rows, observed = self.after.method, self.after.rows, self.after.observed
        if not method.observes:
            rows, observed = 0, "nothing"
        return {"cache": self.cache, "observed": observed, "rows": rows, "r": method.r}


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

    A way is a value of `observed`, which may have its own number of rows: "last 32". A method that
    ignores the queries is listed once, as observing "nothing". `pools` adds methods with other
    budgets, such as "layer" or "model", each with its ways.
    """
    settings = []
    for r, (name, build) in product(sizes, methods.items()):
        method = build(r)
        for pool, ways in {"": observed, **(pools or {}).get(name, {})}.items():
            budget = {"pool": pool} if pool else {}
            for way in ways if method.observes else ways[:1]:
                word, _, rows = way.partition(" ")
                queries = {"observed": word} | ({"rows": int(rows)} if rows else {})
                after = AfterPrefix(method, **options | queries | budget)
                settings.append(CacheSetting(name, after, gaps=name in gaps_of and not pool))
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
    """Measures every setting on the texts of a task: losses of the model, errors of its layers.

    Errors are measured in each layer, on the exact model's queries. Losses are measured with the
    method in all layers: KL(exact || compressed) in nats per served position, or, without a
    language-model head, 1 - cosine of the last hidden states. Served queries come after the prefix;
    in an encoder, they are those not observed. Settings may observe different numbers of rows, but
    not for an encoder. Raises ValueError otherwise, and for different prefixes.
    """
    first = settings[0].after
    if any(s.after.prefix != first.prefix for s in settings):
        raise ValueError("the settings differ in prefix; measure them one by one")
    if first.prefix is None and any(s.after.rows != first.rows for s in settings):
        raise ValueError("the settings differ in rows, which of an encoder are not served")
    if first.prefix is None and any(s.after.observed == "last" for s in settings):
        raise ValueError("observed is 'last'; of an encoder it must be noncausal or hindsight")
    by_text = []
    for text in Progress(task.texts, postfix="caches", disable=not progress, leave=False):
        tokens, _ = text.take(range(len(text.inputs)))
        by_text.append(
            _Reading(task.model, tokens.to(task.device), settings, layers=True).measured()
        )
    return _record(
        by_text, settings, model=model_name, task=task_name, text="", description=description,
        prefix=first.prefix, length=task.length, run_on=run_on(task.device.type),
    )  # fmt: skip


def measure_prompts(
    model: PreTrainedModel, prompts: Sequence[Prompt], caches: Mapping[str, Build], *,
    keep: Sequence[float], store: RecordCache, name: str, task: str, text: str = "",
    description: str = "", gaps: bool = False, decoded: int = 0,
) -> CacheRecord:  # fmt: skip
    """Measures every cache at every share on the continuation of each prompt.

    A prompt is read once with its continuation; then each cache is chosen, and the continuation
    read again over the kept keys. With `gaps` the errors of layers are measured too, and the four
    gaps of caches that choose once, equally many keys in every head. `decoded` tokens in the place
    of the answer are decoded freely. Prompts that `store` holds are not read again. Raises
    ValueError for prompts of different lengths, and for a cache that chooses again (`every`) unless
    `gaps` is True and `decoded` 0.
    """
    if len(lengths := {prompt.prefix for prompt in prompts}) != 1:
        raise ValueError(f"prompts have {sorted(lengths)} tokens; they must have one length")
    (prefix,) = lengths
    settings = []
    for share, (cache, build) in product(keep, caches.items()):
        try:
            after = build(max(1, round(share * prefix)), prefix)
            if after.every and (decoded or not gaps):
                raise ValueError(f"every is {after.every}; gaps must then be True and decoded 0")
        except ValueError as error:
            raise ValueError(f"{cache}, keep {share:g} of {prefix} tokens: {error}") from None
        has_gaps = gaps and after.pool is None and after.every is None
        settings.append(CacheSetting(cache, after, share, has_gaps))

    @torch.no_grad()
    def measured(prompt: Prompt) -> list[Numbers]:
        return _Reading(
            model, prompt.tokens[None].to(model.device), settings, layers=gaps,
            answer=prompt.answer, decoded=decoded,
        ).measured()  # fmt: skip

    by_text = []
    for prompt in Progress(prompts, postfix=f"{task}, {prefix} tokens"):
        key = {
            "prompt": sha256(prompt.tokens.numpy().tobytes()).hexdigest(),
            "prefix": prefix,
            "answer": prompt.answer,
            "caches": [repr(setting.after) for setting in settings],
            "options": [gaps, decoded],
        }
        by_text.append(store.get(key, partial(measured, prompt)))
    return _record(
        by_text, settings, model=name, task=task, text=text, description=description,
        prefix=prefix, run_on=run_on(model.device.type),
    )  # fmt: skip


class _Reading:
    """A text that the exact model read once, for comparing caches with it.

    With `layers`, one pass over the whole text uses a cache, and its errors are measured in every
    layer. Otherwise only the continuation is read, over the kept keys.
    """

    def __init__(
        self, model: PreTrainedModel, tokens: Int[Tensor, "B N"],
        settings: Sequence[CacheSetting], *, layers: bool, answer: int | None = None,
        decoded: int = 0,
    ) -> None:  # fmt: skip
        self.settings, like = settings, settings[0].after
        repeats = any(setting.after.observed == "repeat" for setting in settings)
        self.shared = SharedReading(model, tokens, like.prefix, repeated=repeats)
        self.served = ServedQueries.of(self.shared.calls, like) if layers else None
        self.answer, self.decoded, start = answer, decoded, like.prefix or 0
        self.full_tokens: Tensor | None = None
        places = torch.arange(start, tokens.shape[1], device=tokens.device)
        if answer is not None:
            places = places[answer - 1 - start : -1]
        elif like.prefix is None:
            after = like.like(like.method, observed="noncausal")
            places = places[~torch.isin(places, observed_places(self.shared.calls[0], after))]
        self.rows, self.labels = places - start, None if answer is None else tokens[:, answer:]
        self.exact = (self.shared.output() if layers else self.shared.logits)[:, self.rows].float()

    def measured(self) -> list[Numbers]:
        """Measures the full cache, then the settings."""
        full = self._losses(self.exact)
        if self.decoded:
            prefix = self.shared.prefix or 0
            full |= self._decoding(self.shared.choose(AfterPrefix(Recent(prefix), prefix=prefix)))
        return [
            {name: x.double().tolist() for name, x in row.items()}
            for row in [full, *map(self._measured, self.settings)]
        ]

    def _measured(self, setting: CacheSetting) -> dict[str, Tensor]:
        choices = self.shared.choose(setting.after)
        numbers = (
            self._losses(self.shared.continued(choices)[:, self.rows].float())
            if self.served is None
            else self._in_layers(self.served, setting, choices)
        )
        return numbers | (self._decoding(choices) if self.decoded else {})

    def _in_layers(
        self, served: ServedQueries, setting: CacheSetting, choices: Sequence[KeptKeys]
    ) -> dict[str, Tensor]:
        """Measures the losses of one pass with the cache, and errors (texts, layers, heads)."""
        after = setting.after
        # a growing cache chooses again during a pass, an encoder as its layers change
        grows, is_fixed = after.every, after.prefix is not None or after.pool == "model"
        once = {"sinks": 0, "recent": 0, "pool": None}
        methods = [after if grows else after.like(Given(choice), **once) for choice in choices]
        of_layer = {
            cast(int, call.layer.number): method if is_fixed else after
            for call, method in zip(self.shared.calls, methods, strict=True)
        }
        with replace_attention(self.shared.model, of_layer.__getitem__, layers=of_layer):
            output = self.shared.output()
        counts = [choice.log_weight.isfinite().sum(dim=-1).flatten(1) for choice in choices]
        return {
            **self._losses(output[:, self.rows].float()),
            "keys": torch.stack(counts, dim=1),
            "norm": served.norms(),
            "method": served.errors(methods),
            **(served.best_errors(after) if setting.gaps else {}),
        }

    def _losses(self, output: Float[Tensor, "B n E"]) -> dict[str, Tensor]:
        """Compares predictions, or hidden states, with the exact model's, for each text."""
        if output.shape[-1] != vocabulary_size(self.shared.model):
            return {"cosine_distance": 1 - cosine_similarity(output, self.exact, dim=-1).mean(-1)}
        # caches below 1e-12 nats count as equal
        losses = {"kl": kl_from_exact(output, self.exact).mean(-1).clamp_min(1e-12)}
        if self.labels is not None:
            logs = output.log_softmax(dim=-1)
            losses["nats"] = -logs.gather(-1, self.labels[..., None])[..., 0].mean(-1)
            losses["right"] = (logs.argmax(dim=-1) == self.labels).float().mean(-1)
        return losses

    def _decoding(self, choices: Sequence[KeptKeys]) -> dict[str, Tensor]:
        """Decodes in place of the answer; the first call has the full cache, as the reference."""
        assert self.answer is not None
        tokens, seconds = self.shared.decoded(choices, self.answer, self.decoded)
        if self.full_tokens is None:
            self.full_tokens = tokens
        agreed = (tokens == self.full_tokens).cumprod(dim=1).double().mean(dim=1)
        return {"agreed": agreed, "seconds": torch.full_like(agreed, seconds)}


def _record(
    by_text: Sequence[Sequence[Numbers]], settings: Sequence[CacheSetting], **facts: Any
) -> CacheRecord:
    """Joins the measurements of all texts, the full cache's first."""
    full, *others = (
        {name: np.concatenate([text[name] for text in texts]) for name in texts[0]}
        for texts in zip(*by_text, strict=True)
    )
    keys = facts["prefix"] or facts["length"]
    cells = [CacheCell(cache=FULL, keep=1.0, **_by_text(full))]
    gaps: list[CacheGaps] = []
    for setting, units in zip(settings, others, strict=True):
        after, keep = setting.after, setting.keep or setting.after.method.r / keys
        errors = _errors(units) if "norm" in units else {}
        counts = units["keys"].mean(axis=0).tolist() if after.pool and errors else ()
        cells.append(
            CacheCell(
                **setting.named, keep=keep, pool=after.pool or "", **_by_text(units), **errors,
                keys=tuple(map(tuple, counts)),
            )
        )  # fmt: skip
        if setting.gaps:
            norm = _mean_norm(units)[:, None]
            gaps += gaps_of_errors(
                {name: units[name] / norm for name in ("method", *REFERENCES)}, **setting.named
            )
    return CacheRecord(cells=tuple(cells), gaps=tuple(gaps), **facts)


def _by_text(units: Mapping[str, Array]) -> dict[str, Any]:
    return {name: tuple(units[name].tolist()) for name in BY_TEXT if name in units}


def _errors(units: Mapping[str, Array]) -> dict[str, Any]:
    """Divides errors (texts, layers, heads) by their layers' mean norms."""
    mean_norm = _mean_norm(units)
    relative, norm = (units[name].sum(axis=2) / mean_norm for name in ("method", "norm"))
    by_layer = relative.mean(axis=0)
    return {
        # each layer's ratio of sums, linearised: its norms are a sample too
        "error": mean((by_layer + relative - by_layer * norm).mean(axis=1)),
        "by_layer": tuple(by_layer.tolist()),
        "errors": tuple(relative.mean(axis=1).tolist()),
    }


def _mean_norm(units: Mapping[str, Array]) -> Array:
    """Averages ||o||^2 of a text, by layer, so that no layer dominates; 1 where it is 0."""
    norm = units["norm"].sum(axis=2).mean(axis=0)
    return np.where(norm > 0, norm, 1)
