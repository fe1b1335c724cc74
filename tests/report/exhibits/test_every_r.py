"""Every method at every r and at equal budgets: numbers are drawn once, a method has one mark."""

import re
from dataclasses import replace

import pandas as pd
import pytest
import vl_convert
from synthetic import UNKNOWN, parts, rows, survey_record, survey_results, with_cells

from value_aware_attention.records.estimate import DASH
from value_aware_study.cards import cards
from value_aware_study.report import look
from value_aware_study.report.exhibits import survey
from value_aware_study.report.exhibits.figures import (
    SMALLEST_ERROR,
    figure_1,
    figure_2,
    figure_3,
    figure_4,
    figure_5,
)
from value_aware_study.report.exhibits.survey import budget_settings, findings
from value_aware_study.report.frame import FLOOR, Results
from value_aware_study.report.look import specification
from value_aware_study.report.words import method_label

MODELS = ["causal, exponential", "causal, polynomial (deg 2)", "causal, elu", "masked, 512 tokens"]


@pytest.fixture(scope="module")
def exhibits(records, training):
    figures, results = (
        (figure_1, figure_2, figure_3, figure_4, figure_5),
        Results.of(records, training),
    )
    return {number: figure(results) for number, figure in enumerate(figures, start=1)}


@pytest.fixture(scope="module")
def specifications(exhibits):
    return {number: [chart.to_dict() for chart in exhibits[number].charts] for number in exhibits}


def colours(panels):
    """Maps labels to colours, over the legends of all panels."""
    of_label = {}
    for node in parts(panels):
        scale = node["color"].get("scale", {}) if isinstance(node.get("color"), dict) else {}
        of_label |= dict(zip(scale.get("domain", []), scale.get("range", []), strict=True))
    return of_label


def test_figure_4_leaves_out_what_is_exact_and_correlates_ranks(exhibits, specifications):
    exhibit, panels = exhibits[4], specifications[4]
    assert list(exhibit.choices) == MODELS
    drawn = [row for panel in panels for rows in panel["datasets"].values() for row in rows]
    errors = [row["relative_output_error"] for row in drawn if "said" in row]
    assert len(errors) == len(exhibit.table.data) and min(errors) >= SMALLEST_ERROR
    for panel in panels[:3]:  # the synthetic loss grows with the output error
        error, cosine = re.findall(r"[+−]?\d\.\d+", panel["title"])
        assert float(error) > 0.9 and cosine == error.replace("+", "−")
    assert {"cosine", "relative_length"} <= set(exhibit.table.data)


def test_figure_5_draws_the_others_as_a_band_and_one_by_one(exhibits, specifications):
    assert list(exhibits[5].choices) == MODELS and len(specifications[5]) == 8
    optimal = specifications[5][0]
    [band] = [layer for layer in optimal["layer"] if layer["mark"]["type"] == "area"]
    ends = optimal["datasets"][band["data"]["name"]]
    assert all(row["low"] < row["high"] for row in ends) and len(ends) == 6


def test_a_method_has_the_same_colour_in_every_figure(specifications):
    first, fourth, fifth = (colours(specifications[number]) for number in (1, 4, 5))
    assert len(set(first.values())) == len(first) == 8
    shared = set(first) & set(fourth)
    assert shared == {"OVO", "OVA", "sliding window"}
    assert {name: fourth[name] for name in shared} == {name: first[name] for name in shared}
    assert {fifth[name] for name in ("OVO", "OVA")} == {first[name] for name in ("OVO", "OVA")}


@pytest.mark.parametrize("name", [n for n, c in cards().items() if c.axes or c.survey is not None])
def test_every_method_that_is_measured_has_a_label_and_a_mark_of_its_own(name):
    curves = {card.name: list(card.marks() or [card.label]) for card in cards().values()}
    drawn = [
        {"approximation": name, "series": curve, "rounds": 1}
        for name in curves
        for curve in curves[name]
    ]
    marks = look.method_marks(pd.DataFrame(drawn))
    for curve in curves[name]:
        assert curve.split(", ")[0] == method_label(name) and marks[curve] != look.OTHER
        assert list(marks.values()).count(marks[curve]) == 1


def test_lsh_shades_deepen_with_rounds():
    drawn = {"approximation": "lsh", "rounds": [16, 4, 1]}
    drawn["series"] = ["LSH, 16 rounds", "LSH, 4 rounds", "LSH, 1 round"]
    marks = look.method_marks(pd.DataFrame(drawn))
    assert [(name, mark.colour) for name, mark in marks.items()] == [
        ("LSH, 1 round", "var(--purple)"),
        ("LSH, 4 rounds", "var(--plum)"),
        ("LSH, 16 rounds", "var(--wine)"),
    ]


def test_two_settings_are_not_joined_by_a_line(records):
    def kept(cell):
        few = cell.approximation != "optimal_v_aware" or cell.parameters["r"] in (1, 65)
        return cell if few else None

    panels = figure_5(Results.of([with_cells(records[0], kept)])).charts
    for spec in (panel.to_dict() for panel in panels):
        lines = [layer for layer in spec["layer"] if layer["mark"]["type"] == "line"]
        joined = {r["series"] for layer in lines for r in spec["datasets"][layer["data"]["name"]]}
        assert joined and "OVA" not in joined


def test_every_axis_of_values_says_what_is_better(specifications):
    for panel in (panel for panels in specifications.values() for panel in panels):
        titles = [
            node["y"]["title"]
            for node in parts(panel)
            if isinstance(node.get("y"), dict) and "scale" in node["y"]
        ]
        assert titles and all(title.endswith("lower is better") for title in titles)


def test_both_panels_have_the_closest_method_first_below_the_limit() -> None:
    """The limit is the edge of what is shaded."""
    panels = survey.distance(survey_results()).charts
    drawn = [row for row in rows(panels[0]) if "low" in row]
    assert {row["series"] for row in drawn} == {"16 keys", "64 keys"}
    assert min(row["value"] for row in drawn) == FLOOR
    order, of_cost = (panel.to_dict()["layer"][-1]["encoding"]["y"]["sort"] for panel in panels)
    assert order[0] == survey.LIMIT and order == of_cost
    shade = panels[0].layer[0]
    assert shade.to_dict()["mark"]["type"] == "rect"
    assert shade.data["value"].tolist() == pytest.approx([0.04, FLOOR])


def test_a_cost_beyond_all_others_is_a_number_at_the_edge() -> None:
    def worse(cell):
        far = cell.approximation == "sliding_window" and cell.budget == 16
        return replace(cell, value=5000.0, low=None, high=None) if far else cell

    [_, cost] = survey.distance(Results.of([with_cells(survey_record("masked"), worse)])).charts
    drawn = rows(cost)
    assert [row["text"] for row in drawn if "text" in row] == ["+4,900.0 ▸"]
    assert max(row["value"] for row in drawn if "value" in row) < 100


def test_the_sentences_name_the_closest_method_that_does_not_look_at_the_weights() -> None:
    def closer(cell):
        near = replace(cell.error, relative=0.001)
        return replace(cell, error=near) if cell.approximation == "sliding_window" else cell

    moved = Results.of([with_cells(survey_record(), closer)])
    for results, closest in ((survey_results(), "strided"), (moved, "sliding window")):
        assert f"closest practical method is {closest}" in findings(budget_settings(results))


def test_the_picture_scales_every_query_by_its_largest_weight() -> None:
    exhibit = survey.patterns([survey_record(), survey_record("masked", picture=None)])
    exact, other = exhibit.charts
    assert exhibit.choices == ["causal, elu"]
    assert exact.to_dict()["title"] == "causal, elu: exact attention"
    drawn = [(row["query"], row["key"], row["weight"]) for row in rows(exact)]
    assert drawn == [(0, 0, 1.0), (1, 0, 0.5), (1, 1, -0.25)]
    svg = vl_convert.vegalite_to_svg(specification(exact))
    assert re.findall(r"strength: ([\d.]+);", svg) == ["1", "1", "0.5"]
    assert '["def", "f"][datum.value]' in str(exact.to_dict())
    assert {row["method"] for row in rows(other)} == {"Nyström (2.5)"}
    assert survey.patterns([survey_record(picture=None)]) is None


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_a_single_unit_has_no_interval_in_table_and_figure(task: str) -> None:
    single = with_cells(survey_record(task), lambda cell: replace(cell, **UNKNOWN))
    exhibit = survey.distance(Results.of([single]))
    assert set(exhibit.table.display["interval"]) == {DASH}
    assert not any("low" in row for row in rows(exhibit.charts[1]))
