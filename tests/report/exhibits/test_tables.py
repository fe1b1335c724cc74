import io
import math
from dataclasses import replace

import pandas as pd
import pytest
from synthetic import UNKNOWN, ends, with_cells
from value_aware_study.reporting.page import headline
from value_aware_study.reporting.tables import (
    ALONE,
    BOTH_NEIGHBOURS,
    skewness_table,
    table_1,
    table_2,
)

from value_aware_attention.measurement.record import Baseline
from value_aware_study.report.formatting import DASH, interval, number, signed, times
from value_aware_study.report.published import TABLE_1, TABLE_2
from value_aware_study.report.results import Results


def cell_of(results, model, approximation, **parameters):
    (cell,) = (
        cell
        for cell in results.models(model)[0].cells
        if cell.approximation == approximation and cell.parameters == parameters
    )
    return cell


def test_table_1_has_our_cell_beside_the_papers(results):
    rows = table_1(results).data.set_index("method")
    cell = cell_of(results, "masked_long", "optimal_v_oblivious", r=65)
    row = rows.loc["OVO 65"]
    assert row["paper"] == 43.5
    for name in ("value", "low", "high", "difference", "difference_low", "count"):
        assert row[name] == getattr(cell, name)
    assert rows.loc["short model, exact", "paper"] == 26.6
    assert rows.loc["short model, exact", "value"] == 49.0


def test_table_1_sets_the_papers_orf_beside_orf_as_written(results):
    rows = table_1(results).data.set_index("method")
    assert rows.loc["ORF 256 features, as written", "paper"] == 89.79
    assert math.isnan(rows.loc["ORF 256 features, Performer scaling", "paper"])
    assert rows["paper"].notna().sum() == len(TABLE_1) + 1
    assert rows.index.is_unique


def test_table_2_has_perplexities_intervals_and_ratios(results):
    rows = table_2(results).data.set_index(["kernel", "column"])
    exact = cell_of(results, "causal_elu", "exact").value
    cell = cell_of(results, "causal_elu", "optimal_v_aware", r=1)
    row = rows.loc[("elu", "OVA-1")]
    assert (row["value"], row["low"], row["high"]) == (cell.value, cell.low, cell.high)
    assert row["ratio"] == pytest.approx(cell.value / exact)
    assert row["paper_ratio"] == pytest.approx(837.4 / 35.3)
    assert rows["paper"].dropna().tolist() == [x for row in TABLE_2.values() for x in row]


def with_counts(records):
    """The records with SYNTHETIC count models, and the short model on the long one's text."""
    counted = Baseline(**ends(90.0, 91.0, 80.0, 99.0), tokens=7)
    longer = Baseline(**ends(47.5, 48.5, 80.0, 99.0), length=512)
    given = []
    for record in records:
        name = "bigram" if record.task == "causal" else "both_neighbours"
        beside = {"unigram": counted, name: counted}
        beside |= {"longer_text": longer} if record.model == "masked_short" else {}
        given.append(replace(record, baselines=beside))
    return given


def test_what_needs_no_attention_stands_beside_it(records):
    given = Results.of(with_counts(records))
    first = table_1(given)
    rows, shown = first.data.set_index("method"), first.display.set_index("method")
    assert rows.loc[BOTH_NEIGHBOURS, "value"] == rows.loc["most frequent token", "value"] == 90
    assert shown.loc[BOTH_NEIGHBOURS, "95% interval"] == "80.0 to 99.0"
    assert math.isnan(rows.loc["left neighbour, counts", "value"])
    alone = cell_of(given, "masked_long", "sliding_window", r=1)
    assert rows.loc[ALONE, "value"] == alone.value
    assert rows.loc["short model, exact, same text", "value"] == 47.5
    second = table_2(given)
    rows = second.data.set_index(["kernel", "column"])
    exact = cell_of(given, "causal_elu", "exact").value
    assert rows.loc[("elu", "bigram"), "ratio"] == pytest.approx(90 / exact)
    shown = second.display.set_index(["kernel", "perplexity"])
    assert shown.loc[("elu", "95% interval"), "bigram"] == "80.0 to 99.0"
    assert shown.loc[("elu", "paper"), "bigram"] == DASH
    assert shown.loc[("elu", "ours"), "bigram, tokens read"] == DASH
    assert "90.0" in headline(given.records)


def test_a_missing_kernel_is_a_row_of_dashes(records):
    rest = [record for record in records if record.model != "causal_polynomial"]
    display = table_2(Results.of(rest)).display
    lines = display[display["kernel"] == "polynomial (deg 2)"].set_index("perplexity")
    assert set(lines.loc["ours", ["exact", "OVO-1", "OVA-65"]]) == {DASH}
    assert lines.loc["paper", "OVO-1"] == "6,700.2"


def test_a_budget_above_the_length_is_a_dash(records):
    few = [
        with_cells(record, lambda cell: cell if cell.parameters.get("r", 0) <= 32 else None)
        for record in records
    ]
    cut = Results.of(few)
    table = table_1(cut)
    assert table.display.set_index("method").loc["OVO 65", "ours, error %"] == DASH
    assert set(table_2(cut).display.iloc[0][["OVO-65", "OVA-65"]]) == {DASH}


def test_an_interval_of_one_unit_is_a_dash(records):
    one = [with_cells(record, lambda cell: replace(cell, **UNKNOWN)) for record in records]
    single = Results.of(one)
    assert set(table_1(single).display["95% interval"]) == {DASH}
    assert "nan" not in table_2(single).markdown()


def test_captions_say_what_it_was_measured_on(results):
    for table in (table_1(results), table_2(results), skewness_table(results)):
        assert "synthetic scale" in table.caption
        assert "synthetic test records" in table.caption and "no hardware" in table.caption
    for table in (table_1(results), table_2(results)):
        assert "5,000" in table.caption and "in 90" in table.caption


def test_skewness_has_every_kernel_and_layer(results):
    table = skewness_table(results)
    pairs = {(row["model"], row["layer"]) for row in table.data.to_dict("records")}
    models = [record.model for record in results.records if record.attention]
    assert len(models) == 4
    assert pairs == {(model, layer) for model in models for layer in range(2)}
    assert table.display.iloc[0]["queries with a weight over 1/2, %"] == "25.0"


def test_csv_reads_back_and_markdown_is_rectangular(results):
    table = table_1(results)
    back = pd.read_csv(io.StringIO(table.csv()))
    assert back["value"].tolist() == pytest.approx(table.data["value"].tolist(), nan_ok=True)
    lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == len(table.display) + 2


def test_headline_has_both_tables_and_survives_missing_models(records):
    text = headline(records)
    assert "1,031.1" in text and "OVA 65" in text and "as written" in text
    assert DASH in headline(records[:1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(6700.21), "6,700.2"),
        (number(None), DASH),
        (number(math.nan), DASH),
        (number(3.21e18), "3.21e+18"),
        (signed(-0.04), "0.0"),
        (signed(-1.26), "−1.3"),
        (signed(19.3), "+19.3"),
        (interval(1.0, math.nan), DASH),
        (times(1.097), "× 1.10"),
        (times(195.9), "× 196"),
    ],
)
def test_numbers_as_text(text, expected):
    assert text == expected
