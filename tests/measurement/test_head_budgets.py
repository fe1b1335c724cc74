"""Heads with budgets of their own attend as each does alone, and a probe measures all together."""

import pytest
import torch
from probed import LENGTH, model, tokenizer, words

from tests.refusals import assert_refused
from value_aware_attention import probe
from value_aware_attention.approximations import OptimalValueOblivious
from value_aware_attention.kernels import Exponential
from value_aware_attention.measurement.head_budgets import HeadBudgets
from value_aware_attention.measurement.task import joined
from value_aware_attention.records.record import SHARES

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {"windows": 2, "length": LENGTH, "rows": 4, "search": "fast", "control": False}
TEXT = words(14 * 6)


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
    methods = {"optimal_v_oblivious": lambda r, layer: OptimalValueOblivious(r)}
    record = probe.probe(model("bert"), tokenizer(), TEXT, **QUICK, methods=methods).record
    assert {cell.parameters["each"] for cell in record.budgets} == {"own", "equal"}
    assert {cell.approximation for cell in record.budgets} == set(methods)
