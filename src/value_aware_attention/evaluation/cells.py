"""A grid cell: one approximation with one setting, on one trained model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from value_aware_attention import source
from value_aware_attention.approximations import SparseApproximation, SparseWeights
from value_aware_attention.approximations.approximation import weighted_sum
from value_aware_attention.attention import attention
from value_aware_attention.distributed import everywhere, shared_map
from value_aware_attention.error import relative_output_error
from value_aware_attention.evaluation.intervals import paired_difference
from value_aware_attention.evaluation.task import LayerCall, Layerwise, Task, UnitSums

__all__ = ["Cell", "end_metric", "evaluate_cell", "evaluate_own", "expand_axes", "source_hash"]

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
    cell: Cell, task: Task, calls: Sequence[LayerCall], exact: UnitSums
) -> dict[str, Any]:
    """The record of one cell: end metric with its paired interval, output error per layer."""
    audits = [_Audit(cell.build(layer)) for layer in range(len(calls))]
    sums = task.run(lambda layer: audits[layer])
    record: dict[str, Any] = {
        "approximation": cell.approximation,
        "parameters": dict(cell.parameters),
        **end_metric(sums, exact, task.metric),
        "relative_output_error": shared_map(
            lambda layer: _relative_error(cell.build(layer), calls[layer]), range(len(calls))
        ),
        "queries": math.prod(calls[0].query[..., calls[0].first_row :, 0].shape),
    }
    # A process may have had no unit to note anything of.
    support = max(everywhere(max(audit.largest_support for audit in audits)))
    error = max(everywhere(max(audit.largest_error for audit in audits)))
    return record | ({"largest_support": support, "largest_error": error} if support else {})


def evaluate_own(task: Task) -> dict[str, Any]:
    """The record of a model with the attention it was trained with, whatever that is.

    It is that model's row "exact": nothing is approximated, so there is no output error.
    """
    sums = task.run(None)
    return {
        "approximation": "exact",
        "parameters": {},
        **end_metric(sums, sums, task.metric),
        "relative_output_error": [],
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


def _metric(sums: UnitSums, exact: UnitSums, metric: str) -> dict[str, float]:
    """Value, paired difference to exact and their ends."""
    interval = paired_difference(sums.totals, exact.totals, sums.counts)
    ends = (interval.estimate, interval.low, interval.high)
    if metric == "perplexity":
        baseline = math.exp(exact.mean())
        value, low, high = (baseline * math.exp(min(end, 700.0)) for end in ends)
    else:
        scale = SCALES[metric]
        baseline = scale * exact.mean()
        value, low, high = (baseline + scale * end for end in ends)
    return {
        "value": value,
        "low": low,
        "high": high,
        "difference": value - baseline,
        "difference_low": low - baseline,
        "difference_high": high - baseline,
    }


@torch.inference_mode()
def _relative_error(method: nn.Module, call: LayerCall) -> float:
    """Mean relative output error of a layer on its own exact inputs."""
    inputs = (call.query, call.key, call.value)
    options: dict[str, Any] = {"kernel": call.kernel, "is_causal": call.is_causal}
    errors = relative_output_error(method(*inputs, **options), attention(*inputs, **options))
    return errors[..., call.first_row :].mean().item()


class _Audit(nn.Module):
    """Runs a method; one that solves for its keys goes through `select`, and its claim is kept."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method
        self.largest_support = 0
        self.largest_error = 0.0

    @property
    def supports_causal(self) -> bool:
        return getattr(self.method, "supports_causal", True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        method = self.method
        if not isinstance(method, SparseApproximation) or not method.solves_for_weights:
            return method(query, key, value, **options)
        chosen = method.select(query, key, value, **options)
        self._note(chosen, value)
        return weighted_sum(chosen.indices, chosen.weights, value.float()).to(value.dtype)

    def _note(self, chosen: SparseWeights, value: Tensor) -> None:
        error = chosen.error.max().sqrt() / value.float().norm(dim=-1).max()
        self.largest_error = max(self.largest_error, error.item())
        self.largest_support = max(self.largest_support, int(chosen.support().max()))


def source_hash(method: object) -> str:
    """Hash of the project's source that a method's output depends on, the evaluation included."""
    return source.source_hash(type(method).__module__, __name__)
