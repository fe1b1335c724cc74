"""Output error by layer and head against brute force, and the keys it says are needed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.recorded import recorded
from value_aware_attention import kernels
from value_aware_attention.approximations import OptimalValueOblivious, chunked
from value_aware_attention.attention import attention
from value_aware_attention.call import Call
from value_aware_attention.measurement.layers import (
    LayerErrors,
    keys_needed,
    layer_errors,
    output_error,
)
from value_aware_attention.measurement.recorded import sample_rows
from value_aware_attention.measurement.task import arrays, joined, jsonable
from value_aware_attention.records.estimate import ratio_of_sums
from value_aware_attention.records.record import OBLIVIOUS, SHARES, OutputError

HEADS, KEYS, DIM = 3, 10, 4


def call(seed: int, *, is_causal: bool = False, masked: bool = False) -> Call:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, HEADS, KEYS, DIM, generator=generator) for _ in range(3))
    band = (torch.arange(KEYS)[:, None] - torch.arange(KEYS)).abs() <= 3
    mask = band[None, None] if masked else None
    return recorded(2 * query, key, value, kernels.Exponential(), is_causal, 0, mask)


@pytest.mark.parametrize(
    "kernel", [kernels.Exponential(), kernels.Polynomial(), kernels.Elu()], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_errors_are_of_every_size_and_head(
    kernel: kernels.Kernel, is_causal: bool, masked: bool
) -> None:
    """Measured on all queries of a call, whose rows attend as in the model."""
    measured = replace(call(0, is_causal=is_causal, masked=masked), kernel=kernel)
    arguments = measured.arguments()
    with chunked(4 * 7 * KEYS * DIM):  # seven rows at a time
        result = layer_errors(measured, rows=KEYS)
    sizes = range(1, KEYS + 1)
    errors = [OptimalValueOblivious(r).select(**arguments).error.mean(dim=-1) for r in sizes]
    path = np.moveaxis(result.paths[OBLIVIOUS], -1, 0)
    np.testing.assert_allclose(path, torch.stack(errors), rtol=1e-4, atol=1e-9)
    output, rows = attention(**arguments), sample_rows(measured, 10**6)
    norm = output.square().sum(-1).mean(-1)
    np.testing.assert_allclose(result.squared_norm[..., 0], norm, rtol=1e-4)
    torch.testing.assert_close(rows.weights @ rows.value, output.double(), atol=1e-5, rtol=1e-5)


def errors(windows: int = 4) -> list[LayerErrors]:
    return [
        joined(
            [
                layer_errors(call(10 * window + layer), rows=4, search="fast", between=False)
                for window in range(windows)
            ]
        )
        for layer in range(2)
    ]


def record(layers: list[LayerErrors]) -> OutputError:
    return output_error(layers, [call(0)], search="fast", unit="window", sizes=[1, 3, KEYS])


def curve(
    layers: list[LayerErrors], method: str, layer: int | None, head: int | None
) -> tuple[np.ndarray, ...]:
    """Computes the relative error of a pool of layers and heads, with its interval."""
    chosen = layers if layer is None else [layers[layer]]
    heads = slice(None) if head is None else slice(head, head + 1)
    totals = sum(result.paths[method][:, heads].sum(axis=1) for result in chosen)
    norms = sum(result.squared_norm[:, heads].sum(axis=1) for result in chosen)
    return ratio_of_sums(totals, norms)


def test_errors_and_needed_keys_are_of_all_layers_of_each_layer_and_of_each_head() -> None:
    made = errors()
    output = record(made)
    pools = 2 * (1 + 2 + 2 * HEADS)
    assert len(output.keys_needed) == pools * len(SHARES) and len(output.errors) == pools * 3
    for row in output.keys_needed:
        ends = [keys_needed(c, row.share) for c in curve(made, row.method, row.layer, row.head)]
        assert [row.keys, row.low, row.high] == ends and row.low <= row.keys <= row.high
    for row in output.errors:
        ends = curve(made, row.method, row.layer, row.head)
        at = [end[min(row.r, len(end)) - 1] for end in ends]  # past the last size it is exact
        assert [row.error, row.low, row.high] == pytest.approx(at, rel=1e-5, abs=1e-25)


def test_windows_measured_apart_are_as_windows_measured_together() -> None:
    """With every query of a call, and after a round trip through JSON."""
    calls = [call(seed) for seed in range(3)]
    apart = joined([layer_errors(each, rows=KEYS, search="fast") for each in calls])
    together = layer_errors(Call.joined(calls), rows=KEYS, search="fast")
    for name, path in together.paths.items():
        np.testing.assert_allclose(apart.paths[name], path, rtol=1e-9, atol=1e-14)
    again = LayerErrors(**arrays(json.loads(json.dumps(jsonable(apart)))))
    assert record([again]) == record([apart])


def test_one_window_has_no_interval() -> None:
    output = record(errors(windows=1))
    for row in (*output.keys_needed, *output.matching_keys, *output.errors):
        assert row.low is None and row.high is None
