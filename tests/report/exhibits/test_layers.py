"""Figures of the output error, matching keys and skewness draw the measured numbers."""

from dataclasses import replace

import pytest
from drawn import rows
from synthetic import probed, with_attention

from value_aware_study.report.exhibits import layers
from value_aware_study.report.exhibits.layers import BOUND_LABEL
from value_aware_study.report.measured import (
    FLOOR,
    ORACLES,
    gap_findings,
    gap_rows,
    of_kernels,
    of_models,
)
from value_aware_study.report.results import Results


def with_gaps(results, change):
    """Changes every cell of the skewness gap of every model."""
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


def test_the_output_error_has_a_panel_a_model_and_every_method(measured):
    shown = errors(measured)
    titles = [panel.to_dict()["title"] for panel in shown.charts]
    assert titles == list(shown.choices) == [item.label for item in measured] and len(titles) == 4
    drawn = {row["series"] for row in rows(shown.charts[0]) if "series" in row}
    assert drawn >= {*ORACLES.values(), BOUND_LABEL, "CAOTE"} and len(drawn) == 8


def test_no_error_is_drawn_below_the_floor(measured):
    drawn = [
        row["value"] for panel in errors(measured).charts for row in rows(panel) if "value" in row
    ]
    assert min(drawn) == FLOOR


def test_kernels_put_in_post_hoc_have_panels_and_known_intervals_bars():
    kernels = of_kernels(probed(("exponential", "elu")))
    titles = [panel.to_dict()["title"] for panel in errors(kernels).charts]
    assert titles == ["exponential, its own", "elu, post hoc"]
    shown = errors(kernels[:1])
    bars = [row for row in rows(shown.charts[0]) if row.get("high") is not None]
    assert {(row["series"], row["count"]) for row in bars} == {
        (series, r) for series in ORACLES.values() for r in (1, 2, 4, 8, 9)
    }
    assert all(row["value"] < row["high"] for row in bars)
    assert not any("Maurey" in note for note in shown.notes)
    [unknown] = of_kernels(probed(known=False))
    assert not any("high" in row for row in rows(errors([unknown]).charts[0]))


def test_matching_keys_draws_the_counts_and_the_diagonal(measured):
    drawn = rows(*layers.figure_7(measured).charts)
    expected = {
        (item.label, match.r): match.keys
        for item in measured
        for match in item.output_error.matching_keys
        if match.layer is None
    }
    of_series = [row for row in drawn if "series" in row]
    assert {(row["series"], row["count"]): row["value"] for row in of_series} == expected
    assert all(row["low"] < row["value"] < row["high"] for row in of_series)
    ends = [(row["count"], row["value"]) for row in drawn if "series" not in row]
    assert (1, 1) in ends and (32, 32) in ends


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


def test_skewness_has_every_layer_by_degree_and_the_mean_of_a_model(measured):
    shown = layers.figure_8(measured)
    drawn, table = rows(*shown.charts), shown.table.data
    kernels = {row["kernel"] for row in drawn}
    assert kernels == {"degree 0", "degree 2", "degree 4", "degree 6", "own kernel"}
    of_degree = table[(table["model"] == "causal, elu") & (table["series"] == "degree 4")]["gap"]
    mean = of_degree.prod() ** (1 / len(of_degree))
    assert len(of_degree) == 4 and shown.folded
    found = [r["gap"] for r in drawn if (r["series"], r["kernel"]) == ("causal, elu", "degree 4")]
    assert any(value == pytest.approx(mean) for value in found)
    assert set(of_degree) <= set(found)


def test_findings_are_computed_from_the_points(results):
    turned = with_gaps(
        results, lambda cell: replace(cell, oblivious=cell.aware, aware=cell.oblivious)
    )
    text = gap_findings(turned)
    assert "−1.00 over the own kernels" in text and "0 of 14 layers" in text
    assert gap_findings([]) == ""


def test_what_was_not_measured_has_no_figure(results):
    assert errors([]) is layers.figure_7([]) is layers.figure_8([]) is None
    records = [with_attention(r, skewness_gap=None) for r in results.records if r.attention]
    some = of_models(Results.of(records))
    assert errors(some) and layers.figure_8(some) is None and gap_rows(some).empty
