"""Records of another run than the report's own, kept in git and shown beside ours.

They say themselves where they come from: scale, data, hardware, steps and tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from value_aware_study.reporting.captions import ours
from value_aware_study.reporting.records import Record, in_order
from value_aware_study.reporting.table import tokens_count, whole

__all__ = ["compact", "described", "label", "of_another_scale"]

BY_UNIT = ("unit_totals", "unit_counts", "unit_squared_errors", "unit_squared_norms")
TRAINING = ("curve", "hyperparameters", "parameters", "steps", "tokens")
EVERY_SIZE_TO = 65
"""Of the curves of output error every size to here is kept, powers of two past it, and the last."""


def compact(record: Record, training: Mapping[str, Any]) -> dict[str, Any]:
    """A record small enough for git, with how its model was trained.

    What is left out: the sums of single windows or sequences, from which the intervals, which
    stay, were computed, and most sizes of the curves of output error.
    """
    known = {name: training[name] for name in TRAINING}
    cells = [_without_units(cell) for cell in record["cells"]]
    small = {**record, "cells": cells, "training": known}
    if "count_models" in record:
        models = record["count_models"]
        small["count_models"] = {name: _without_units(models[name]) for name in models}
    if "longer_text" in record:
        small["longer_text"] = _without_units(record["longer_text"])
    if "output_error" in record:
        methods = record["output_error"]["methods"]
        thin = {name: _thin(curve) for name, curve in methods.items()}
        small["output_error"] = {**record["output_error"], "methods": thin}
    return small


def _without_units(measured: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in measured.items() if name not in BY_UNIT}


def _thin(curve: Mapping[str, Any]) -> dict[str, Any]:
    sizes = curve["sizes"]
    kept = [
        place
        for place, r in enumerate(sizes)
        if r <= EVERY_SIZE_TO or r & (r - 1) == 0 or r == sizes[-1]
    ]
    layers = [[layer[place] for place in kept] for layer in curve["layers"]]
    return {**curve, "sizes": [sizes[place] for place in kept], "layers": layers}


def of_another_scale(other: Iterable[Record], records: Iterable[Record]) -> list[Record]:
    """The other run's records, in order; none of the scale that the report itself is of."""
    own = {record["scale"] for record in records}
    return in_order(record for record in other if record["scale"] not in own)


def label(other: Sequence[Record]) -> str:
    """What its rows and columns are called: "gpu run"."""
    return f"{' and '.join(dict.fromkeys(record['scale'] for record in other))} run"


def described(other: Sequence[Record]) -> str:
    """Its scale, data, hardware, sizes, and how far its models were trained; "" for no records."""
    if not other:
        return ""
    trained = "; ".join(f"{record['model']} {_trained(record)}" for record in other)
    made = ours(other).replace("Ours: ", f"{label(other)}: ")
    return f"{made} Trained in that run: {trained}."


def _trained(record: Record) -> str:
    training = record["training"]
    return f"{whole(training['steps'])} steps, {tokens_count(training['tokens'])} tokens"
