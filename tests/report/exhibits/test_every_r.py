"""Figures 4 and 5 draw every number once; a method has one mark in all figures."""

import re

import pandas as pd
import pytest
from drawn import parts
from synthetic import with_cells

from value_aware_study.cards import cards
from value_aware_study.report import look
from value_aware_study.report.exhibits.figures import (
    SMALLEST_ERROR,
    figure_1,
    figure_2,
    figure_3,
    figure_4,
    figure_5,
)
from value_aware_study.report.frame import Results
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
