"""Tables and figures of the paper hold our records' numbers beside the published ones."""

import math
from dataclasses import replace

import pytest
from drawn import rows
from synthetic import UNKNOWN, with_cells

from value_aware_study.report.exhibits import layers
from value_aware_study.report.exhibits.paper_figures import figure_1, figure_2, figure_3
from value_aware_study.report.exhibits.paper_tables import (
    table_1,
    table_2,
    table_3,
    table_4,
)
from value_aware_study.report.published import TABLE_1, TABLE_3, TABLE_4_LONG
from value_aware_study.report.results import Results
from value_aware_study.report.words import (
    DASH,
    interval,
    number,
    setting_value,
    signed,
    times,
    tokens_count,
    with_interval,
)


def cell_of(results, model, approximation, **parameters):
    (cell,) = (
        cell
        for cell in results.models(model)[0].cells
        if cell.approximation == approximation and cell.parameters == parameters
    )
    return cell


def numbers(exhibit, whose="ours"):
    data = exhibit.table.data
    return data[data["whose"] == whose]


def test_table_1_has_our_cell_beside_the_papers(results):
    shown = table_1(results).table.data.set_index("method")
    cell = cell_of(results, "masked_long", "optimal_v_oblivious", r=65)
    row = shown.loc["OVO 65"]
    assert row["paper"] == 43.5 and shown.index.is_unique
    for name in ("value", "low", "high", "difference", "difference_low", "count"):
        assert row[name] == getattr(cell, name)


def test_table_2_has_perplexities_intervals_and_ratios(results):
    shown = table_2(results).table.data.set_index(["kernel", "column"])
    exact = cell_of(results, "causal_elu", "exact").value
    cell = cell_of(results, "causal_elu", "optimal_v_aware", r=1)
    row = shown.loc[("elu", "OVA-1")]
    assert (row["value"], row["low"], row["high"]) == (cell.value, cell.low, cell.high)
    assert row["ratio"] == pytest.approx(cell.value / exact)
    assert row["paper_ratio"] == pytest.approx(837.4 / 35.3)


def test_what_was_not_evaluated_is_a_dash_and_named(records):
    def few(cell):
        return cell if cell.parameters.get("r", 0) <= 32 else None

    cut = [with_cells(record, few) for record in records if record.kernel != "polynomial"]
    shown = table_2(Results.of(cut))
    ours = shown.table.display.set_index(["kernel", "attention"])["ours (× exact)"]
    assert set(ours["polynomial (deg 2)"]) == {ours["elu", "OVO-65"]} == {DASH}
    assert shown.notes[-1] == "Not evaluated yet: causal_polynomial."
    empty = Results.of([])
    for exhibit in (table_1, table_2, figure_1, figure_2, figure_3, layers.skewness):
        assert exhibit(empty) is None


def test_an_interval_of_one_unit_is_a_dash(records):
    one = [with_cells(record, lambda cell: replace(cell, **UNKNOWN)) for record in records]
    single = Results.of(one)
    assert set(table_1(single).table.display["95% interval of ours"]) == {DASH}
    assert "nan" not in table_2(single).table.markdown()


def test_table_3_says_how_much_of_the_evaluation_text_is_copied():
    parts = {"documents": 1, "tokens": 10, "words": 200}
    sources = {
        name: {"train": {"tokens": 90}, "evaluation": parts | {"copied_words": copied}}
        for name, copied in (("a", 3), ("b", 1))
    }
    shown = table_3({"sources": sources})
    copied = shown.table.display.set_index("corpus")["copied words, %"]
    assert copied[["a", "b", "PG19 (Rae et al., 2020)"]].tolist() == ["1.5", "0.5", DASH]
    assert "1.0% in all" in shown.notes[0]


def test_the_papers_numbers_agree_and_disagree_as_its_notes_say():
    assert sum(training for _, _, training, _ in TABLE_3) == pytest.approx(10e6 * 510)
    assert all(held == 2000 * 510 for *_, held in TABLE_3)
    instances = TABLE_4_LONG["steps"] * TABLE_4_LONG["batch_size"] / TABLE_4_LONG["epochs"]
    assert instances == 9_904_000 and "9.904M" in table_4({})[0].notes[0]


def test_figure_1_draws_changes_from_exact_once_and_the_papers_values(results):
    shown = figure_1(results)
    ours = numbers(shown)
    assert not ours.duplicated(["series", "r", "features"]).any() and len(ours) == 3 * 11 + 15 + 8
    drawn = rows(*shown.charts)
    assert len([row for row in drawn if row.get("low") is not None]) == len(ours)
    theirs = numbers(shown, "paper").set_index(["series", "r"])["value"]
    assert theirs["OVO", 65.0] == pytest.approx(43.5 - TABLE_1[0].error) and len(theirs) == 7
    hollow = [row["value"] for row in drawn if "points" not in row and "series" in row]
    assert sorted(hollow) == pytest.approx(sorted(theirs))


def test_figure_3_draws_the_curves_as_recorded(records, training):
    drawn = rows(*figure_3(Results.of(records, training)).charts)
    curve = {(r["count"], r["value"]) for r in drawn if r["series"] == "long, 512 tokens"}
    assert curve == {(p["step"], p["error"]) for p in training["masked_long"]["curve"]}
    assert len({r["series"] for r in drawn}) == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(6700.21), "6,700.2"),
        (number(math.nan), DASH),
        (number(3.21e18), "3.21e+18"),
        (signed(-0.04), "0.0"),
        (signed(-1.26), "−1.3"),
        (interval(1.0, math.nan), DASH),
        (with_interval(69, 65, 76, 0), "69 (65 to 76)"),
        (with_interval(69, None, None, 0), "69"),
        (times(1.097), "× 1.10"),
        (times(195.9), "× 196"),
        (setting_value(True), "y"),
        (setting_value(5e-6), "5e-6"),
        (tokens_count(1.53e9), "1.53B"),
        (tokens_count(999), "999"),
    ],
)
def test_numbers_as_text(text, expected):
    assert text == expected
