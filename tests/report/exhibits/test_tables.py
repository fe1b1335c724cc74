import io
import math
from dataclasses import replace

import pandas as pd
import pytest
from synthetic import UNKNOWN, ends, with_cells

from value_aware_attention.measurement.record import Baseline
from value_aware_study.report.exhibits import skewness, table_1, table_2
from value_aware_study.report.exhibits.table_1 import ALONE, BOTH_NEIGHBOURS
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
    rows = table_1.exhibit(results).table.data.set_index("method")
    cell = cell_of(results, "masked_long", "optimal_v_oblivious", r=65)
    row = rows.loc["OVO 65"]
    assert row["paper"] == 43.5
    for name in ("value", "low", "high", "difference", "difference_low", "count"):
        assert row[name] == getattr(cell, name)
    assert rows.loc["short model, exact", "paper"] == 26.6
    assert rows.loc["short model, exact", "value"] == 49.0


def test_table_1_sets_the_papers_orf_beside_orf_as_written(results):
    rows = table_1.exhibit(results).table.data.set_index("method")
    assert rows.loc["ORF 256 features, as written", "paper"] == 89.79
    assert math.isnan(rows.loc["ORF 256 features, Performer scaling", "paper"])
    assert rows["paper"].notna().sum() == len(TABLE_1) + 1
    assert rows.index.is_unique


def test_table_2_has_perplexities_intervals_and_ratios(results):
    rows = table_2.exhibit(results).table.data.set_index(["kernel", "column"])
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
    first = table_1.exhibit(given).table
    rows, shown = first.data.set_index("method"), first.display.set_index("method")
    assert rows.loc[BOTH_NEIGHBOURS, "value"] == rows.loc["most frequent token", "value"] == 90
    assert shown.loc[BOTH_NEIGHBOURS, "95% interval of ours"] == "80.0 to 99.0"
    assert math.isnan(rows.loc["left neighbour, counts", "value"])
    alone = cell_of(given, "masked_long", "sliding_window", r=1)
    assert rows.loc[ALONE, "value"] == alone.value
    assert rows.loc["short model, exact, same text", "value"] == 47.5
    second = table_2.exhibit(given).table
    rows = second.data.set_index(["kernel", "column"])
    exact = cell_of(given, "causal_elu", "exact").value
    assert rows.loc[("elu", "bigram"), "ratio"] == pytest.approx(90 / exact)
    shown = second.display.set_index(["kernel", "attention"])
    assert shown.loc[("elu", "bigram"), "95% interval of ours"] == "80.0 to 99.0"
    assert shown.loc[("elu", "bigram"), "paper (× exact)"] == DASH
    assert shown.loc[("elu", "bigram, tokens read"), "ours (× exact)"] == DASH


def test_ours_and_the_papers_are_pairs_of_a_value_and_its_ratio_to_exact(results):
    shown = table_2.exhibit(results).table.display.set_index(["kernel", "attention"])
    cell = cell_of(results, "causal_elu", "optimal_v_aware", r=1)
    exact = cell_of(results, "causal_elu", "exact").value
    ours = f"{number(cell.value)} ({times(cell.value / exact)})"
    assert shown.loc[("elu", "OVA-1"), "ours (× exact)"] == ours
    assert shown.loc[("elu", "OVA-1"), "paper (× exact)"] == "837.4 (× 23.7)"
    assert shown.loc[("elu", "exact"), "paper (× exact)"] == "35.3 (× 1.00)"
    first = table_1.exhibit(results).table.display.set_index("method")
    assert first.loc["OVO 65", "paper (× exact)"] == "43.5 (× 1.80)"


def test_a_missing_kernel_is_dashes_and_named(records):
    rest = [record for record in records if record.model != "causal_polynomial"]
    shown = table_2.exhibit(Results.of(rest))
    lines = shown.table.display.set_index(["kernel", "attention"]).loc["polynomial (deg 2)"]
    assert set(lines["ours (× exact)"]) == {DASH}
    assert lines.loc["OVO-1", "paper (× exact)"] == "6,700.2 (× 196)"
    assert shown.notes[-1] == "Not evaluated yet: causal_polynomial."


def test_a_budget_above_the_length_is_a_dash(records):
    few = [
        with_cells(record, lambda cell: cell if cell.parameters.get("r", 0) <= 32 else None)
        for record in records
    ]
    cut = Results.of(few)
    table = table_1.exhibit(cut).table
    assert table.display.set_index("method").loc["OVO 65", "ours (× exact)"] == DASH
    lines = table_2.exhibit(cut).table.display.set_index("attention")
    assert set(lines.loc[["OVO-65", "OVA-65"], "ours (× exact)"]) == {DASH}


def test_an_interval_of_one_unit_is_a_dash(records):
    one = [with_cells(record, lambda cell: replace(cell, **UNKNOWN)) for record in records]
    single = Results.of(one)
    assert set(table_1.exhibit(single).table.display["95% interval of ours"]) == {DASH}
    assert "nan" not in table_2.exhibit(single).table.markdown()


def test_skewness_has_every_kernel_and_layer(results):
    table = skewness.exhibit(results).table
    pairs = {(row["model"], row["layer"]) for row in table.data.to_dict("records")}
    models = [record.model for record in results.records if record.attention]
    assert len(models) == 4
    assert pairs == {(model, layer) for model in models for layer in range(2)}
    assert table.display.iloc[0]["queries with a weight over 1/2, %"] == "25.0"


def test_without_models_there_is_no_table(results):
    empty = Results.of([])
    assert table_1.exhibit(empty) is table_2.exhibit(empty) is skewness.exhibit(empty) is None


def test_csv_reads_back_and_markdown_is_rectangular(results):
    table = table_1.exhibit(results).table
    back = pd.read_csv(io.StringIO(table.csv()))
    assert back["value"].tolist() == pytest.approx(table.data["value"].tolist(), nan_ok=True)
    lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == len(table.display) + 2


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
