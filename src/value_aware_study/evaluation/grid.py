"""The grid of a model's approximations, its baselines, and its own attention."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from value_aware_attention.approximations import Approximation
from value_aware_attention.measurement import Record, Setting, Task
from value_aware_attention.measurement.measure import end_metric, measure_own
from value_aware_attention.measurement.store import RecordCache, source_hash
from value_aware_attention.measurement.task import UnitSums
from value_aware_attention.models.trained_attention import SEEDS_PER_LAYER, TrainedAttention
from value_aware_attention.records.record import Baseline, Cell, read


def grid(
    methods: Mapping[str, Mapping[str, object]],
    axes: Mapping[str, Mapping[str, Sequence[Any]]],
    length: int,
) -> list[Setting]:
    """Combines every method that has axes with all combinations of their values.

    `methods` are configs with a `_target_`. An axis lists an argument's values; "all" means
    `length` keys.
    """
    return [
        setting(name, {**methods[name], **parameters})
        for name, values in axes.items()
        for parameters in expand_axes(values, length)
    ]


def expand_axes(axes: Mapping[str, Sequence[Any]], length: int) -> Iterator[dict[str, Any]]:
    """Yields all combinations of the axes' values, without those of more than `length` keys."""
    for combination in product(
        *[
            dict.fromkeys(length if value == "all" else value for value in axis)
            for axis in axes.values()
        ]
    ):
        if (cell := dict(zip(axes, combination, strict=True))).get("r", 0) <= length:
            yield cell


def setting(name: str, option: Mapping[str, Any]) -> Setting:
    """Makes a cell of a configured method; its seed, if any, differs between layers.

    Its `build` raises ValueError if the config does not make an approximation.
    """
    method = {key: value for key, value in option.items() if key != "card"}

    def build(layer: int) -> Approximation:
        seeded = {"seed": method["seed"] * SEEDS_PER_LAYER + layer} if "seed" in method else {}
        if not isinstance((built := instantiate(method | seeded)), Approximation):
            raise ValueError(f"{name}: {method['_target_']} makes no approximation of attention")
        return built

    return Setting(
        name,
        {key: value for key, value in method.items() if key not in ("_target_", "search")},
        build,
    )


def own_record(task: Task, attention: TrainedAttention, kernel: str, **options: Any) -> Record:
    """Measures a model with the attention that it was trained with; the record has no grid.

    `kernel` is the requested name. If the method computes only another kernel, the record names
    that one; for a mixing it names none. `options` are those of `measure_own`.
    """
    names = [computed.__name__.lower() for computed in attention.kernels]
    if names and kernel not in names:
        kernel = names[0]
    return replace(
        measure_own(task, **options),
        kernel=None if attention.is_mixing else kernel,
        trained_with=attention.name,
        arguments=dict(attention.arguments),
    )


def count_models(
    counted: Callable[[Task, UnitSums], Mapping[str, Baseline]],
    task: Task,
    exact: Cell,
    *,
    cache: str,
    key: Mapping[str, object],
) -> dict[str, Baseline]:
    """Scores models that count training tokens on the targets of `task`, or reads cached scores.

    The intervals are paired with `exact`, the cell of exact attention. In the cache, `key` stands
    for the count models' settings and their training text.
    """
    sums = UnitSums(np.array(exact.unit_totals), np.array(exact.unit_counts))
    identity = {
        **key,
        "source": source_hash(
            type(counted).__module__, packages=("value_aware_attention", "value_aware_study")
        ),
        "text": task.digest(0),
        "exact": exact.unit_totals,
    }

    baselines = RecordCache(cache, {}).get(
        identity, lambda: {name: asdict(model) for name, model in counted(task, sums).items()}
    )
    return {name: read(Baseline, model) for name, model in baselines.items()}


def longer_text(task: Task, longer: Mapping[str, Any] | None) -> dict[str, Baseline]:
    """Scores a masked model on the long model's text, cut into pieces of the short one's length.

    `longer` configures the task of the long sequences; their masked tokens stay the same. The long
    model's own score on them separates training from length. Returns {} if a piece does not start
    as the model's own sequences do, or if a source has less text than one long sequence.
    """
    if longer is None or longer["sequences"]["length"] % longer["piece"]:
        return {}
    try:
        cut = instantiate(longer)(model=task.model, device=task.device)
    except InstantiationException as error:
        if "fill no sequence" not in str(error):
            raise
        return {}
    if (cut.texts[0].inputs[:, 0] != task.texts[0].inputs[0][0]).any():
        return {}
    sums = cut.run(None)
    return {
        "longer_text": Baseline(
            length=longer["sequences"]["length"], **end_metric(sums, sums, task.metric)
        )
    }
