"""Output error, matching keys and skewness of every model: the measured numbers, drawn."""

from dataclasses import replace

import pytest
from drawn import rows
from synthetic import probed, with_attention, with_cells

from value_aware_study.report.exhibits import layers
from value_aware_study.report.exhibits.layers import gap_findings
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
    expected = [cell.oblivious["4"] / FLOOR for cell in cells]
    assert frame["gap"].tolist() == pytest.approx(expected)


def test_findings_are_computed_from_the_points(results, measured):
    text = gap_findings(measured)
    assert "+1.00 over the own kernels" in text and "14 of 14 layers" in text
    assert "100% of the queries" in text
    turned = with_gaps(
        results, lambda cell: replace(cell, oblivious=cell.aware, aware=cell.oblivious)
    )
    text = gap_findings(turned)
    assert "−1.00 over the own kernels" in text and "0 of 14 layers" in text
    assert gap_findings([]) == ""


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


def test_the_hero_shows_trained_and_random_weights_in_both_panels():
    exhibit = layers.hero(Results([], probed=[with_random(6)]))
    bars = {(row["name"], row["series"]): row["value"] for row in rows(*exhibit.charts)}
    names = list(dict.fromkeys(name for name, _ in bars))
    assert names[:3] == ["value-aware", "by weight", "sliding window"]
    assert bars["by weight", "trained"] == pytest.approx(30.25 / 30, abs=1e-3)
    assert bars["by weight", "random weights"] == pytest.approx(30.0025 / 30, abs=1e-3)
    assert (bars["r = 4", "trained"], bars["r = 4", "random weights"]) == (8, 6)
    assert "With random weights they match 6" in exhibit.caption
    assert "(4 to 8 in the quartiles)" in exhibit.caption


def test_a_loss_of_zero_with_exact_attention_has_no_panel_of_losses():
    record = with_random(6)
    exact, *others = record.cells
    free = replace(record, cells=(replace(exact, value=0.0), *others))
    assert len(layers.hero(Results([], probed=[free])).charts) == 1


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
