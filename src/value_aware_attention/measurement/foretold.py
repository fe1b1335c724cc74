"""Foretells the time and memory of a probe from one layer's call on one window."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from value_aware_attention.call import BYTES_PER_ELEMENT, Call, max_elements
from value_aware_attention.measurement.layers import layer_errors
from value_aware_attention.measurement.measure import RECORDED, LayerOptions, Method, sizes_of
from value_aware_attention.measurement.record import AWARE, SHARES
from value_aware_attention.measurement.recorded import QUERIES, answers_alone, sample_rows
from value_aware_attention.measurement.task import Task
from value_aware_attention.measurement.windows import vocabulary_size

T = TypeVar("T")
STATUS = Path("/proc/self/statm")
"""Where Linux tells the pages that a program holds"""

PART = 16
"""Share of a window's queries that a method is timed on, as 1 / PART"""
LONG = 600
"""Seconds from which on a probe says how it can be shortened"""
GIB = 2**30
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Cost:
    """Time and peak memory of a probe, as foretold before it starts."""

    seconds: float
    bytes: float
    """Of the process, or on the GPU that the model is on"""
    text: str
    """Amounts that they follow from"""

    def __str__(self) -> str:
        """Writes one line."""
        time = f"{self.seconds:.0f} seconds" if self.seconds < 90 else _minutes(self.seconds)
        shorter = "; fewer windows, the search fast or no control shorten it"
        return (
            f"about {time}, {self.bytes / GIB:.1f} GiB: {self.text}"
            f"{shorter if self.seconds > LONG else ''}"
        )


def _minutes(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"


@torch.inference_mode()
def foretold(
    task: Task,
    methods: Mapping[str, Method],
    *,
    sizes: Sequence[int] | None,
    layers: LayerOptions,
    control: bool,
) -> Cost:
    """Times the model on one window, and every method on some queries of its middle layer.

    Numbers that an earlier probe kept are not taken off.
    """
    task.layer_calls()  # refuses what is not a number; the first call of a program is slow
    spent, calls = _timed(task.layer_calls)
    call, parts = calls[len(calls) // 2], task.parts
    clock = _Clock(call)
    chosen = sizes_of(sizes, call.value.shape[-1], task.length)
    window = sum(clock.of(build, r) for build in methods.values() for r in chosen)
    checked = min(parts, RECORDED) * min(1.0, QUERIES / task.length)  # windows, by their queries
    seconds = len(calls) * (parts + checked) * window
    seconds += len(calls) * parts * clock.of_errors(layers) * (1 + len(layers.kernels))
    seconds += spent * parts * (2 + len(methods) * len(chosen))
    budgets = len(calls) * clock.of_budgets(methods) + spent * (1 + len(methods))
    nets = 1 + control
    text = (
        f"{parts:,} window{'' if parts == 1 else 's'} of {task.length:,} tokens, "
        f"{len(calls):,} layers of "
        f"{call.query.shape[1]:,} heads{', and the same with random weights' if control else ''}"
    )
    seconds = seconds * nets + parts * len(SHARES) * budgets
    return Cost(seconds, _held(task.model) + _bytes(task, calls, nets), text)


def _bytes(task: Task, calls: Sequence[Call], nets: int) -> float:
    """Counts what is held at once beside the model and the program."""
    call, model = calls[0], task.model
    of_calls = sum(x.nbytes for one in calls for x in (one.query, one.key, one.value))
    joined = min(task.parts, RECORDED)
    held = of_calls * (2 * joined if joined > 1 else 2)  # as recorded and as joined
    matrix = min(max_elements(), call.query[0, ..., 0].numel() * call.keys)
    logits = task.length * vocabulary_size(model) * 4 * (task.metric != "cosine")
    weights = sum(x.nbytes for x in model.parameters())
    return held + matrix * BYTES_PER_ELEMENT + 3 * logits + (nets - 1) * weights


def _held(model: nn.Module) -> float:
    """Returns what this program holds already: on the model's GPU, or in memory."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    if STATUS.exists():  # of Linux
        return float(STATUS.read_text().split()[1]) * PAGE
    return float(sum(x.nbytes for x in model.parameters()))


class _Clock:
    """Times methods on a layer's call, by some of its queries."""

    def __init__(self, call: Call) -> None:
        self.call, self.queries = call, call.query.shape[-2]
        rows = max(8, self.queries // PART) * math.prod(call.query.shape[:2])
        self.sampled = sample_rows(call, rows, dtype=None)

    def of(self, build: Method, r: int) -> float:
        """Times a method with r keys on the queries of a window."""
        method = build(r, 0)
        if not answers_alone(method):
            return _timed(lambda: method(**self.call.arguments()))[0]
        method(**sample_rows(self.call, 1, dtype=None).arguments())  # compiles what it needs
        spent = _timed(lambda: method(**self.sampled.arguments()))[0]
        return spent * self.queries / self.sampled.query.shape[-2]

    def of_errors(self, layers: LayerOptions) -> float:
        """Times the errors of a layer at every size."""
        rows = max(1, layers.rows // 8)
        how: Any = {"search": layers.search, "between": layers.between}
        spent = _timed(lambda: layer_errors(self.call, rows=rows, **how))[0]
        return spent * min(layers.rows, self.queries) / rows

    def of_budgets(self, methods: Mapping[str, Method]) -> float:
        """Times every method with about as many keys as heads need for one error."""
        few = max(1, self.call.value.shape[-1] // 4)
        many = min(4 * few, self.call.keys)
        return sum(self.of(one, few if name == AWARE else many) for name, one in methods.items())


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    """Runs some work, and returns its seconds and its result."""
    begun = _time()
    found = work()
    return _time() - begun, found


def _time() -> float:
    """Reads the clock when all work is done, a GPU's too."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()
