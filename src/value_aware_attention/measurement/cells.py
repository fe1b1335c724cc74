"""Grid cells: the end metric and output error of one approximation with one setting."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from value_aware_attention.approximations import SparseApproximation, SparseWeights
from value_aware_attention.distributed import shared_map
from value_aware_attention.measurement.intervals import ratio_of_sums
from value_aware_attention.measurement.record import CellError
from value_aware_attention.measurement.recorded import ExactRows
from value_aware_attention.measurement.tasks import Layerwise, UnitSums

__all__ = ["Setting", "cell_error", "end_metric"]

ENDS = ("low", "high", "difference_low", "difference_high")
SCALES = {"error": 100.0, "cosine": 1.0}  # metrics that are the mean per target, times this


@dataclass(frozen=True)
class Setting:
    """Names a method: `build` makes that of a layer, a report sorts and plots by `parameters`."""

    approximation: str
    parameters: Mapping[str, Any]
    build: Layerwise

    def __str__(self) -> str:
        return " ".join([self.approximation, *(f"{k}={v}" for k, v in self.parameters.items())])


def cell_error(build: Layerwise, layers: Sequence[ExactRows]) -> CellError:
    """Measures the relative output error of a method in all `layers` and in each of them."""
    numbers = range(len(layers))
    found = shared_map(lambda layer: _layer_errors(build(layer), layers[layer]), numbers)
    errors = np.array([layer.pop("squared_error") for layer in found])
    norms = np.array([layer.squared_norm().tolist() for layer in layers])
    estimate, low, high = ratio_of_sums(errors.sum(axis=0), norms.sum(axis=0))
    return CellError(
        relative=_known(estimate),
        low=_known(np.maximum(low, 0.0)),
        high=_known(high),
        by_layer=tuple(
            _known(error / norm) for error, norm in zip(errors.sum(1), norms.sum(1), strict=True)
        ),
        unit_squared_errors=tuple(tuple(map(_known, layer)) for layer in errors),
        unit_squared_norms=tuple(tuple(map(_known, layer)) for layer in norms),
        queries=layers[0].rows.rows.numel(),
        **{name: max(layer[name] for layer in found) for name in found[0]},
    )


@torch.inference_mode()
def _layer_errors(method: nn.Module, layer: ExactRows) -> dict[str, Any]:
    """Measures a layer's ||o - o~||^2 by unit, and checks the keys that a solver returns."""
    if not (isinstance(method, SparseApproximation) and method.solves_for_weights):
        return {"squared_error": layer.squared_error(method).tolist()}
    chosen: SparseWeights = method.select(**layer.rows.arguments())
    largest = chosen.error.max().sqrt() / layer.rows.value.float().norm(dim=-1).max()
    return {
        "squared_error": chosen.error.double().sum(dim=(1, 2)).tolist(),
        "largest_support": int(chosen.support().max()),
        "largest_error": largest.item(),
    }


def _known(number: Any) -> float | None:
    """Returns a number for JSON: None where it is not finite."""
    return float(number) if math.isfinite(number) else None


def end_metric(sums: UnitSums, exact: UnitSums, metric: str) -> dict[str, Any]:
    """Computes the fields of `record.EndMetric`, with the paired interval around exact's."""
    return {
        "count": int(sums.counts.sum()),
        "unit_totals": tuple(sums.totals.tolist()),
        "unit_counts": tuple(sums.counts.tolist()),
        **_metric(sums, exact, metric),
    }


def _metric(sums: UnitSums, exact: UnitSums, metric: str) -> dict[str, float | None]:
    """Computes the value and the paired difference to exact; one unit has no interval (None)."""
    ends = [float(end) for end in ratio_of_sums(sums.totals - exact.totals, sums.counts)]
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
