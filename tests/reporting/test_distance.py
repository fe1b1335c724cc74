"""Every method at equal budgets: the figures, the table and the sentences made from them."""

import math
from dataclasses import replace

import pytest
from surveyed import cell, survey_record, survey_results
from synthetic import UNKNOWN, with_cells

from value_aware_study.reporting.distance import (
    budget_settings,
    distance_figures,
    distance_table,
    findings,
)
from value_aware_study.reporting.output_error_figures import FLOOR
from value_aware_study.reporting.pattern_figure import pattern_figures
from value_aware_study.reporting.results import Results
from value_aware_study.reporting.table import DASH
from value_aware_study.reporting.trained_table import trained_table


def rows(chart):
    return [row for data in chart.to_dict()["datasets"].values() for row in data]


@pytest.mark.parametrize(("task", "expected"), [("causal", math.log(131.0)), ("masked", 131.0)])
def test_seeds_are_averaged_and_perplexities_become_nats(task: str, expected: float) -> None:
    frame = budget_settings(survey_results(task))
    assert len(frame) == 2 * 6 and "exact" not in set(frame["approximation"])
    keys = frame[frame["approximation"] == "random_keys"]
    assert keys["value"].tolist() == pytest.approx([expected] * 2, rel=1e-4)
    assert keys["relative_output_error"].tolist() == pytest.approx([0.8, 0.8])
    assert keys["cost"].tolist() == pytest.approx([16.32, 65.28])


def test_the_figure_draws_every_method_at_its_cost() -> None:
    [figure] = distance_figures(survey_results())
    drawn = rows(figure.chart)
    assert figure.name == "distance_causal_elu" and "elu" in figure.title
    assert {row["series"] for row in drawn if "series" in row} >= {"OVO", "OVA", "strided"}
    errors = [row for row in drawn if "relative_output_error" in row]
    assert min(row["relative_output_error"] for row in errors) == FLOOR
    by_cost = {(row["series"], round(row["cost"])): row for row in errors}
    strided = by_cost["strided", 16]
    ends = [strided[f"relative_output_error{end}"] for end in ("_low", "", "_high")]
    assert ends == pytest.approx([0.15, 0.2, 0.3])
    assert {round(row["cost"], 2) for row in drawn if "cost" in row} == {16.32, 65.28}


def test_the_sentences_name_the_closest_method_that_does_not_look_at_the_weights() -> None:
    said = findings(budget_settings(survey_results()))
    known = "At 16 keys the closest practical method is strided: output error 0.2 (0.15 to 0.3)"
    assert known in said
    assert "× 5.00 OVA's (0.04)" in said and "× 0.50 OVO's (0.4)" in said
    assert "far above OVA's (0)" in said  # nothing to divide by at 64 keys

    def closer(one):
        near = replace(one.error, relative=0.001)
        return replace(one, error=near) if one.approximation == "sliding_window" else one

    moved = budget_settings(Results.of([with_cells(survey_record(), closer)]))
    assert "closest practical method is sliding window" in findings(moved)


def test_the_table_has_every_setting_sorted_within_a_budget() -> None:
    table = distance_table(survey_results())
    assert len(table.data) == len(table.display) == 12
    first = table.display["method"].tolist()[:6]
    assert first == ["OVA", "sampled from α", "strided", "OVO", "sliding window", "random keys"]
    assert "synthetic" in table.markdown() and "stride" not in table.display.columns
    row = table.display.iloc[2]
    assert row["output error"] == "0.2 (0.15 to 0.3)" and row["range over seeds"] == DASH
    drawn = table.display.iloc[5]
    assert drawn["range over seeds"] == f"{math.log(130):.2f} to {math.log(132):.2f}"
    ends = table.data[["relative_output_error_low", "relative_output_error_high"]]
    assert (ends.iloc[:, 0] <= ends.iloc[:, 1]).all()


def test_captions_say_what_an_output_error_is_and_on_how_many_units_it_was_measured() -> None:
    table, [figure] = distance_table(survey_results()), distance_figures(survey_results())
    for caption in (table.caption, figure.caption):
        assert (
            "the sum of |o − õ|² over queries, heads and layers, divided by that of |o|²" in caption
        )
        assert "Measured on 8 windows (causal_elu), evenly spaced" in caption
        assert "covers the text and not the draws" in caption
    assert "50 targets in 40 windows" in figure.caption  # the end metric's own


def test_the_picture_scales_every_query_by_its_largest_weight() -> None:
    [figure] = pattern_figures([survey_record(), survey_record("masked", picture=None)])
    assert "def f" in figure.caption and figure.name == "patterns_causal_elu"
    panels = figure.chart.to_dict()["concat"]
    assert [panel["title"]["text"] for panel in panels] == ["exact", "Nyström (2.5)"]
    once = sorted(row["weight"] for row in rows(figure.chart.concat[0]))
    assert once == [-0.5, 0.0, 1.0, 1.0]


def test_a_trained_model_stands_beside_the_same_method_swapped_in() -> None:
    exact = replace(survey_record("masked"), model="masked_short")
    alone = replace(exact, cells=(cell("exact", {}, None, 0.0, 90.0),))
    windows = replace(
        alone,
        model="masked_short_sliding_window",
        trained_with="SlidingWindow",
        arguments={"r": 16, "engine": None},
    )
    fourier = replace(alone, model="masked_short_fourier_mixing", trained_with="FourierMixing")
    table = trained_table([windows, fourier], [exact])
    assert table.data["trained"].tolist() == [90.0, 90.0]
    assert table.data["swapped"][0] == 120.0 and math.isnan(table.data["swapped"][1])
    assert table.display["attention"].tolist() == [
        "sliding window (r = 16)",
        "Fourier mixing (FNet)",
    ]
    assert "One training run each" in table.caption


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_a_single_unit_has_no_interval_in_table_and_figure(task: str) -> None:
    single = with_cells(survey_record(task), lambda one: replace(one, **UNKNOWN))
    results = Results.of([single])
    assert set(distance_table(results).display["interval"]) == {DASH}
    [figure] = distance_figures(results)
    assert all(row["low"] is None for row in rows(figure.chart) if "low" in row)
