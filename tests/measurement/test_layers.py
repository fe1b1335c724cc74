"""Curves of output error and section 3's argument, against definitions spelled out row by row."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from tests.recorded import recorded
from value_aware_attention import kernels
from value_aware_attention.approximations import (
    LeaveOneOutKeys,
    NormWeightedKeys,
    ObliviousKeysOptimalWeights,
    OptimalValueAware,
    OptimalValueOblivious,
    ValueAwareKeysAttentionWeights,
)
from value_aware_attention.call import Call
from value_aware_attention.measurement import LayerOptions, Record, Task, Text, layers, measure
from value_aware_attention.measurement.measure import Setting
from value_aware_attention.measurement.recorded import sample_rows

KERNELS = [kernels.Exponential(), kernels.Polynomial(), kernels.Elu()]
VALUE_DIM = 4


def random_call(
    seed: int = 0, *, length: int = 20, causal: bool = False, first_row: int = 0, spread: float = 1
) -> Call:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(2, 3, length, width, generator=generator) for width in (5, 5, VALUE_DIM)
    )
    return recorded(spread * query, key, value, kernels.Exponential(), causal, first_row)


def output_error(calls: list[Call], rows: int = 256, search: str = "default") -> dict:
    """Measures `rows` queries of each of these layers and returns the record as JSON holds it."""
    per_head = math.ceil(rows / (len(calls[0].query) * calls[0].query.shape[1]))
    errors = [layers.layer_errors(call, rows=per_head, search=search) for call in calls]
    made = layers.output_error(errors, calls, search=search, unit="window", sizes=[1, 4])
    return json.loads(json.dumps(asdict(made)))


def skewness_gap(calls: list[Call], rows: int = 256, **options: object) -> dict:
    """Measures section 3's argument on `rows` queries of each layer, as JSON holds it."""
    per_head = math.ceil(rows / (len(calls[0].query) * calls[0].query.shape[1]))
    return json.loads(json.dumps(asdict(layers.skewness_gap(calls, rows=per_head, **options))))


def call_of(alpha: list[float], value: torch.Tensor, kernel: object = None) -> Call:
    """Builds a call of one query whose exponential attention weights are `alpha`."""
    key = torch.tensor(alpha, dtype=torch.float64).log()[None, None, :, None]
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    kernel = kernels.Exponential(scale=1.0) if kernel is None else kernel
    return recorded(query, key, value.double()[None, None], kernel, False, 0)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 4), length=st.integers(1, 30),
    rows=st.integers(1, 80), data=st.data(),
)  # fmt: skip
def test_rows_are_spread_over_positions_with_equally_many_of_every_head(
    batch: int, heads: int, length: int, rows: int, data: st.DataObject
) -> None:
    first_row = data.draw(st.integers(0, length - 1))
    number = torch.arange(batch * heads * length, dtype=torch.float32)
    named = number.view(batch, heads, length, 1)
    call = recorded(named, named, named, kernels.Exponential(), True, first_row)
    taken = sample_rows(call, rows)
    group = torch.arange(batch * heads).view(batch, heads, 1)
    position = taken.query[..., 0].long() - group * length  # negative or too large: another head's
    available, groups = length - first_row, batch * heads
    per_head = min(math.ceil(rows / groups), available)
    assert position.shape == (batch, heads, per_head) and taken.rows.numel() == groups * per_head
    assert position.min() >= first_row and position.max() < length
    assert taken.visible is not None
    assert torch.equal(taken.visible, torch.arange(length) <= position[..., None])
    gaps = position.diff(dim=-1)
    assert (gaps >= 1).all() and (gaps <= math.ceil(available / per_head)).all()
    if per_head == available:
        assert torch.equal(position[0, 0], torch.arange(first_row, length))
    elif groups >= available / per_head:
        assert len(position.unique()) == available  # heads together leave no position out


def test_the_oblivious_path_keeps_its_digits_far_from_the_origin() -> None:
    call = random_call(2)
    near, far = (
        layers.oblivious_path(sample_rows(replace(call, value=call.value.double() + shift), 30))
        for shift in (0, 1e6)
    )
    torch.testing.assert_close(near, far, atol=1e-8, rtol=1e-6)


@pytest.fixture(scope="module")
def measured() -> tuple[list[Call], dict]:
    calls = [random_call(seed, causal=True, first_row=8, spread=2) for seed in (3, 4)]
    return calls, output_error(calls, rows=24, search="fast")


def test_the_record_is_plain_json_with_the_sizes_of_every_method(
    measured: tuple[list[Call], dict],
) -> None:
    record = measured[1]
    facts = {"search": "fast", "rows": 24, "keys": 20, "head_dim": VALUE_DIM, "heads": 3}
    assert facts | {"causal": True, "units": 2} == {
        name: record[name] for name in (*facts, "causal", "units")
    }
    sizes = {name: method["sizes"] for name, method in record["methods"].items()}
    up_to_head_size, powers = [1, 2, 3, 4, 5], [1, 2, 4]
    assert sizes == dict.fromkeys(sizes, powers) | {
        "optimal_v_oblivious": list(range(1, 21)),
        "optimal_v_aware": up_to_head_size,
        "value_aware_keys_attention_weights": up_to_head_size,
        "maurey_bound": [*powers, 8, 16],
    }
    assert len(sizes) == 8
    for method in record["methods"].values():
        assert [len(errors) for errors in method["layers"]] == 2 * [len(method["sizes"])]


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("optimal_v_oblivious", OptimalValueOblivious),
        ("oblivious_keys_optimal_weights", ObliviousKeysOptimalWeights),
        ("value_aware_keys_attention_weights", ValueAwareKeysAttentionWeights),
        ("norm_weighted_keys_2", lambda r: NormWeightedKeys(r, norm=2)),
        ("norm_weighted_keys_1", lambda r: NormWeightedKeys(r, norm=1)),
        ("leave_one_out_keys", LeaveOneOutKeys),
    ],
)
def test_a_curve_is_the_mean_error_of_its_method_over_the_rows(
    measured: tuple[list[Call], dict], name: str, build: Callable
) -> None:
    calls, record = measured
    method = record["methods"][name]
    for errors, call in zip(method["layers"], calls, strict=True):
        arguments = sample_rows(call, 24).arguments()
        for r in {1, 4, 5} & set(method["sizes"]):
            error = build(r).select(**arguments).error.mean().item()
            assert errors[method["sizes"].index(r)] == pytest.approx(error, rel=1e-5)


def test_the_value_aware_curve_is_one_path_of_the_search_asked_for(
    measured: tuple[list[Call], dict],
) -> None:
    calls, record = measured
    for layer, call in enumerate(calls):
        rows = sample_rows(call, 24)
        path = OptimalValueAware(5, "fast").path(**rows.arguments()).mean(dim=(0, 1, 2))
        errors = record["methods"]["optimal_v_aware"]["layers"][layer]
        assert errors == pytest.approx(path.tolist(), rel=1e-5, abs=1e-25)
        norm = (rows.weights @ rows.value).square().sum(-1).mean().item()
        assert record["squared_norm"][layer] == pytest.approx(norm, rel=1e-5)


def test_matching_keys_are_counted_from_the_rows_of_each_unit_and_of_each_query(
    measured: tuple[list[Call], dict],
) -> None:
    calls, record = measured
    rows_of = {(row["layer"], row["r"]): row for row in record["matching_keys"]}
    assert set(rows_of) == {(layer, r) for layer in (None, 0, 1) for r in (1, 2, 4)}
    sums, alone = [], []
    for call in calls:
        rows = sample_rows(call, 24)
        weight, aware = (
            layers.oblivious_path(rows),
            OptimalValueAware(5, "fast").path(**rows.arguments()),
        )
        norm = (rows.weights @ rows.value).square().sum(-1, keepdim=True)
        sums.append([x.sum(dim=(1, 2)).numpy() for x in (weight, aware, norm)])
        alone.append(list(zip(weight.flatten(0, 2), aware.flatten(0, 2), strict=True)))
    for (layer, r), row in rows_of.items():
        chosen = range(2) if layer is None else [layer]
        weight, aware, norm = (sum(sums[i][place] for i in chosen) for place in range(3))
        pooled = layers.matching_keys(weight, aware[:, r - 1], norm[:, 0])
        assert {name: row[name] for name in ("keys", "low", "high")} == pooled
        counts = [
            next((size for size in range(1, 21) if by[size - 1] <= few[r - 1]), 20)
            for i in chosen
            for by, few in alone[i]
        ]
        assert row["median"] == sorted(counts)[(len(counts) - 1) // 2]
        assert row["lower_quartile"] <= row["median"] <= row["upper_quartile"]


def test_maureys_bound_is_the_expected_error_of_keys_drawn_from_alpha() -> None:
    """Its value at two keys is the sum over every pair of draws, times their probability."""
    call = replace(random_call(5, length=6), value=random_call(6, length=6).value + 100)
    bound = output_error([call], rows=12)["methods"]["maurey_bound"]
    rows = sample_rows(call, 12)
    alpha, value = rows.weights, rows.value[:, :, None]
    output = (alpha[..., None] * value).sum(-2, keepdim=True)
    single = (alpha * (value - output).square().sum(-1)).sum(-1)
    means = (value[..., :, None, :] + value[..., None, :, :]) / 2
    distance = (means - output[..., None, :]).square().sum(-1)
    pair = (alpha[..., :, None] * alpha[..., None, :] * distance).sum((-1, -2))
    assert bound["sizes"][:2] == [1, 2]
    expected = [single.mean().item(), pair.mean().item()]
    assert bound["layers"][0][:2] == pytest.approx(expected, rel=1e-5)


def test_heads_wider_than_the_sequence_stop_at_all_keys() -> None:
    record = output_error([random_call(length=3)], rows=6)
    assert record["methods"]["optimal_v_aware"]["sizes"] == [1, 2, 3]
    assert record["methods"]["optimal_v_aware"]["layers"][0][-1] < 1e-25


def test_six_digits_are_kept() -> None:
    assert layers.rounded(1.23456789e-17) == 1.23457e-17 and layers.rounded(1234567.8) == 1234570.0


def cells_of(record: dict, **values: object) -> list[dict]:
    return [
        cell for cell in record["cells"] if all(cell[key] == value for key, value in values.items())
    ]


def test_every_layer_has_its_own_kernel_and_four_degrees() -> None:
    calls = [replace(random_call(), kernel=kernel) for kernel in KERNELS]
    record = skewness_gap(calls, rows=12)
    assert record["rows"] == 12
    models = [(c["layer"], c["kernel"], c["degree"]) for c in cells_of(record, own=True)]
    assert models == [(0, "exponential", None), (1, "polynomial", 2), (2, "elu", None)]
    for layer in range(3):
        degrees = cells_of(record, own=False, layer=layer)
        assert [(c["kernel"], c["degree"]) for c in degrees] == [
            ("polynomial", degree) for degree in (0, 2, 4, 6)
        ]
        largest = [c["largest_weight"] for c in degrees]
        assert largest == sorted(largest) and largest[0] == pytest.approx(1 / 20)
        effective = [c["effective_keys"] for c in degrees]
        assert effective == sorted(effective, reverse=True) and effective[0] == pytest.approx(20)
    uniform = [c["oblivious"]["4"] for c in cells_of(record, degree=0)]
    assert len(set(uniform)) == 3  # the same inputs, and every layer its own order of the keys
    swept, own_cell = cells_of(record, layer=1, degree=2, own=False), cells_of(record, layer=1)[0]
    assert swept[0] | {"own": True} == own_cell


def test_the_papers_examples_of_a_gap_and_of_none() -> None:
    """Section 3: 3.7925 for the key of the largest weight, 2.4925 for that of the smallest.

    Beside a weight over half, argmin ||v_i||^2 (0.5 - alpha_i) of orthogonal values is
    argmax alpha.
    """
    opposite = call_of([0.25, 0.35, 0.4], torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    over_half = call_of([0.2, 0.6, 0.2], torch.diag(torch.tensor([1.0, 9.0, 3.0])))
    cell, other = cells_of(skewness_gap([opposite, over_half]), own=True)
    norm = 0.25**2 + 0.7**2 + 1.2**2
    assert cell["oblivious"] == {"1": pytest.approx(3.7925 / norm, rel=1e-5)}
    assert cell["aware"] == {"1": pytest.approx(2.4925 / norm, rel=1e-5)}
    assert (cell["same_first_key"], cell["rows_over_half"]) == (0, 0)
    assert (other["same_first_key"], other["rows_over_half"]) == (1, 1)
    assert cell["largest_weight"] == pytest.approx(0.4) and other["aware"] == other["oblivious"]


@pytest.mark.parametrize("causal", [False, True])
def test_degree_zero_takes_the_smallest_orthogonal_value(causal: bool) -> None:
    """Section 3: with alpha = 1 / L it is argmin ||v_i||^2, here never the first or last key."""
    norms = torch.tensor([3.0, 2.5, 1.0, 4.0, 2.0, 5.0, 6.0, 7.0])
    value = torch.diag(norms).expand(2, 3, 8, 8)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 8, 5, generator=generator) for _ in range(2))
    # two visible orthogonal values are equally far from their mean: from the third row on
    call = recorded(query, key, value, kernels.Exponential(), causal, 2)
    (cell,) = cells_of(skewness_gap([call]), degree=0)
    assert cell["smallest_norm_key"] == cell["closest_to_mean_key"] == 1
    assert cell["same_first_key"] < 1


def test_degree_zero_takes_the_value_closest_to_the_mean_when_they_are_not_orthogonal() -> None:
    record = skewness_gap([random_call(seed, causal=True, first_row=4) for seed in range(3)])
    for cell in cells_of(record, degree=0):
        assert cell["closest_to_mean_key"] == 1 and cell["smallest_norm_key"] < 0.95
    assert all(cell["smallest_norm_key"] is None for cell in cells_of(record, degree=2))


@pytest.mark.parametrize("causal", [False, True])
def test_the_order_of_the_keys_decides_only_ties(causal: bool) -> None:
    call = random_call(7, causal=causal, first_row=2)
    record, other = (skewness_gap([call], rows=30, seed=seed) for seed in (0, 1))
    for first, second in zip(record["cells"], other["cells"], strict=True):
        if first["degree"] == 0:
            assert first["oblivious"]["4"] != second["oblivious"]["4"]
        else:
            # between its proved ends the search may find another set when keys move
            assert first["aware"]["1"] == pytest.approx(second["aware"]["1"], rel=1e-4)
            assert first["oblivious"] == pytest.approx(second["oblivious"], rel=1e-4)
            for name in ("largest_weight", "effective_keys", "rows_over_half", "same_first_key"):
                assert first[name] == pytest.approx(second[name], rel=1e-4)


def test_the_gap_is_between_errors_relative_to_the_norm_of_the_output() -> None:
    call = random_call(7, causal=True, first_row=2)
    (cell,) = cells_of(skewness_gap([call], rows=30, search="fast"), own=True)
    rows = sample_rows(call, 30)
    norm = (rows.weights @ rows.value).square().sum().item()
    aware = OptimalValueAware(16, "fast").path(**rows.arguments()).sum(dim=(0, 1, 2))
    for r in (1, 4, 16):
        error = OptimalValueOblivious(r).select(**rows.arguments()).error.sum().item()
        assert cell["oblivious"][str(r)] == pytest.approx(error / norm, rel=1e-5)
        expected = aware[r - 1].item() / norm
        assert cell["aware"][str(r)] == pytest.approx(expected, rel=1e-4, abs=1e-20)
    first = [
        m(1).select(**rows.arguments()).indices for m in (OptimalValueAware, OptimalValueOblivious)
    ]
    assert cell["same_first_key"] == pytest.approx((first[0] == first[1]).double().mean().item())


@pytest.fixture
def task() -> Task:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        vocab_size=9, initializer_range=0.5,
    )  # fmt: skip
    tokens = torch.randint(9, (2, 20))
    return Task(BertModel(config), [Text(tokens, tokens)], "cosine")


def test_a_record_has_the_cells_the_curves_and_the_gap_and_is_found_again(
    tmp_path: Path, task: Task
) -> None:
    settings = [Setting("optimal_v_oblivious", {"r": 2}, lambda layer: OptimalValueOblivious(2))]
    options = {"cache": tmp_path, "layers": LayerOptions(rows=6), "sizes": [1, 4]}
    record = measure(task, settings, **options)
    assert [cell.approximation for cell in record.cells] == ["exact", "optimal_v_oblivious"]
    made = json.loads(json.dumps(asdict(record.attention[0])))
    errors = output_error(task.layer_calls(), rows=24)
    errors["matching_keys"] = made["output_error"]["matching_keys"]  # at the sizes asked for too
    assert made["output_error"] == errors
    assert made["skewness_gap"] == skewness_gap(task.layer_calls(), rows=24)
    assert Record.from_json(record.to_json()) == record == measure(task, settings, **options)


def test_a_method_is_a_function_of_the_number_of_keys_and_the_layer(task: Task) -> None:
    build = Mock(side_effect=lambda r, layer: OptimalValueOblivious(r))
    record = measure(task, {"mine": build}, sizes=[4, 1], layers=None)
    assert [(c.approximation, c.parameters) for c in record.cells[1:]] == [
        ("mine", {"r": 1}), ("mine", {"r": 4}),
    ]  # fmt: skip
    assert {call.args for call in build.mock_calls} >= {*product((1, 4), (0, 1))}
    assert record.attention == () and all(cell.error is not None for cell in record.cells)


def test_slots_that_match_are_counted_and_sinks_told_apart() -> None:
    calls = [random_call(seed, causal=True, first_row=8, spread=2) for seed in (3, 4)]
    errors = [layers.layer_errors(call, rows=12, between=False, slots=True) for call in calls]
    made = layers.output_error(errors, calls, search="default", unit="window", sizes=[1, 4])
    for match in made.matching_slots:
        pool = errors if match.layer is None else [errors[match.layer]]
        slots, aware = (
            sum(layer.paths[name].sum(axis=(0, 1)) for layer in pool)
            for name in (layers.SLOTS[match.mass], "optimal_v_aware")
        )
        enough = [r for r, error in enumerate(slots, 1) if error <= aware[match.r - 1]]
        assert match.keys == min([*enough, 20])
    assert {match.mass for match in made.matching_slots} == {"mean_key", "exact"}
    for layer, call in zip(made.first_token, calls, strict=True):
        rows = sample_rows(call, 12 * 6)
        weights = rows.weights
        assert layer.mass == pytest.approx(float(weights[..., 0].mean()), rel=1e-5)
        top = weights.argmax(dim=-1) == 0
        assert layer.top == pytest.approx(float(top.double().mean()), rel=1e-5)
        output = OptimalValueOblivious(1)(**rows.arguments())
        error = (output - rows.output()).square().sum(-1)
        norm = rows.output().square().sum(-1)
        for place, part in enumerate((top, ~top)):
            expected = float(error[part].sum() / norm[part].sum()) if part.any() else None
            told = layer.errors["optimal_v_oblivious"]["1"][place]
            assert told == (expected and pytest.approx(expected, rel=1e-4))
        norms = rows.value.norm(dim=-1)
        assert layer.value_norm == pytest.approx(
            float(norms[..., 0].mean() / norms.mean()), rel=1e-4
        )
