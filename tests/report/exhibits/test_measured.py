from dataclasses import replace
from itertools import pairwise

import pytest
from synthetic import probed, with_attention
from value_aware_study.reporting.measured_report import measured_figures
from value_aware_study.reporting.output_error_figures import (
    BOUND,
    FLOOR,
    LABEL_GAP,
    curve_labels,
    matching_keys_figure,
    output_error_figure,
)

from value_aware_study.report.gap import (
    gap_findings,
    gap_rows,
    skewness_figure,
)
from value_aware_study.report.measurements import error_rows, of_kernels, of_models
from value_aware_study.report.results import Results

DRAW = (output_error_figure, matching_keys_figure, skewness_figure)


def rows(chart):
    return [row for data in chart.to_dict()["datasets"].values() for row in data]


def with_gaps(results, change):
    """What was measured, with every cell of the skewness gap changed."""
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


def test_the_output_error_has_a_panel_a_model_and_every_method(measured):
    chart = output_error_figure(measured).to_dict()
    titles = [panel["title"] for panel in chart["concat"]]
    assert titles == [item.label for item in measured] and len(titles) == 4
    drawn = rows(output_error_figure(measured[:1]))
    assert {row["series"] for row in drawn} == set(curve_labels().values())


def test_pooled_and_layer_curves_are_the_measured_ones(measured):
    item = measured[0]
    drawn = rows(output_error_figure([item]))
    for method in ("optimal_v_oblivious", "optimal_v_aware"):
        for name, layer in (("pooled", None), ("3", 3)):
            of_layer = {
                row["r"]: row["error"]
                for row in drawn
                if row["series"] == curve_labels()[method] and row["layer"] == name
            }
            expected = {
                row["r"]: row["error"] for row in error_rows(item.output_error, method, layer)
            }
            assert {1, 2, 4, 8, 16, 32, 64, max(expected)} <= set(of_layer)
            for r, error in of_layer.items():
                assert error == pytest.approx(max(expected[r], FLOOR))
    assert {row["layer"] for row in drawn if row["series"] == BOUND} == {"pooled"}


def test_no_error_is_drawn_below_the_floor(measured):
    drawn = [row["error"] for row in rows(output_error_figure(measured))]
    assert min(drawn) == FLOOR


def test_kernels_put_in_post_hoc_have_panels_and_known_intervals_bars():
    kernels = of_kernels(probed(("exponential", "elu")))
    chart = output_error_figure(kernels).to_dict()
    titles = [panel["title"] for panel in chart["concat"]]
    assert titles == ["exponential, its own", "elu, post hoc"]
    bars = [row for row in rows(output_error_figure(kernels[:1])) if "high" in row]
    assert {(row["series"], row["r"]) for row in bars} == {
        (series, r) for series in ("OVO", "OVA") for r in (1, 2, 4, 8, 9)
    }
    assert all(row["error"] < row["high"] for row in bars)
    [unknown] = of_kernels(probed(known=False))
    assert not any("high" in row for row in rows(output_error_figure([unknown])))
    for given, said in ((kernels, "as bars"), ([unknown], "without intervals")):
        [figure] = measured_figures(given, {"output_error": ("name", "")}, "setting.")
        assert said in figure.caption and "Maurey" not in figure.caption


def test_only_the_bound_is_dashed(measured):
    chart = output_error_figure(measured[:1]).to_dict()
    dashed = {
        row["series"]
        for layer in chart["concat"][0]["layer"]
        if "strokeDash" in layer["mark"]
        for row in chart["datasets"][layer["data"]["name"]]
    }
    assert dashed == {BOUND}


def test_matching_keys_draws_the_counts_and_the_diagonal(measured):
    drawn = rows(matching_keys_figure(measured))
    expected = {
        (item.label, match.r): match.keys
        for item in measured
        for match in item.output_error.matching_keys
        if match.layer is None
    }
    found = {(row["series"], row["r"]): row["needed"] for row in drawn if "series" in row}
    assert all(row["low"] < row["needed"] < row["high"] for row in drawn if "series" in row)
    assert found == expected
    assert all(row["text"] == str(row["needed"]) for row in drawn if "series" in row)
    assert [(row["r"], row["needed"]) for row in drawn if "series" not in row] == [(1, 1), (32, 32)]


def test_labels_of_one_size_keep_their_distance(measured):
    drawn = [row for row in rows(matching_keys_figure(measured)) if "series" in row]
    for r in (1, 2, 4, 8, 16, 32):
        places = sorted(row["label_at"] for row in drawn if row["r"] == r)
        assert len(places) == 4
        assert all(b / a >= LABEL_GAP * 0.999 for a, b in pairwise(places))
    assert all(row["label_at"] <= row["needed"] for row in drawn)


def test_the_gap_is_the_ratio_of_the_two_errors_against_effective_keys(measured):
    frame = gap_rows(measured[:1])
    cells = measured[0].attention.skewness_gap.cells
    assert len(frame) == len(cells) == 4 * 5
    for row, cell in zip(frame.to_dict("records"), cells, strict=True):
        assert row["gap"] == pytest.approx(cell.oblivious["4"] / cell.aware["4"])
        assert row["share"] == pytest.approx(100 * cell.effective_keys / 256)
        assert row["series"] == ("own kernel" if cell.own else f"degree {cell.degree}")


def test_an_error_of_zero_keeps_the_gap_finite(results):
    exact = with_gaps(results, lambda cell: replace(cell, aware={"4": 0.0}))
    frame = gap_rows(exact[:1])
    cells = exact[0].attention.skewness_gap.cells
    expected = [cell.oblivious["4"] / FLOOR for cell in cells]
    assert frame["gap"].tolist() == pytest.approx(expected)


def test_skewness_has_the_own_kernels_first_and_a_panel_a_model(measured):
    titles = [p["title"] for p in skewness_figure(measured).to_dict()["concat"]]
    assert titles[0] == "every model, own kernel"
    assert titles[1:] == [item.label for item in measured]
    alone = skewness_figure(measured[:1]).to_dict()["concat"]
    assert [panel["title"] for panel in alone] == ["causal, exponential"]


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


@pytest.mark.parametrize("draw", DRAW)
def test_nothing_measured_draws_a_sentence(draw):
    (row,) = rows(draw([]))
    assert "not measured" in row["message"] or "were not" in row["message"]


def test_a_record_may_lack_the_skewness_gap(results):
    records = [with_attention(r, skewness_gap=None) for r in results.records if r.attention]
    some = of_models(Results.of(records))
    assert len(rows(output_error_figure(some))) > 20
    assert "message" in rows(skewness_figure(some))[0] and gap_rows(some).empty
