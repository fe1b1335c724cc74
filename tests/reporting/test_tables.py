import copy
import io
import math

import pandas as pd
import pytest

from value_aware_study.reporting.page import headline
from value_aware_study.reporting.published import TABLE_1, TABLE_2
from value_aware_study.reporting.records import model_named
from value_aware_study.reporting.table import DASH, interval, number, signed, times
from value_aware_study.reporting.tables import (
    ALONE,
    BOTH_NEIGHBOURS,
    skewness_table,
    table_1,
    table_2,
)


def cell_of(records, model, approximation, **parameters):
    (cell,) = (
        cell
        for cell in model_named(records, model)["cells"]
        if cell["approximation"] == approximation and cell["parameters"] == parameters
    )
    return cell


def without(records, *models):
    return [record for record in records if record["model"] not in models]


def test_table_1_has_our_cell_beside_the_papers(records):
    rows = table_1(records).data.set_index("method")
    cell = cell_of(records, "masked_long", "optimal_v_oblivious", r=65)
    row = rows.loc["OVO 65"]
    assert row["paper"] == 43.5
    for name in ("value", "low", "high", "difference", "difference_low", "count"):
        assert row[name] == cell[name]
    assert rows.loc["short model, exact", "paper"] == 26.6
    assert rows.loc["short model, exact", "value"] == 49.0


def test_table_1_sets_the_papers_orf_beside_orf_as_written(records):
    rows = table_1(records).data.set_index("method")
    assert rows.loc["ORF 256 features, as written", "paper"] == 89.79
    assert math.isnan(rows.loc["ORF 256 features, Performer scaling", "paper"])
    assert rows["paper"].notna().sum() == len(TABLE_1) + 1
    assert rows.index.is_unique


def test_table_2_has_perplexities_intervals_and_ratios(records):
    rows = table_2(records).data.set_index(["kernel", "column"])
    exact = cell_of(records, "causal_elu", "exact")["value"]
    cell = cell_of(records, "causal_elu", "optimal_v_aware", r=1)
    row = rows.loc[("elu", "OVA-1")]
    assert (row["value"], row["low"], row["high"]) == (cell["value"], cell["low"], cell["high"])
    assert row["ratio"] == pytest.approx(cell["value"] / exact)
    assert row["paper_ratio"] == pytest.approx(837.4 / 35.3)
    assert rows["paper"].dropna().tolist() == [x for row in TABLE_2.values() for x in row]


def with_counts(records):
    """The records with SYNTHETIC count models, and the short model on the long one's text."""
    given = copy.deepcopy(records)
    ends = {"low": 80.0, "high": 99.0, "difference": -1.0, "difference_low": -2.0}
    entry = ends | {"difference_high": 0.0, "count": 5000, "tokens": 7}
    entry |= {"unit_totals": [1.0, 2.0], "unit_counts": [2500, 2500]}
    for record in given:
        causal = record["task"] == "causal"
        names = ("unigram", "bigram" if causal else "both_neighbours")
        record["count_models"] = {name: {"value": 90.0, **entry} for name in names}
    model_named(given, "masked_short")["longer_text"] = {"value": 47.5, **entry}
    return given


def test_what_needs_no_attention_stands_beside_it(records):
    given = with_counts(records)
    first = table_1(given)
    rows, shown = first.data.set_index("method"), first.display.set_index("method")
    assert rows.loc[BOTH_NEIGHBOURS, "value"] == rows.loc["most frequent token", "value"] == 90
    assert shown.loc[BOTH_NEIGHBOURS, "95% interval"] == "80.0 to 99.0"
    assert math.isnan(rows.loc["left neighbour, counts", "value"])
    alone = cell_of(records, "masked_long", "sliding_window", r=1)
    assert rows.loc[ALONE, "value"] == alone["value"]
    assert rows.loc["short model, exact, same text", "value"] == 47.5
    second = table_2(given)
    rows = second.data.set_index(["kernel", "column"])
    exact = cell_of(records, "causal_elu", "exact")["value"]
    assert rows.loc[("elu", "bigram"), "ratio"] == pytest.approx(90 / exact)
    shown = second.display.set_index(["kernel", "perplexity"])
    assert shown.loc[("elu", "95% interval"), "bigram"] == "80.0 to 99.0"
    assert shown.loc[("elu", "paper"), "bigram"] == DASH
    assert shown.loc[("elu", "ours"), "bigram, tokens read"] == DASH
    assert "90.0" in headline(given)


def test_a_missing_kernel_is_a_row_of_dashes(records):
    display = table_2(without(records, "causal_polynomial")).display
    lines = display[display["kernel"] == "polynomial (deg 2)"].set_index("perplexity")
    assert set(lines.loc["ours", ["exact", "OVO-1", "OVA-65"]]) == {DASH}
    assert lines.loc["paper", "OVO-1"] == "6,700.2"


def test_a_budget_above_the_length_is_a_dash(records):
    cut = copy.deepcopy(records)
    for record in cut:
        record["cells"] = [c for c in record["cells"] if c["parameters"].get("r", 0) <= 32]
    table = table_1(cut)
    assert table.display.set_index("method").loc["OVO 65", "ours, error %"] == DASH
    assert set(table_2(cut).display.iloc[0][["OVO-65", "OVA-65"]]) == {DASH}


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_an_interval_of_one_unit_is_a_dash(records, unknown):
    single = copy.deepcopy(records)
    for record in single:
        for cell in record["cells"]:
            ends = ("low", "high", "difference_low", "difference_high")
            cell.update(dict.fromkeys(ends, unknown))
    assert set(table_1(single).display["95% interval"]) == {DASH}
    assert "nan" not in table_2(single).markdown()


def test_captions_say_what_it_was_measured_on(records):
    for table in (table_1(records), table_2(records), skewness_table(records)):
        assert "synthetic scale" in table.caption
        assert "synthetic test records" in table.caption and "no hardware" in table.caption
    for table in (table_1(records), table_2(records)):
        assert "5,000" in table.caption and "in 90" in table.caption


def test_skewness_has_every_kernel_and_layer(records):
    table = skewness_table(records)
    pairs = {(row["model"], row["layer"]) for row in table.data.to_dict("records")}
    assert pairs == {(record["model"], layer) for record in records for layer in range(2)}
    assert table.display.iloc[0]["queries with a weight over 1/2, %"] == "25.0"


def test_csv_reads_back_and_markdown_is_rectangular(records):
    table = table_1(records)
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
