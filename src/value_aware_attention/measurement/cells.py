"""A grid cell: one approximation with one setting, on one trained model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from value_aware_attention.approximations import SparseApproximation, SparseWeights
from value_aware_attention.distributed import shared_map
from value_aware_attention.measurement import source
from value_aware_attention.measurement.intervals import paired_difference, ratio_of_sums
from value_aware_attention.measurement.sampled_rows import ExactRows
from value_aware_attention.measurement.task import Layerwise, Task, UnitSums

__all__ = [
    "Cell",
    "end_metric",
    "evaluate_cell",
    "evaluate_own",
    "expand_axes",
    "output_errors",
    "source_hash",
]

ENDS = ("low", "high", "difference_low", "difference_high")
SCALES = {"error": 100.0, "cosine": 1.0}  # metrics that are the mean per target, times this


@dataclass(frozen=True)
class Cell:
    """`build` makes the method of a layer; `parameters` is what the report sorts and plots by."""

    approximation: str
    parameters: Mapping[str, Any]
    build: Layerwise


def expand_axes(axes: Mapping[str, Sequence[Any]], length: int) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' values; "all" is `length` and larger budgets are left out."""
    values = [
        dict.fromkeys(length if value == "all" else value for value in axis)
        for axis in axes.values()
    ]
    for combination in product(*values):
        cell = dict(zip(axes, combination, strict=True))
        if cell.get("r", 0) <= length:
            yield cell


def evaluate_cell(
    cell: Cell, task: Task, layers: Sequence[ExactRows], exact: UnitSums
) -> dict[str, Any]:
    """The record of one cell: end metric with its paired interval, output error of `layers`."""
    return {
        "approximation": cell.approximation,
        "parameters": dict(cell.parameters),
        **end_metric(task.run(cell.build), exact, task.metric),
        **output_errors(cell, layers),
    }


def output_errors(cell: Cell, layers: Sequence[ExactRows]) -> dict[str, Any]:
    """||o - o~||^2 and ||o||^2 by layer and recorded unit, and the relative output error.

    sum ||o - o~||^2 / sum ||o||^2 over queries and heads: of all layers with its 95% interval over
    units (Student's t; None where it is not known), and of each layer alone. `queries` is their
    number in a layer. Of a method that solves for its weights also `largest_support`, the most keys
    that a query keeps, and `largest_error`, max ||o - o~|| / max ||v||.
    """
    numbers = range(len(layers))
    found = shared_map(lambda layer: _layer_errors(cell.build(layer), layers[layer]), numbers)
    errors = np.array([layer.pop("squared_error") for layer in found])
    norms = np.array([layer.squared_norm().tolist() for layer in layers])
    estimate, low, high = ratio_of_sums(errors.sum(axis=0), norms.sum(axis=0))
    return {
        "relative_output_error": _known(estimate),
        "relative_output_error_low": _known(np.maximum(low, 0.0)),
        "relative_output_error_high": _known(high),
        "relative_output_error_by_layer": [
            _known(error / norm) for error, norm in zip(errors.sum(1), norms.sum(1), strict=True)
        ],
        "unit_squared_errors": [[_known(unit) for unit in layer] for layer in errors],
        "unit_squared_norms": [[_known(unit) for unit in layer] for layer in norms],
        "queries": layers[0].rows.count,
        **{name: max(layer[name] for layer in found) for name in found[0]},
    }


@torch.inference_mode()
def _layer_errors(method: nn.Module, layer: ExactRows) -> dict[str, Any]:
    """A layer's ||o - o~||^2 by unit; and what a solver claims of its keys, checked."""
    if not (isinstance(method, SparseApproximation) and method.solves_for_weights):
        return {"squared_error": layer.squared_error(method).tolist()}
    chosen: SparseWeights = layer.rows.given_to(method.select)
    largest = chosen.error.max().sqrt() / layer.rows.value.float().norm(dim=-1).max()
    return {
        "squared_error": chosen.error.double().sum(dim=(1, 2)).tolist(),
        "largest_support": int(chosen.support().max()),
        "largest_error": largest.item(),
    }


def _known(number: Any) -> float | None:
    """A number as JSON holds it: None where it is not finite."""
    return float(number) if math.isfinite(number) else None


def evaluate_own(task: Task) -> dict[str, Any]:
    """The record of a model with the attention it was trained with, whatever that is.

    It is that model's row "exact": nothing is approximated, so there is no output error.
    """
    sums = task.run(None)
    return {
        "approximation": "exact",
        "parameters": {},
        **end_metric(sums, sums, task.metric),
    }


def end_metric(sums: UnitSums, exact: UnitSums, metric: str) -> dict[str, Any]:
    """The metric's sums unit by unit, its value, and the paired 95% interval around exact's.

    `value` is the mean per target as the metric is reported: exp(nats) for "perplexity", 100 times
    the share of wrong ones for "error", itself for "cosine". value = exact + difference.
    """
    return {
        "count": int(sums.counts.sum()),
        "unit_totals": sums.totals.tolist(),
        "unit_counts": sums.counts.tolist(),
        **_metric(sums, exact, metric),
    }


def _metric(sums: UnitSums, exact: UnitSums, metric: str) -> dict[str, float | None]:
    """Value, paired difference to exact and their ends; None for the ends of a single unit."""
    interval = paired_difference(sums.totals, exact.totals, sums.counts)
    ends = (interval.estimate, interval.low, interval.high)
    if metric == "perplexity":
        baseline = math.exp(exact.mean())
        value, low, high = (baseline * math.exp(min(end, 600.0)) for end in ends)
    else:
        scale = SCALES[metric]
        baseline = scale * exact.mean()
        value, low, high = (baseline + scale * end for end in ends)
    measured = {
        "value": value,
        "low": low,
        "high": high,
        "difference": value - baseline,
        "difference_low": low - baseline,
        "difference_high": high - baseline,
    }
    single = len(sums.counts) < 2
    return {name: None if single and name in ENDS else x for name, x in measured.items()}


def source_hash(method: object) -> str:
    """Hash of the project's source that a method's output depends on, the evaluation included."""
    return source.source_hash(type(method).__module__, __name__)
