"""A grid cell: one approximation with one setting, on one trained model."""

import ast
import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from value_aware_attention.approximations import SparseApproximation, SparseWeights
from value_aware_attention.approximations.approximation import weighted_sum
from value_aware_attention.attention import attention
from value_aware_attention.distributed import everywhere, shared_map
from value_aware_attention.error import relative_output_error
from value_aware_attention.evaluation.intervals import paired_difference
from value_aware_attention.evaluation.task import LayerCall, Layerwise, Task, UnitSums

__all__ = ["Cell", "end_metric", "evaluate_cell", "evaluate_own", "expand_axes", "source_hash"]

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
    return _hash_of_imports(type(method).__module__)


@cache
def _hash_of_imports(module: str) -> str:
    """Of a module's source, this one's, and that of everything of the project they import."""
    waiting = {module, __name__}
    seen: set[str] = set()
    while waiting:
        seen.add(name := waiting.pop())
        waiting |= _imported_from(name) - seen
    files = [Path(inspect.getfile(sys.modules[name])) for name in sorted(seen)]
    compiled = {source for file in files for source in file.parent.glob("*.cpp")}
    sources = [file.read_bytes() for file in (*files, *sorted(compiled))]
    return sha256(b"\0".join(sources)).hexdigest()


def _imported_from(name: str) -> set[str]:
    """The project's modules that a module imports, and those that define what it imports.

    By the text of its imports, not by the names it holds now: torch.compile leaves its own there.
    A package is not one of them, since it imports every method.
    """
    package = __name__.partition(".")[0]
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            module = import_module(str(node.module))
            items = [getattr(module, alias.name) for alias in node.names]
            origins = [getattr(x, "__module__", None) or getattr(x, "__name__", "") for x in items]
            found |= {x for x in origins if isinstance(x, str) and x.startswith(package + ".")}
            found |= set() if hasattr(module, "__path__") else {module.__name__}
    return found
