"""Runs a probe: output errors of the layers, then the end metric, window by window."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from value_aware_attention.approximations import Exact, OptimalValueAware
from value_aware_attention.approximations.closest_combination import engine
from value_aware_attention.hugging_face import own_kernel
from value_aware_attention.measurement.cells import Cell, end_metric, source_hash
from value_aware_attention.measurement.grid import kept_record
from value_aware_attention.measurement.record_cache import RecordCache
from value_aware_attention.measurement.task import LayerCall, UnitSums
from value_aware_attention.probe.language_models import WindowTask
from value_aware_attention.probe.layer_errors import LayerErrors, layer_error
from value_aware_attention.probe.lines import (
    HEADLINE_SIZES,
    headline,
    layer_lines,
    metric_header,
    metric_line,
)

__all__ = ["Build", "ProbeRun", "Show", "weights_hash"]

Build = Callable[[int, int], nn.Module]
"""(number of keys r, layer index) -> the method."""
Show = Callable[[str], None]


@dataclass
class ProbeRun:
    """One probe; each number is computed window by window, and found again in `cache`, a folder."""

    task: WindowTask
    rows: int
    search: str
    sizes: list[int]
    methods: Mapping[str, Build]
    name: str
    cache: Path | str | None
    show: Show | None
    first: list[LayerCall] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Everything, layers first."""
        self.found = None if self.cache is None else RecordCache(self.cache, self._identity())
        self.first = self.task.layer_calls()
        with tqdm(
            total=self._work(), unit="", disable=None if self.show else True,
            bar_format="{l_bar}{bar}| {elapsed}, {remaining} left {postfix}", leave=False,
        ) as self.bar:  # fmt: skip
            errors = LayerErrors.of([self._layers(i) for i in range(len(self.task.windows))])
            record = self._header() | _of_layers(errors, self.sizes)
            record["headline"] = headline(record)
            self._say(*layer_lines(record))
            record["cells"] = self._cells(record)
        return record

    def _layers(self, window: int) -> list[dict[str, Any]]:
        """Output errors of every layer on one window."""
        self.bar.set_postfix_str(f"layers, window {window + 1}")
        cell = Cell(
            "layer_errors",
            {"rows": self.rows, "window": self.task.digest(window)},
            lambda layer: OptimalValueAware(1, self.search),
        )
        found = self._get(cell, partial(self._measure_layers, window))
        self.bar.update(self._layer_work())
        return found["layers"]

    def _measure_layers(self, window: int) -> dict[str, Any]:
        calls = self.task.layer_calls(window)
        return {"layers": [layer_error(c, rows=self.rows, search=self.search) for c in calls]}

    def _cells(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The end metric: exact attention, then every method at every size."""
        exact = self._sums(Cell("exact", {}, lambda layer: Exact()), work=1)
        cells = [self._cell("exact", {}, exact, exact)]
        self._say("", metric_header(cells[0], record, list(self.methods)))
        for r in self.sizes:
            row = []
            for name, build in self.methods.items():
                cell = Cell(name, {"r": r}, partial(build, r))
                sums = self._sums(cell, work=_work_of(build(r, 0)))
                row.append(self._cell(name, {"r": r}, sums, exact))
            self._say(metric_line(row, record))
            cells += row
        return cells

    def _sums(self, cell: Cell, work: float) -> UnitSums:
        """A cell's end metric on every window, each found again or computed."""
        scores = []
        for window in range(len(self.task.windows)):
            self.bar.set_postfix_str(f"{cell.approximation} {cell.parameters.get('r', '')}")
            at_window = Cell(
                cell.approximation,
                {**cell.parameters, "window": self.task.digest(window)},
                cell.build,
            )
            found = self._get(at_window, partial(self._score, cell, window))
            scores.append((found["total"], found["count"]))
            self.bar.update(work)
        totals, counts = np.array(scores, dtype=np.float64).T
        return UnitSums(totals, counts)

    @torch.inference_mode()
    def _score(self, cell: Cell, window: int) -> dict[str, float]:
        total, count = self.task.score(cell.build, window)
        return {"total": total, "count": count}

    def _cell(
        self, name: str, parameters: dict[str, Any], sums: UnitSums, exact: UnitSums
    ) -> dict[str, Any]:
        metric = end_metric(sums, exact, self.task.metric)
        return {"approximation": name, "parameters": parameters, **metric}

    def _get(self, cell: Cell, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return compute() if self.found is None else kept_record(cell, self.found, compute)

    def _identity(self) -> dict[str, Any]:
        """What every number depends on beside its method and its window."""
        weights = next(self.task.model.parameters())
        return {
            "weights": weights_hash(self.task.model),
            "kernel": repr(self.task.kernel),
            "device": weights.device.type,
            "engine": engine(weights.device.type),
            "source": source_hash(self),
        }

    def _header(self) -> dict[str, Any]:
        """What was measured, on what."""
        task, windows, first = self.task, self.task.windows, self.first[0]
        own = own_kernel(task.model)
        kernel = task.kernel or own
        return {
            "model": self.name,
            "architecture": type(task.model).__name__,
            "metric": task.metric,
            "unit": task.unit,
            "kernel": type(kernel).__name__.lower(),
            "post_hoc": type(kernel) is not type(own),
            "causal": first.is_causal,
            "layers": len(self.first),
            "heads": first.query.shape[1],
            "head_dim": first.value.shape[-1],
            "length": task.length,
            "search": self.search,
            "seed": task.seed,
            "rows": self.rows,
            "sizes": self.sizes,
            "text": {
                "tokens": windows.text_tokens,
                "windows": len(windows),
                "available_windows": windows.available,
                "share_read": windows.share_read,
            },
        }

    def _layer_work(self) -> float:
        """Work of one window's layers, in forward passes of a cheap method."""
        share = min(1.0, self.rows / self.task.length)
        return 1 + share * (self.first[0].value.shape[-1] + 2)

    def _work(self) -> float:
        """All of it: what the progress bar counts."""
        cells = sum(_work_of(build(r, 0)) for r in self.sizes for build in self.methods.values())
        return len(self.task.windows) * (self._layer_work() + 1 + cells)

    def _say(self, *lines: str) -> None:
        if self.show is not None:
            with tqdm.external_write_mode():
                for line in lines:
                    self.show(line)


def _of_layers(errors: LayerErrors, sizes: Sequence[int]) -> dict[str, Any]:
    return {
        "output_error": errors.curves(),
        "pooled": errors.at_sizes(sizes, axes=(1, 2)),
        "by_layer": errors.at_sizes(sizes, axes=(2,)),
        "by_head": errors.at_sizes(sizes),
        "keys_needed": errors.needed(),
        "matching_keys": errors.matching(sorted({*sizes, *HEADLINE_SIZES})),
    }


def _work_of(method: nn.Module) -> float:
    """A method's time in forward passes of a cheap one, roughly: for the time that is left."""
    return 1.0 + method.r if isinstance(method, OptimalValueAware) else 1.0


def weights_hash(model: PreTrainedModel) -> str:
    """sha256 of a model's configuration, parameters and buffers."""
    digest = sha256(model.config.to_json_string().encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()
