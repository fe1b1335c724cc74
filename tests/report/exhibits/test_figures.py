"""The paper's figures, 4 and 5: every number drawn, once, and looks that are the same in all."""

import math

import pandas as pd
import pytest
from synthetic import with_cells

from value_aware_study.cards import cards
from value_aware_study.report import marks as looks
from value_aware_study.report.exhibits import figure_1, figure_2, figure_3, figure_4, figure_5
from value_aware_study.report.exhibits.figure_4 import SMALLEST
from value_aware_study.report.exhibits.figure_5 import BASELINES
from value_aware_study.report.labels import method_label
from value_aware_study.report.measurements import OPTIMAL
from value_aware_study.report.published import TABLE_1, TABLE_2
from value_aware_study.report.results import Results

KERNELS = ["exponential", "polynomial (deg 2)", "elu"]
MODELS = ["causal, exponential", "causal, polynomial (deg 2)", "causal, elu", "masked, 512 tokens"]


def rows(*charts):
    """Every row of data that panels draw from."""
    return [
        row for chart in charts for data in chart.to_dict()["datasets"].values() for row in data
    ]


def parts(spec):
    """Every nested mapping of a Vega-Lite specification."""
    if isinstance(spec, dict):
        yield spec
        spec = list(spec.values())
    if isinstance(spec, list):
        for item in spec:
            yield from parts(item)


def colours(*charts):
    """label -> colour, over all legends of panels."""
    found = {}
    for chart in charts:
        for part in parts(chart.to_dict()):
            scale = part["color"].get("scale", {}) if isinstance(part.get("color"), dict) else {}
            found |= dict(zip(scale.get("domain", []), scale.get("range", []), strict=True))
    return found


def numbers(exhibit, whose="ours"):
    data = exhibit.table.data
    return data[data["whose"] == whose]


def test_figure_1_draws_every_setting_once_and_the_papers_values(results):
    shown = figure_1.exhibit(results)
    ours = numbers(shown)
    sparse, dense = ours[ours["r"].notna()], ours[ours["features"].notna()]
    assert len(set(zip(sparse["series"], sparse["r"], strict=True))) == len(sparse) == 3 * 11 + 15
    assert len(set(zip(dense["series"], dense["features"], strict=True))) == len(dense) == 2 * 4
    drawn = rows(*shown.charts)
    assert len([row for row in drawn if row.get("low") is not None]) == len(ours)
    assert {r["count"] for r in drawn if r.get("name") == "d + 1 = 65"} == {65}
    theirs = numbers(shown, "paper").set_index(["series", "r"])["value"]
    exact = TABLE_1[0].error
    assert theirs["OVO", 65.0] == pytest.approx(43.5 - exact) and len(theirs) == 7
    hollow = [row for row in drawn if "points" not in row and "series" in row]
    assert sorted(r["value"] for r in hollow) == pytest.approx(sorted(theirs))


def test_figure_1_draws_changes_from_exact(results):
    cells = {tuple(c.parameters.items()): c for c in results.models("masked_long")[0].cells}
    ours = numbers(figure_1.exhibit(results))
    row = ours[(ours["series"] == "sliding window") & (ours["r"] == 64)].iloc[0]
    [cell] = [
        c
        for c in results.models("masked_long")[0].cells
        if (c.approximation, c.parameters) == ("sliding_window", {"r": 64})
    ]
    assert cells and row["value"] == pytest.approx(cell.value - 45.0)
    assert (row["low"], row["high"]) == pytest.approx((cell.low - 45.0, cell.high - 45.0))


def test_figure_2_draws_nats_up_to_all_keys_and_the_papers_order(results):
    shown = figure_2.exhibit(results)
    ours = numbers(shown)
    last = ours[ours["r"] == 256]
    assert sorted(last["series"]) == sorted(KERNELS)
    assert last["value"].tolist() == pytest.approx([0.0] * 3)
    nats = results.nats[results.nats["task"] == "causal"].set_index("approximation")
    one = nats[(nats["kernel"] == "elu") & (nats["r"] == 1)].loc["optimal_v_oblivious", "value"]
    exact = nats[nats["kernel"] == "elu"].loc["exact", "value"]
    first = ours[ours["r"] == 1].set_index("series")["value"]
    assert first["elu"] == pytest.approx(one - exact)
    theirs = numbers(shown, "paper").set_index(["series", "r"])["value"]
    perplexity = TABLE_2["elu"]
    assert theirs["elu", 65.0] == pytest.approx(math.log(perplexity[2] / perplexity[0]))


def test_figure_3_draws_the_curves_as_recorded(records, training):
    drawn = rows(*figure_3.exhibit(Results.of(records, training)).charts)
    curve = [(r["count"], r["value"]) for r in drawn if r["series"] == "long, 512 tokens"]
    expected = [(p["step"], p["error"]) for p in training["masked_long"]["curve"]]
    assert set(curve) == set(expected)
    assert len({r["series"] for r in drawn}) == 5


def test_figure_4_leaves_out_what_is_exact_and_correlates_ranks(results):
    shown = figure_4.exhibit(results)
    assert list(shown.choices) == MODELS
    errors = [r["relative_output_error"] for r in rows(*shown.charts) if "setting" in r]
    assert len(errors) == len(shown.table.data) and min(errors) >= SMALLEST
    for panel in shown.charts[:3]:  # the synthetic loss grows with the output error
        assert float(panel.to_dict()["title"].rsplit(" ", 1)[1]) > 0.9


def test_figure_5_has_two_panels_for_each_kernel_and_the_long_masked_model(results):
    shown = figure_5.exhibit(results)
    assert list(shown.choices) == MODELS and len(shown.charts) == 8
    assert len(figure_5.exhibit(Results.of(results.causal)).charts) == 6


def test_figure_5_draws_every_method_with_its_interval(results):
    [masked] = results.models("masked_long")
    shown = figure_5.exhibit(Results.of([masked]))
    drawn = [row for row in rows(*shown.charts) if "points" in row]
    names = {"norm_weighted_keys": ["α|v|, 1-norm (VATP)", "α|v|, 2-norm (Kobayashi)"]}
    for method in (*OPTIMAL, *BASELINES):
        labels = names.get(method, [method_label(method)])
        expected = [cell for cell in masked.cells if cell.approximation == method]
        found = [row for row in drawn if row["series"] in labels]
        counts = {(cell.parameters["r"], cell.parameters.get("norm")) for cell in expected}
        assert len(found) == len(counts) > 0, method
        assert all(row["low"] < row["high"] or row["value"] == 0 for row in found)
    (cell,) = (c for c in masked.cells if c.parameters == {"r": 4, "norm": 1})
    (row,) = (r for r in drawn if r["series"] == names["norm_weighted_keys"][0] and r["count"] == 4)
    ends = [cell.value - 45.0, cell.low - 45.0, cell.high - 45.0]
    assert [row["value"], row["low"], row["high"]] == pytest.approx(ends)


def test_figure_5_draws_the_others_as_a_band_and_quieter_than_the_optimal_methods(records):
    optimal, others = (c.to_dict() for c in figure_5.exhibit(Results.of(records[:1])).charts)
    widths = [
        [
            layer["mark"]["strokeWidth"]
            for layer in chart["layer"]
            if layer["mark"]["type"] == "line"
        ]
        for chart in (optimal, others)
    ]
    assert max(widths[1]) < min(widths[0])
    [band] = [layer for layer in optimal["layer"] if layer["mark"]["type"] == "area"]
    ends = optimal["datasets"][band["data"]["name"]]
    assert all(row["low"] < row["high"] for row in ends) and len(ends) == 6


def test_a_method_has_the_same_colour_in_every_figure(results):
    first, fourth, fifth = (
        colours(*one.exhibit(results).charts) for one in (figure_1, figure_4, figure_5)
    )
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
    marks = looks.method_marks(pd.DataFrame(drawn))
    assert all(curve.split(", ")[0] == method_label(name) for curve in curves[name])
    for curve in curves[name]:
        assert marks[curve] != looks.OTHER
        assert list(marks.values()).count(marks[curve]) == 1


def test_lsh_shades_deepen_with_rounds():
    drawn = {"approximation": "lsh", "rounds": [16, 4, 1]}
    drawn["series"] = ["LSH, 16 rounds", "LSH, 4 rounds", "LSH, 1 round"]
    marks = looks.method_marks(pd.DataFrame(drawn))
    shades = ["var(--purple)", "var(--plum)", "var(--wine)"]
    assert [(name, mark.colour) for name, mark in marks.items()] == list(
        zip(["LSH, 1 round", "LSH, 4 rounds", "LSH, 16 rounds"], shades, strict=True)
    )


def test_two_settings_are_not_joined_by_a_line(records):
    def kept(cell):
        few = cell.approximation != "optimal_v_aware" or cell.parameters["r"] in (1, 65)
        return cell if few else None

    few = Results.of(with_cells(record, kept) for record in records if record.task == "causal")
    panels = figure_5.exhibit(few).charts
    drawn = [row for row in rows(*panels) if "points" in row]
    points = {r["series"]: r["points"] for r in drawn if r["series"] in ("OVO", "OVA")}
    assert points == {"OVO": 10, "OVA": 2}
    filters = [p["filter"] for panel in panels for p in parts(panel.to_dict()) if "filter" in p]
    assert set(filters) == {"datum.points >= 3"}


def test_a_shape_and_a_colour_of_a_curve_share_one_legend(results):
    for chart in figure_1.exhibit(results).charts:
        for part in parts(chart.to_dict()):
            if isinstance(part.get("shape"), dict):
                assert part["shape"]["scale"]["domain"] == part["color"]["scale"]["domain"]


@pytest.mark.parametrize("figure", [figure_1, figure_2, figure_3, figure_4, figure_5])
def test_without_records_there_is_no_figure(figure):
    assert figure.exhibit(Results.of([])) is None


def test_every_axis_of_values_says_what_is_better(records, training):
    results = Results.of(records, training)
    for figure in (figure_1, figure_2, figure_3, figure_4, figure_5):
        for chart in figure.exhibit(results).charts:
            titles = [
                part["y"]["title"]
                for part in parts(chart.to_dict())
                if isinstance(part.get("y"), dict) and "scale" in part["y"]
            ]
            assert titles and all(title.endswith("lower is better") for title in titles)
