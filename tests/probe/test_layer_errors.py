"""Output error by layer and head against brute force, and the keys it says are needed."""

import numpy as np
import pytest
import torch

from value_aware_attention import kernels
from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.attention import attention
from value_aware_attention.measurement.keys_needed import keys_needed, matching_keys
from value_aware_attention.measurement.layer_errors import (
    AWARE,
    OBLIVIOUS,
    LayerErrors,
    layer_error,
)
from value_aware_attention.measurement.sampled_rows import sample_rows
from value_aware_attention.measurement.tasks import LayerCall

HEADS, KEYS, DIM = 3, 10, 4


def call(seed: int, *, is_causal: bool = False, masked: bool = False) -> LayerCall:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, HEADS, KEYS, DIM, generator=generator) for _ in range(3))
    band = (torch.arange(KEYS)[:, None] - torch.arange(KEYS)).abs() <= 3
    mask = band[None, None] if masked else None
    return LayerCall(2 * query, key, value, kernels.Exponential(), is_causal, 0, mask)


def visible(of: LayerCall) -> torch.Tensor:
    seen = torch.ones(KEYS, KEYS, dtype=torch.bool)
    if of.is_causal:
        seen = seen.tril()
    return seen if of.attn_mask is None else seen & of.attn_mask[0, 0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_size_of_every_head_agrees_with_a_loop_over_rows(
    is_causal: bool, masked: bool
) -> None:
    measured = call(0, is_causal=is_causal, masked=masked)
    found = layer_error(measured, rows=KEYS, search="default")
    seen = visible(measured)
    for head in range(HEADS):
        query, key, value = (
            x[0, head].double() for x in (measured.query, measured.key, measured.value)
        )
        norms, oblivious = [], []
        for row in range(KEYS):
            keys = seen[row].nonzero()[:, 0]
            alpha = (query[row] @ key[keys].T * DIM**-0.5).softmax(-1)
            output = alpha @ value[keys]
            norms.append(float(output.square().sum()))
            order = alpha.argsort(descending=True)
            errors = []
            for size in range(1, KEYS + 1):
                top = order[:size]
                kept = alpha[top] / alpha[top].sum() @ value[keys[top]]
                errors.append(float((kept - output).square().sum()))
            oblivious.append(errors)
        mean = np.mean(oblivious, axis=0)
        np.testing.assert_allclose(found[OBLIVIOUS][head], mean, rtol=1e-4, atol=1e-9)
        assert found["squared_norm"][head] == pytest.approx([np.mean(norms)], rel=1e-4)


def test_value_aware_sizes_are_those_of_one_solve_and_its_last_is_exact() -> None:
    measured = call(1)
    found = layer_error(measured, rows=KEYS, search="default")[AWARE]
    assert np.shape(found) == (HEADS, DIM + 1)
    path = OptimalValueAware(DIM + 1)
    errors = path.path(measured.query.double(), measured.key.double(), measured.value.double())
    np.testing.assert_allclose(found, errors[0].mean(dim=1), rtol=1e-4, atol=1e-9)
    assert np.max(np.array(found)[:, -1]) < 1e-9 < np.min(np.array(found)[:, 0])


def test_a_sampled_row_sees_what_its_mask_shows() -> None:
    measured = call(2, is_causal=True, masked=True)
    sampled = sample_rows(measured, 2 * HEADS)
    output = attention(
        measured.query, measured.key, measured.value, kernel=measured.kernel,
        attn_mask=visible(measured),
    ).double()  # fmt: skip
    found = sampled.weights() @ sampled.value
    for head in range(HEADS):
        for row in found[0, head]:
            assert (output[0, head] - row).abs().sum(dim=-1).min() < 1e-5


def errors(windows: int = 4) -> LayerErrors:
    calls = [[call(10 * w + layer) for layer in range(2)] for w in range(windows)]
    return LayerErrors.of([[layer_error(c, rows=4, search="fast") for c in w] for w in calls])


def test_pools_are_ratios_of_sums_over_heads_and_windows() -> None:
    made = errors()
    layers, _, _ = made.relative(OBLIVIOUS, axes=(2,))
    path, norm = made.paths[OBLIVIOUS], made.squared_norm
    for layer in range(2):
        expected = path[:, layer].sum(axis=(0, 1)) / norm[:, layer].sum()
        np.testing.assert_allclose(layers[layer], expected)
    pooled, low, high = made.relative(AWARE, axes=(1, 2))
    np.testing.assert_allclose(pooled, made.paths[AWARE].sum(axis=(0, 1, 2)) / norm.sum())
    assert (low <= pooled).all() and (pooled <= high).all() and low[0] < high[0]


def test_needed_keys_cover_all_layers_each_layer_and_each_head() -> None:
    made = errors()
    rows = made.needed()
    assert len(rows) == 2 * 3 * (1 + 2 + 2 * HEADS)
    for row in rows:
        axes = (1, 2) if row["layer"] is None else (2,) if row["head"] is None else ()
        curve, _, high = made.relative(row["method"], axes)
        place = tuple(p for p in (row["layer"], row["head"]) if p is not None)
        assert row["keys"] == keys_needed(curve[place], row["share"])
        assert row["low"] <= row["keys"] <= row["high"]
        assert row["high"] == keys_needed(high[place], row["share"])


def test_matching_keys_pool_layers_and_heads_within_a_window() -> None:
    made = errors()
    norm = made.squared_norm.sum(axis=(1, 2, 3))
    oblivious, aware = (made.paths[name].sum(axis=(1, 2)) for name in (OBLIVIOUS, AWARE))
    found = made.matching([1, 2, DIM, DIM + 1])
    assert [row.pop("r") for row in found] == [1, 2, DIM]  # DIM + 1 value-aware keys are exact
    assert found == [matching_keys(oblivious, aware[:, r - 1], norm) for r in (1, 2, DIM)]
    assert all(row["low"] <= row["keys"] <= row["high"] for row in found)


def test_one_window_has_no_interval() -> None:
    rows = errors(windows=1).needed()
    assert all(row["low"] is None and row["high"] is None and row["keys"] for row in rows)
    assert all(row["low"] is None and row["keys"] for row in errors(windows=1).matching([1, 2]))
