"""Measures a pretrained decoder: a grid, parts of its layers, and random weights beside it."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from value_aware_attention.approximations import Exact
from value_aware_attention.measurement import LayerOptions, Record, Setting, Task, measure
from value_aware_attention.measurement.control import control
from value_aware_attention.measurement.record import AWARE, OBLIVIOUS

CONTROLLED = (1, 4, 8, 16)
"""Numbers of keys that are measured with random weights"""
CONTROL_TEXTS = 4
"""Windows that they are measured on"""


def in_parts(
    settings: Sequence[Setting], parts: Mapping[str, Sequence[int]], sizes: Sequence[int]
) -> Iterator[Setting]:
    """Yields both optimal choices at `sizes` in one part of the layers, the others being exact.

    A part has its first layer and the layer after its last.
    """
    for setting in settings:
        if setting.approximation in (OBLIVIOUS, AWARE) and setting.parameters["r"] in sizes:
            for name, (first, end) in parts.items():
                build = partial(_in_part, setting, range(first, end))
                yield replace(
                    setting, parameters={**setting.parameters, "layers": name}, build=build
                )


def _in_part(setting: Setting, layers: range, layer: int) -> nn.Module:
    return setting.build(layer) if layer in layers else Exact()


def measure_pretrained(
    task: Task, settings: Sequence[Setting], *, rows: int, search: str,
    random_seeds: Sequence[int], **options: Any,
) -> Record:  # fmt: skip
    """Measures every setting and the layers, then the network with random weights of each seed.

    `rows` queries of each head and window are measured in the layers, none for 0. Random weights
    are measured on the first windows, with the settings of few keys. `options` are `measure`'s.
    """
    layers = None
    if rows:
        layers = LayerOptions(rows, search, between=False, skewness_gap=False, slots=True)
    record = measure(task, settings, layers=layers, **options)
    few = [
        setting
        for setting in settings
        if setting.parameters.get("r") in CONTROLLED and "layers" not in setting.parameters
    ]
    beside = copy(task)
    beside.texts = task.texts[:CONTROL_TEXTS]
    alike = partial(measure, methods=few, layers=layers, **options | {"weights": None})
    controls = [control(beside, alike, seed) for seed in random_seeds]
    return replace(record, controls=tuple(filter(None, controls)))
