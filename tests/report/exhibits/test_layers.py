"""Output error, matching keys and skewness, and a probed model's page: measured numbers, drawn."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import OBLIVIOUS, probed, rows, with_attention, with_cells

from value_aware_attention.approximations import OptimalValueAware, OptimalValueOblivious
from value_aware_attention.kernels import Exponential
from value_aware_attention.records.record import Record
from value_aware_study.report.contents import model_section, write_probe
from value_aware_study.report.exhibits import layers
from value_aware_study.report.exhibits.drawing import (
    DRAWN_VALUES,
    DRAWN_WEIGHTS,
    by_weight,
    for_output,
)
from value_aware_study.report.exhibits.model import error_by_head, head_budgets, two_digits
from value_aware_study.report.frame import (
    FLOOR,
    Results,
    gap_rows,
    of_kernels,
    of_models,
)
from value_aware_study.report.words import ORACLES


def with_gaps(results, change):
    changed = []
    for record in results.records:
        if record.attention:
            gap = record.attention[0].skewness_gap
            gap = replace(gap, cells=tuple(map(change, gap.cells)))
            changed.append(with_attention(record, skewness_gap=gap))
    return of_models(Results.of(changed))


@pytest.fixture
def measured(results):
    return of_models(results)


def errors(measured):
    return layers.output_error(measured, "errors", "setting.", column="model")


def test_no_error_is_drawn_below_the_floor(measured):
    assert min(row["value"] for row in rows(*errors(measured).charts) if "value" in row) == FLOOR


def test_kernels_put_in_post_hoc_have_panels_and_known_intervals_bars():
    exhibit = errors(of_kernels(probed(("exponential", "elu"))))
    titles = [panel.to_dict()["title"] for panel in exhibit.charts]
    assert titles == ["exponential, its own", "elu, post hoc"]
    bars = [row for row in rows(exhibit.charts[0]) if row.get("high") is not None]
    assert {(row["series"], row["count"]) for row in bars} == {
        (series, r) for series in ORACLES.values() for r in (1, 2, 4, 8, 9)
    }
    assert all(row["value"] < row["high"] for row in bars)
    assert not any("Maurey" in note for note in exhibit.notes)
    [unknown] = of_kernels(probed(known=False))
    assert not any("high" in row for row in rows(errors([unknown]).charts[0]))


def test_an_error_of_zero_keeps_the_gap_finite(results):
    exact = with_gaps(results, lambda cell: replace(cell, aware={"4": 0.0}))
    frame = gap_rows(exact[:1])
    cells = exact[0].attention.skewness_gap.cells
    assert frame["gap"].tolist() == pytest.approx([cell.oblivious["4"] / FLOOR for cell in cells])


def test_what_was_not_measured_has_no_figure(results):
    assert errors([]) is layers.figure_7([]) is layers.skewness_gap([], "figure_8") is None
    records = [with_attention(r, skewness_gap=None) for r in results.records if r.attention]
    some = of_models(Results.of(records))
    assert errors(some) and layers.skewness_gap(some, "figure_8") is None and gap_rows(some).empty


def with_random(keys):
    """A probed model whose control has `keys` for all r, and losses a hundredth of its own."""
    near = with_cells(
        probed(), lambda cell: replace(cell, value=30 + (cell.value - 30) / 100, low=30, high=31)
    )
    return replace(probed(), control=with_keys(near, keys))


def with_keys(record, keys):
    """Exchanges the matching keys of a record."""
    errors = record.attention[0].output_error
    matches = tuple(replace(at, keys=keys, low=keys, high=keys) for at in errors.matching_keys)
    return with_attention(record, output_error=replace(errors, matching_keys=matches))


def test_the_control_shows_trained_and_random_weights_in_both_panels():
    exhibit = layers.control(with_random(6), "control", "setting.")
    bars = {(row["name"], row["series"]): row["value"] for row in rows(*exhibit.charts)}
    names = list(dict.fromkeys(name for name, _ in bars))
    assert names[:3] == ["value-aware", "by weight", "sliding window"]
    assert bars["by weight", "trained"] == pytest.approx(30.25 / 30, abs=1e-3)
    assert bars["by weight", "random weights"] == pytest.approx(30.0025 / 30, abs=1e-3)
    assert (bars["r = 4", "trained"], bars["r = 4", "random weights"]) == (8, 6)
    assert "With random weights they match 6" in exhibit.caption
    assert "(quartiles 4 to 8)" in exhibit.caption


def test_a_loss_of_zero_with_exact_attention_has_no_panel_of_losses():
    record = with_random(6)
    exact, *others = record.cells
    free = replace(record, cells=(replace(exact, value=0.0), *others))
    assert len(layers.control(free, "control", "setting.").charts) == 1


def test_our_own_models_have_the_counts_of_random_weights_as_means_over_trainings(results):
    first, *others = results.causal
    bare = with_cells(first, lambda cell: None if cell.parameters else cell)
    first = replace(first, control=bare)
    again = replace(with_keys(first, 21), model=f"{first.model}_second")
    trainings = [first, *others, again]
    data = layers.counts(of_models(Results.of(trainings))).set_index(["model", "layer", "r"])
    row = data.loc["causal, exponential", "all", 4]
    assert (row["training_first"], row["training_second"], row["keys_needed"]) == (15, 21, 18)
    assert row["random_keys"] == 15 and 4 <= row["low"] < 15 and row["high"] > 21


HEADLINE = "On <tiny>, 4 value-aware keys match 8."


@pytest.fixture(scope="module")
def record() -> Record:
    return probed(heads=2, sizes=(1, 4))


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("value_aware_study.report.contents.headline", lambda record: HEADLINE)


def exhibits(record: Record) -> dict:
    section = model_section(record)
    return {exhibit.name.removeprefix("model_"): exhibit for exhibit in section.exhibits}


@pytest.mark.usefixtures("undrawn")
def test_a_page_begins_with_what_was_found_beside_its_record_and_heads(
    record: Record, tmp_path: Path
) -> None:
    sly = replace(record, model="<tiny>")
    write_probe(sly, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<p>On &lt;tiny&gt;, 4 value-aware keys match 8. At one" in page and "<tiny>" not in page
    assert "hardware: no hardware, synthetic, 1 thread; torch 0.0." in page
    assert "post hoc" not in page and "skewness" not in page.lower()
    assert Record.from_json((tmp_path / "record.json").read_text()) == sly
    heads = pd.read_csv(tmp_path / "heads.csv")
    stored = [vars(at) for at in record.attention[0].output_error.errors if at.head is not None]
    pd.testing.assert_frame_equal(heads, pd.DataFrame(stored)[list(heads)], rtol=1e-6)
    assert list(heads) == ["layer", "head", "method", "r", "error", "low", "high"]


def test_another_kernel_is_said_and_what_was_not_measured_left_out(record: Record) -> None:
    errors = replace(record.attention[0].output_error, causal=False, matching_keys=())
    section = model_section(with_attention(record, post_hoc=True, output_error=errors))
    assert "post hoc" in section.lead
    notes = [note for exhibit in section.exhibits for note in exhibit.notes]
    assert not any("A causal query" in note for note in notes)
    names = {exhibit.name for exhibit in section.exhibits}
    assert "model_end_metric" in names and "model_matching_keys" not in names


def test_one_window_is_a_section_without_intervals() -> None:
    by_name = exhibits(probed(heads=2, sizes=(1, 4), known=False))
    for name in ("end_metric", "layers", "output_error"):
        assert not any(row.get("low") for row in rows(*by_name[name].charts))
    assert set(by_name["end_metric"].table.display["95% interval"]) == {"–", "1.00 to 1.00"}


@pytest.mark.parametrize(
    ("percent", "text"),
    [(5e-4, "<.01"), (0.0149, "0.015"), (0.35, "0.35"), (3.46, "3.5"), (216.0, "220")],
)
def test_a_cell_has_two_significant_digits(percent: float, text: str) -> None:
    assert two_digits(percent) == text


def test_one_head_that_is_nearly_exact_does_not_take_the_scale(record: Record) -> None:
    errors = record.attention[0].output_error
    lowest = min(at.error for at in errors.errors if at.head is not None and at.r == 4)
    small = tuple(
        replace(at, error=1e-12) if (at.layer, at.head, at.r) == (0, 0, 4) else at
        for at in errors.errors
    )
    one_exact = with_attention(record, output_error=replace(errors, errors=small))
    chart = error_by_head(one_exact, "error_by_head", "").charts[0].to_dict()
    scale = chart["layer"][0]["encoding"]["color"]["scale"]
    assert scale["clamp"] and 1e-12 < scale["domain"][0] < 100 * lowest


def test_budgets_of_heads_are_a_table_where_they_were_measured(record: Record) -> None:
    assert head_budgets(record, "head_budgets", "") is None
    budget = {"share": 0.05, "keys": 3.25, "each": "equal"}
    cell = replace(record.cells[1], approximation=OBLIVIOUS, parameters=budget)
    exhibit = head_budgets(replace(record, budgets=(cell,)), "head_budgets", "")
    assert exhibit.table.rows() == [
        ["5%", "3.2", f"{ORACLES[OBLIVIOUS]}, all heads alike", "31.00", "30.90 to 31.10"]
    ]
    assert "Exact attention: 30.00" in exhibit.caption


def test_it_draws_the_choices_of_the_library() -> None:
    value, key = torch.tensor(DRAWN_VALUES), torch.tensor(DRAWN_WEIGHTS).log()[:, None]
    query, kernel = torch.ones(1, 1, dtype=torch.float64), Exponential(scale=1.0)
    assert (np.diff(DRAWN_WEIGHTS) < 0).all() and np.isclose(DRAWN_WEIGHTS.sum(), 1)
    for shares, method in (
        (by_weight(), OptimalValueOblivious(2)),
        (for_output(), OptimalValueAware(2, search="best")),
    ):
        chosen = method.select(query, key, value, kernel=kernel)
        expected = torch.zeros(len(DRAWN_VALUES), dtype=torch.float64)
        expected[chosen.indices[0]] = chosen.weights[0].double()
        np.testing.assert_allclose(shares, expected.numpy(), atol=1e-5)
