"""Beside a measurement: the same model with random weights, and heads with budgets of their own."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from probed import LENGTH, MODELS, model, tokenizer, words

from tests.refusals import assert_refused
from value_aware_attention import probe
from value_aware_attention.approximations import OptimalValueOblivious
from value_aware_attention.kernels import Exponential
from value_aware_attention.measurement import Record
from value_aware_attention.measurement.control import random_weights
from value_aware_attention.measurement.head_budgets import HeadBudgets
from value_aware_attention.measurement.measure import weights_hash
from value_aware_attention.measurement.task import joined
from value_aware_attention.records.record import SHARES

pytestmark = pytest.mark.filterwarnings("ignore")
ONE_METHOD = {"optimal_v_oblivious": lambda r, layer: OptimalValueOblivious(r)}
FEW = {
    "windows": 2, "length": LENGTH, "rows": 4, "search": "fast", "sizes": [1, 4], "name": "m",
    "methods": ONE_METHOD,
}  # fmt: skip
TEXT = words(14 * 6)


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_depend_on_their_seed_alone_and_draw_from_no_other_generator(name):
    trained = model(name)
    before = weights_hash(trained)
    torch.manual_seed(1)
    random = random_weights(trained, seed=3)
    torch.manual_seed(2)
    expected = torch.get_rng_state()
    again = random_weights(trained, seed=3)
    assert torch.equal(torch.get_rng_state(), expected)
    assert weights_hash(random) == weights_hash(again) and weights_hash(trained) == before
    assert type(random) is type(trained) and not random.training
    assert weights_hash(random) not in (before, weights_hash(random_weights(trained)))


def test_random_weights_have_the_dtype_of_the_model():
    assert random_weights(model("bert").bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["bert", "our_causal"])
def test_the_control_is_a_probe_of_random_weights(name, tmp_path):
    def measured(weights, **options):
        return probe.probe(weights, tokenizer(), TEXT, **FEW, seed=5, **options).record

    trained = model(name)
    record = measured(trained, cache=tmp_path)
    alone = measured(random_weights(trained, seed=5), control=False)
    assert replace(record.control, text=alone.text) == replace(alone, budgets=(), baselines={})
    assert replace(record, control=None) == measured(trained, control=False)
    files = sorted(tmp_path.iterdir())
    assert measured(trained, cache=tmp_path) == record and sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("why", ["is_quantized", "config"])
def test_a_model_that_cannot_be_built_is_measured_without_a_control(why, caplog, monkeypatch):
    trained = model("bert")
    if why == "is_quantized":
        trained.is_quantized = True
    else:
        unbuilt = Mock(side_effect=RuntimeError("no weights\nfor this config"))
        monkeypatch.setattr("value_aware_attention.measurement.control.deepcopy", unbuilt)
    report = probe.probe(trained, tokenizer(), TEXT, **FEW)
    assert report.record.control is None and "random" not in str(report)
    [warning] = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    reason = "its weights are quantised" if why == "is_quantized" else "no weights for this config"
    assert warning.startswith(f"no control with random weights: {reason}") and "\n" not in warning


def test_a_record_keeps_its_control_and_those_without_one_are_read():
    record = probe.probe(model("bert"), tokenizer(), TEXT, **FEW).record
    assert Record.from_json(record.to_json()) == record
    earlier = json.loads(record.to_json())
    del earlier["control"]
    assert Record.from_json(json.dumps(earlier)) == replace(record, control=None)
    other = replace(record, control=replace(record.control, length=LENGTH + 1))
    assert_refused("control has another length", Record.from_json, other.to_json())
    broken = replace(record, control=replace(record.control, cells=()))
    assert_refused("do not begin with exact", Record.from_json, broken.to_json())


QUICK = {"windows": 2, "length": LENGTH, "rows": 4, "search": "fast", "control": False}


@pytest.mark.parametrize("mask", ["none", "shared", "by head"])
def test_every_head_attends_with_its_own_number_of_keys(mask):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 5, 4)
    shape = {"none": None, "shared": (2, 1, 5, 5), "by head": (2, 3, 5, 5)}[mask]
    attn_mask = None if shape is None else torch.rand(shape) < 0.8
    if attn_mask is not None:
        attn_mask[..., 0] = True
    counts = (2, 5, 2)
    method = HeadBudgets(OptimalValueOblivious, counts)
    output = method(query, key, value, kernel=Exponential(), attn_mask=attn_mask, is_causal=False)
    for head, r in enumerate(counts):
        mask_of_head = attn_mask if mask != "by head" else attn_mask[:, head : head + 1]
        inputs = (x[:, head : head + 1] for x in (query, key, value))
        alone = OptimalValueOblivious(r)(*inputs, attn_mask=mask_of_head)
        assert torch.allclose(output[:, head : head + 1], alone)
    two = (query[:, :2], key[:, :2], value[:, :2])
    assert_refused("3 heads have counts; there are 2", method, *two, kernel=Exponential())
    assert "counts=(2, 5, 2)" in repr(method) and "OptimalValueOblivious(r=5)" in repr(method)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_budgets_are_what_heads_need_and_are_measured_in_all_heads_together(name):
    report = probe.probe(model(name), tokenizer(), TEXT, **QUICK)
    counts, budgets = report.keys_by_head(0.05), report.record.budgets
    measured = report.record.attention[0].output_error
    assert (len(counts), len(counts[0])) == (measured.layers, measured.heads)
    for row in measured.keys_needed:
        if (row.share, row.method) == (0.05, "optimal_v_oblivious") and row.head is not None:
            assert counts[row.layer][row.head] == row.keys
    assert len(budgets) == 4 * len(SHARES)
    [cell] = (
        c for c in budgets
        if (c.approximation, c.parameters["share"]) == ("optimal_v_oblivious", 0.05)
        and c.parameters["each"] == "own"
    )  # fmt: skip
    assert cell.parameters["keys"] == pytest.approx(torch.tensor(counts).double().mean().item())
    task, _ = probe.window_task(
        model(name), tokenizer(), TEXT, windows=2, length=LENGTH, kernel=None, seed=0, draw=False
    )
    build = lambda layer: HeadBudgets(OptimalValueOblivious, counts[layer])  # noqa: E731
    sums = joined([task.run(build, window) for window in range(2)])
    assert cell.unit_totals == pytest.approx(tuple(sums.totals))


def test_methods_left_out_get_no_budgets():
    record = probe.probe(model("bert"), tokenizer(), TEXT, **QUICK, methods=ONE_METHOD).record
    assert {cell.parameters["each"] for cell in record.budgets} == {"own", "equal"}
    assert {cell.approximation for cell in record.budgets} == set(ONE_METHOD)
