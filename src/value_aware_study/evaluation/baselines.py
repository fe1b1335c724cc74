"""Baselines of an evaluation: count models, and the model itself on a longer model's text."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from value_aware_attention.measurement import Task
from value_aware_attention.measurement.cells import end_metric
from value_aware_attention.measurement.record import Baseline, Cell, read
from value_aware_attention.measurement.record_cache import RecordCache
from value_aware_attention.measurement.source import source_hash
from value_aware_attention.measurement.tasks import UnitSums


def count_models(
    counted: Callable[[Task, UnitSums], Mapping[str, Baseline]],
    task: Task,
    exact: Cell,
    *,
    cache: str,
    key: Mapping[str, Any],
) -> dict[str, Baseline]:
    """Scores models that count the training tokens on the targets of `task`, or reads the scores.

    `exact` is the cell of exact attention, around which the intervals are; `key` names in the cache
    the count models' settings and their training text.
    """
    sums = UnitSums(np.array(exact.unit_totals), np.array(exact.unit_counts))
    identity = {
        **key,
        "source": source_hash(type(counted).__module__),
        "text": task.digest(0),
        "exact": exact.unit_totals,
    }

    def compute() -> dict[str, Any]:
        return {name: asdict(model) for name, model in counted(task, sums).items()}

    found = RecordCache(cache, {}).get(identity, compute)
    return {name: read(Baseline, model) for name, model in found.items()}


def longer_text(task: Any, longer: Mapping[str, Any] | None) -> dict[str, Baseline]:
    """Scores a masked model on a longer model's text, cut into pieces of its own length.

    `longer` configures the task of the longer sequences, whose masked tokens stay the same. Returns
    nothing for the longest model, where a piece does not start as the model's own sequences do, and
    where a source has less text than one of the longer sequences.
    """
    length = longer["sequences"]["length"] if longer else task.length
    if length == task.length or length % task.length:
        return {}
    try:
        cut = instantiate(longer)(model=task.model, device=task.device)
    except InstantiationException as error:
        if "fill no sequence" not in str(error):
            raise
        return {}
    if (cut.texts[0].inputs[:, 0] != task.texts[0].inputs[0, 0]).any():
        return {}
    sums = cut.run(None)
    return {"longer_text": Baseline(length=length, **end_metric(sums, sums, task.metric))}
