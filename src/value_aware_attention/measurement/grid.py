"""Evaluates a grid of cells on one trained model; cells already computed are found again."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from tqdm import tqdm

from value_aware_attention.approximations import Exact
from value_aware_attention.distributed import is_first, shared_map
from value_aware_attention.measurement.cells import Cell, evaluate_cell, source_hash
from value_aware_attention.measurement.output_error import output_error
from value_aware_attention.measurement.record_cache import RecordCache
from value_aware_attention.measurement.sampled_rows import ExactRows
from value_aware_attention.measurement.skewness import skewness
from value_aware_attention.measurement.skewness_gap import skewness_gap
from value_aware_attention.measurement.task import LayerCall, Task, UnitSums

__all__ = ["cell_key", "evaluate_grid", "kept_record", "measure_layers"]


def evaluate_grid(
    task: Task, cells: Sequence[Cell], found: RecordCache
) -> tuple[list[dict[str, Any]], Callable[[], list[LayerCall]]]:
    """Records of all cells, exact attention first; and what every layer was called with."""
    recorded = cache(task.layer_calls)
    layers = cache(lambda: [ExactRows.of(call) for call in recorded()])
    everything = Cell("exact", {}, lambda layer: Exact())

    def exact_record() -> dict[str, Any]:
        return evaluate_cell(everything, task, layers(), task.run(everything.build))

    baseline = kept_record(everything, found, exact_record)
    exact = UnitSums(np.array(baseline["unit_totals"]), np.array(baseline["unit_counts"]))
    records = [baseline]
    with tqdm(cells, unit="cell", disable=not is_first()) as progress:
        for cell in progress:
            progress.set_postfix_str(_describe(cell))
            compute = partial(_compute, cell, task, layers, exact)
            records.append(kept_record(cell, found, compute))
    return records, recorded


def measure_layers(calls: Sequence[LayerCall]) -> dict[str, Any]:
    """Per layer: skewness, output error against the keys kept, and how the two hang together."""
    return {
        "skewness": [
            {"layer": layer, **shape} for layer, shape in enumerate(shared_map(skewness, calls))
        ],
        "output_error": output_error(calls),
        "skewness_gap": skewness_gap(calls),
    }


def _compute(
    cell: Cell, task: Task, layers: Callable[[], list[ExactRows]], exact: UnitSums
) -> dict[str, Any]:
    return evaluate_cell(cell, task, layers(), exact)


def kept_record(
    cell: Cell, cache: RecordCache, compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The cell's record; what is wrong with it is said with its name."""
    key = cell_key(cell)
    try:
        return cache.get(key, compute)
    except ValueError as error:
        raise ValueError(f"{_describe(cell)}: {error}") from error


def _describe(cell: Cell) -> str:
    return " ".join([cell.approximation, *(f"{k}={v}" for k, v in cell.parameters.items())])


def cell_key(cell: Cell) -> dict[str, Any]:
    """What a cell's record depends on, its task apart."""
    method = cell.build(0)
    return {
        "approximation": cell.approximation,
        "parameters": dict(cell.parameters),
        "method": repr(method),
        "source": source_hash(method),
    }
