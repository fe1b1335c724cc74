import pandas as pd
import pytest
from synthetic import with_cells
from value_aware_study.reporting import style
from value_aware_study.reporting.figures import (
    BASELINES,
    OPTIMAL,
    SMALLEST_ERROR,
    figure_1,
    figure_2,
    figure_3,
    figure_4,
    figure_5,
    save,
)

from value_aware_study.cards import cards
from value_aware_study.report.labels import method_label
from value_aware_study.report.results import Results

KERNELS = ["exponential", "polynomial (deg 2)", "elu"]


def rows(chart):
    """Every row of data a chart draws from."""
    return [row for data in chart.to_dict()["datasets"].values() for row in data]


def parts(spec):
    """Every nested mapping of a Vega-Lite specification."""
    if isinstance(spec, dict):
        yield spec
        spec = list(spec.values())
    if isinstance(spec, list):
        for item in spec:
            yield from parts(item)


def colours(chart):
    """label -> colour, over all legends of a chart."""
    found = {}
    for part in parts(chart.to_dict()):
        scale = part["color"].get("scale", {}) if isinstance(part.get("color"), dict) else {}
        found |= dict(zip(scale.get("domain", []), scale.get("range", []), strict=True))
    return found


def test_figure_1_draws_every_setting_once_and_the_exact_line(results):
    drawn = rows(figure_1(results))
    sparse = {(r["series"], r["r"]) for r in drawn if r.get("r") is not None}
    assert len(sparse) == 3 * 11 + 3 * 5
    dense = {(r["series"], r["features"]) for r in drawn if r.get("features") is not None}
    assert len(dense) == 2 * 4
    assert {r["exact"] for r in drawn if "exact" in r} == {45.0}
    assert {r["keys"] for r in drawn if "keys" in r} == {65}


def test_figure_2_draws_nats_up_to_all_keys_and_one_exact_line_a_kernel(results):
    drawn = rows(figure_2(results))
    losses = results.nats[results.nats["task"] == "causal"]
    exact = {r["series"]: r["value"] for r in drawn if r.get("approximation") == "exact"}
    assert sorted(exact) == sorted(KERNELS)
    last = {r["series"]: r["value"] for r in drawn if r.get("r") == 256}
    assert last == pytest.approx(exact)
    oblivious = losses[losses["approximation"] == "optimal_v_oblivious"]
    assert oblivious["value"].max() == pytest.approx(max(r.get("value", 0) for r in drawn))


def test_figure_3_draws_the_curves_as_recorded(records, training):
    drawn = rows(figure_3(Results.of(records, training)))
    curve = [(r["step"], r["y"]) for r in drawn if r["series"] == "long, 512 tokens"]
    assert curve == [(p["step"], p["error"]) for p in training["masked_long"]["curve"]]
    assert len({r["series"] for r in drawn}) == 5


def test_figure_4_leaves_out_what_is_exact(results):
    errors = [r["relative_output_error"] for r in rows(figure_4(results)) if "series" in r]
    assert errors and min(errors) >= SMALLEST_ERROR


def test_figure_5_has_a_panel_for_each_kernel_and_the_long_masked_model(results):
    panels = figure_5(results).to_dict()["concat"]
    assert [panel["title"] for panel in panels] == [*KERNELS, "long masked model"]
    assert len(figure_5(Results.of(results.causal)).to_dict()["concat"]) == 3


def test_figure_5_draws_every_method_with_its_interval(results):
    [masked] = results.models("masked_long")
    cells, drawn = masked.cells, rows(figure_5(Results.of([masked])))
    drawn = [row for row in drawn if row.get("value") is not None]
    names = {"norm_weighted_keys": ["α|v|, 1-norm (VATP)", "α|v|, 2-norm (Kobayashi)"]}
    for method in (*OPTIMAL, *BASELINES):
        labels = names.get(method, [method_label(method)])
        expected = [cell for cell in cells if cell.approximation == method]
        found = [row for row in drawn if row["series"] in labels]
        counts = {(cell.parameters["r"], cell.parameters.get("norm")) for cell in expected}
        assert len(found) == len(counts) > 0, method
        assert all(row["low"] < row["high"] or row["value"] == 45.0 for row in found)
    wanted = {"r": 4, "norm": 1}
    (cell,) = (c for c in cells if c.parameters == wanted)
    (row,) = (r for r in drawn if r["series"] == names["norm_weighted_keys"][0] and r["r"] == 4)
    assert (row["value"], row["low"], row["high"]) == (cell.value, cell.low, cell.high)


def test_figure_5_draws_baselines_quieter_than_the_optimal_methods(records):
    chart = figure_5(Results.of(records[:1])).to_dict()
    widths = {
        row["series"]: layer["mark"]["strokeWidth"]
        for layer in chart["concat"][0]["layer"]
        if layer["mark"]["type"] == "line"
        for row in chart["datasets"][layer["data"]["name"]]
    }
    quiet = {name: width for name, width in widths.items() if name not in ("OVO", "OVA")}
    assert len(quiet) == 6 and max(quiet.values()) < min(widths["OVO"], widths["OVA"])


def test_a_method_has_the_same_colour_in_every_figure(results):
    first, fourth, fifth = (colours(draw(results)) for draw in (figure_1, figure_4, figure_5))
    assert len(set(first.values())) == len(first) == 8
    assert {name: fourth[name] for name in first} == first
    assert {name: fourth[name] for name in fifth} == fifth
    assert set(first) & set(fifth) == {"OVO", "OVA"}


@pytest.mark.parametrize("name", [n for n, c in cards().items() if c.axes or c.survey is not None])
def test_every_method_that_is_measured_has_a_label_and_a_mark_of_its_own(name):
    curves = {card.name: list(card.marks() or [card.label]) for card in cards().values()}
    drawn = [
        {"approximation": name, "series": curve, "rounds": 1}
        for name in curves
        for curve in curves[name]
    ]
    marks = style.method_marks(pd.DataFrame(drawn))
    assert all(curve.split(", ")[0] == method_label(name) for curve in curves[name])
    for curve in curves[name]:
        assert marks[curve].colour != style.OTHER
        assert list(marks.values()).count(marks[curve]) == 1


def test_lsh_shades_deepen_with_rounds():
    drawn = {"approximation": "lsh", "rounds": [16, 4, 1]}
    drawn["series"] = ["LSH, 16 rounds", "LSH, 4 rounds", "LSH, 1 round"]
    marks = style.method_marks(pd.DataFrame(drawn))
    assert list(marks) == ["LSH, 1 round", "LSH, 4 rounds", "LSH, 16 rounds"]
    red = [int(mark.colour[1:3], 16) for mark in marks.values()]
    assert red == sorted(red, reverse=True)


def test_two_settings_are_not_joined_by_a_line(records):
    def kept(cell):
        few = cell.approximation != "optimal_v_aware" or cell.parameters["r"] in (1, 65)
        return cell if few else None

    few = Results.of(with_cells(record, kept) for record in records if record.task == "causal")
    drawn = rows(figure_5(few))
    points = {r["series"]: r["points"] for r in drawn if r.get("series") in ("OVO", "OVA")}
    assert points == {"OVO": 10, "OVA": 2}
    filters = [part["filter"] for part in parts(figure_5(few).to_dict()) if "filter" in part]
    assert set(filters) == {"datum.points >= 3"}


def test_a_shape_and_a_colour_of_a_curve_share_one_legend(results):
    for part in parts(figure_1(results).to_dict()):
        if isinstance(part.get("shape"), dict):
            assert part["shape"]["scale"]["domain"] == part["color"]["scale"]["domain"]


@pytest.mark.parametrize("draw", [figure_1, figure_2, figure_4, figure_5])
def test_no_records_draw_a_sentence(draw, tmp_path):
    save(draw(Results.of([])), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_every_axis_has_a_title_with_a_unit(records, training):
    results = Results.of(records, training)
    for chart in (figure_1(results), figure_2(results), figure_3(results)):
        titles = [
            part[axis].get("title")
            for part in parts(chart.to_dict())
            for axis in ("x", "y")
            if isinstance(part.get(axis), dict) and "scale" in part[axis]
        ]
        assert titles and all(titles)
