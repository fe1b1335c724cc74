import copy
from itertools import pairwise

import pytest

from value_aware_study.reporting.measurements import (
    keys_needed,
    of_records,
    sizes_to_compare,
    total_error,
)
from value_aware_study.reporting.output_error_figures import (
    BOUND,
    FLOOR,
    LABEL_GAP,
    curve_labels,
    keys_needed_figure,
    output_error_figure,
)
from value_aware_study.reporting.skewness_figure import (
    gap_findings,
    gap_rows,
    skewness_figure,
)

DRAW = (output_error_figure, keys_needed_figure, skewness_figure)


def rows(chart):
    return [row for data in chart.to_dict()["datasets"].values() for row in data]


def without(records, key):
    return [{k: v for k, v in record.items() if k != key} for record in records]


def first_of(records):
    return [of_records(records)[0]]


def test_the_output_error_has_a_panel_a_model_and_every_method(records):
    chart = output_error_figure(of_records(records)).to_dict()
    titles = [panel["title"] for panel in chart["concat"]]
    assert titles == [item.label for item in of_records(records)][:4]
    drawn = rows(output_error_figure(first_of(records)))
    assert {row["series"] for row in drawn} == set(curve_labels().values())


def test_pooled_and_layer_curves_are_the_measured_ones(records):
    [item] = first_of(records)
    drawn = rows(output_error_figure([item]))
    for method in ("optimal_v_oblivious", "optimal_v_aware"):
        for name, layer in (("pooled", None), ("3", 3)):
            of_layer = {
                row["r"]: row["error"]
                for row in drawn
                if row["series"] == curve_labels()[method] and row["layer"] == name
            }
            expected = total_error(item.output_error, method, layer)
            sizes = item.output_error["methods"][method]["sizes"]
            assert {1, 2, 4, 8, 16, 32, 64, sizes[-1]} <= set(of_layer)
            for r, error in of_layer.items():
                assert error == pytest.approx(max(expected[sizes.index(r)], FLOOR))
    assert {row["layer"] for row in drawn if row["series"] == BOUND} == {"pooled"}


def test_no_error_is_drawn_below_the_floor(records):
    drawn = [row["error"] for row in rows(output_error_figure(of_records(records)))]
    assert min(drawn) == FLOOR


def test_only_the_bound_is_dashed(records):
    chart = output_error_figure(first_of(records)).to_dict()
    dashed = {
        row["series"]
        for layer in chart["concat"][0]["layer"]
        if "strokeDash" in layer["mark"]
        for row in chart["datasets"][layer["data"]["name"]]
    }
    assert dashed == {BOUND}


def test_keys_needed_draws_the_counts_and_the_diagonal(records):
    measured = of_records(records)
    drawn = rows(keys_needed_figure(measured))
    expected = {
        (item.label, r): keys_needed(item.output_error, r)["keys"]
        for item in measured
        if item.output_error
        for r in sizes_to_compare(item.output_error)
    }
    found = {(row["series"], row["r"]): row["needed"] for row in drawn if "series" in row}
    assert all(row["low"] < row["needed"] < row["high"] for row in drawn if "series" in row)
    assert found == expected
    assert all(row["text"] == str(row["needed"]) for row in drawn if "series" in row)
    assert [(row["r"], row["needed"]) for row in drawn if "series" not in row] == [(1, 1), (32, 32)]


def test_labels_of_one_size_keep_their_distance(records):
    drawn = [row for row in rows(keys_needed_figure(of_records(records))) if "series" in row]
    for r in (1, 2, 4, 8, 16, 32):
        places = sorted(row["label_at"] for row in drawn if row["r"] == r)
        assert len(places) == 4
        assert all(b / a >= LABEL_GAP * 0.999 for a, b in pairwise(places))
    assert all(row["label_at"] <= row["needed"] for row in drawn)


def test_the_gap_is_the_ratio_of_the_two_errors_against_effective_keys(records):
    frame = gap_rows(first_of(records))
    cells = records[0]["skewness_gap"]["cells"]
    assert len(frame) == len(cells) == 4 * 5
    for row, cell in zip(frame.to_dict("records"), cells, strict=True):
        assert row["gap"] == pytest.approx(cell["oblivious"]["4"] / cell["aware"]["4"])
        assert row["share"] == pytest.approx(100 * cell["effective_keys"] / 256)
        assert row["series"] == ("own kernel" if cell["own"] else f"degree {cell['degree']}")


def test_an_error_of_zero_keeps_the_gap_finite(records):
    exact = copy.deepcopy(records[:1])
    for cell in exact[0]["skewness_gap"]["cells"]:
        cell["aware"]["4"] = 0.0
    frame = gap_rows(of_records(exact))
    expected = [cell["oblivious"]["4"] / FLOOR for cell in exact[0]["skewness_gap"]["cells"]]
    assert frame["gap"].tolist() == pytest.approx(expected)


def test_skewness_has_the_own_kernels_first_and_a_panel_a_model(records):
    titles = [p["title"] for p in skewness_figure(of_records(records)).to_dict()["concat"]]
    assert titles[0] == "every model, own kernel"
    assert titles[1:] == [item.label for item in of_records(records)][:4]
    alone = skewness_figure(first_of(records)).to_dict()["concat"]
    assert [panel["title"] for panel in alone] == ["causal, exponential"]


def test_findings_are_computed_from_the_points(records):
    text = gap_findings(of_records(records))
    assert "+1.00 over the own kernels" in text and "14 of 14 layers" in text
    assert "100% of the queries" in text
    turned = copy.deepcopy(records)
    for record in turned:
        for cell in record.get("skewness_gap", {}).get("cells", []):
            cell["oblivious"], cell["aware"] = cell["aware"], cell["oblivious"]
    text = gap_findings(of_records(turned))
    assert "−1.00 over the own kernels" in text and "0 of 14 layers" in text
    assert gap_findings([]) == ""


@pytest.mark.parametrize("draw", DRAW)
def test_old_records_draw_a_sentence(draw, records):
    old = without(without(records, "output_error"), "skewness_gap")
    (row,) = rows(draw(of_records(old)))
    assert "not measured" in row["message"] or "were not" in row["message"]


def test_a_record_may_lack_only_one_of_the_two(records):
    some = of_records(without(records, "output_error"))
    assert len(rows(skewness_figure(some))) > 20
    assert "message" in rows(output_error_figure(some))[0]
    assert gap_rows(some)["share"].tolist() == gap_rows(of_records(records))["share"].tolist()
