"""Evaluates a grid of cells on one trained model; cells already computed are found again."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from value_aware_attention.approximations import Exact
from value_aware_attention.evaluation.cells import Cell, evaluate_cell, source_hash
from value_aware_attention.evaluation.output_error import output_error
from value_aware_attention.evaluation.skewness import skewness
from value_aware_attention.evaluation.skewness_gap import skewness_gap
from value_aware_attention.evaluation.task import LayerCall, Task, UnitSums

__all__ = ["RecordCache", "evaluate_grid", "measure_layers"]


class RecordCache:
    """Computed cells as JSON files, named by a hash of everything that determines them."""

    def __init__(self, folder: Path | str, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = identity

    def get(self, cell: Cell, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The cell's record, from the cache or computed and then kept."""
        path = self._path(cell)
        if path.exists():
            return json.loads(path.read_text())
        record = compute()
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(record))
        partial.replace(path)
        return record

    def _path(self, cell: Cell) -> Path:
        key = {
            **self.identity,
            "approximation": cell.approximation,
            "parameters": dict(cell.parameters),
            "method": repr(cell.build(0)),
            "source": source_hash(cell.build(0)),
        }
        return self.folder / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.json"


def evaluate_grid(
    task: Task, cells: Sequence[Cell], cache: RecordCache
) -> tuple[list[dict[str, Any]], Callable[[], list[LayerCall]]]:
    """Records of all cells, exact attention first; and what every layer was called with."""
    calls: list[LayerCall] = []

    def recorded() -> list[LayerCall]:
        calls.extend(task.layer_calls() if not calls else ())
        return calls

    everything = Cell("exact", {}, lambda layer: Exact())

    def exact_record() -> dict[str, Any]:
        return evaluate_cell(everything, task, recorded(), task.run(everything.build))

    baseline = cache.get(everything, exact_record)
    exact = UnitSums(np.array(baseline["unit_totals"]), np.array(baseline["unit_counts"]))
    records = [baseline]
    with tqdm(cells, unit="cell") as progress:
        for cell in progress:
            progress.set_postfix_str(_describe(cell))
            compute = partial(_compute, cell, task, recorded, exact)
            records.append(cache.get(cell, compute))
    return records, recorded


def measure_layers(calls: Sequence[LayerCall]) -> dict[str, Any]:
    """Per layer: skewness, output error against the keys kept, and how the two hang together."""
    return {
        "skewness": [{"layer": layer, **skewness(call)} for layer, call in enumerate(calls)],
        "output_error": output_error(calls),
        "skewness_gap": skewness_gap(calls),
    }


def _compute(
    cell: Cell, task: Task, calls: Callable[[], list[LayerCall]], exact: UnitSums
) -> dict[str, Any]:
    return evaluate_cell(cell, task, calls(), exact)


def _describe(cell: Cell) -> str:
    return " ".join([cell.approximation, *(f"{k}={v}" for k, v in cell.parameters.items())])
