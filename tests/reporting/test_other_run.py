import copy
import math

import pytest

from value_aware_study.reporting import figures, write_report
from value_aware_study.reporting.other_run import compact, described, label, of_another_scale
from value_aware_study.reporting.records import model_named
from value_aware_study.reporting.table import DASH
from value_aware_study.reporting.tables import table_1, table_2


@pytest.fixture(scope="module")
def other(records, training):
    """The same models from a run of another scale, every value 10 lower."""
    changed = copy.deepcopy(records)
    for record in changed:
        record["scale"] = "gpu"
        record["run_on"] = {**record["run_on"], "hardware": "a made-up GPU", "data": "other text"}
        for cell in record["cells"]:
            for name in ("value", "low", "high"):
                cell[name] -= 10
    return [compact(record, training[record["model"]]) for record in changed]


def test_compact_keeps_what_is_shown_and_drops_single_units(records, training):
    record = model_named(records, "masked_long")
    small = compact(record, training["masked_long"])
    assert small["training"]["tokens"] == training["masked_long"]["tokens"]
    assert small["run_on"] == record["run_on"] and len(small["cells"]) == len(record["cells"])
    for cell, before in zip(small["cells"], record["cells"], strict=True):
        units = {"totals", "counts", "squared_errors", "squared_norms"}
        assert set(before) - set(cell) == {f"unit_{name}" for name in units}
        assert all(cell[name] == before[name] for name in cell)
    assert "unit_totals" in record["cells"][0]
    beside = {"value": 1.0, "unit_totals": [1.0], "unit_counts": [1.0]}
    more = {**record, "count_models": {"unigram": beside}, "longer_text": beside}
    small_of_more = compact(more, training["masked_long"])
    assert small_of_more["count_models"] == {"unigram": {"value": 1.0}}
    assert small_of_more["longer_text"] == {"value": 1.0}
    curve = small["output_error"]["methods"]["optimal_v_oblivious"]
    before = record["output_error"]["methods"]["optimal_v_oblivious"]
    assert curve["sizes"] == [*range(1, 66), 128, 256, 512]
    assert [layer[-2] for layer in curve["layers"]] == [layer[255] for layer in before["layers"]]


def test_table_1_has_the_other_runs_error_beside_ours(records, other):
    table = table_1(records, other)
    plain, shown = table_1(records), table.display.set_index("method")
    ours, theirs = "ours, error %", "gpu run, error %"
    for row in ("exact", "OVO 65", "OVA 1", "ORF 256 features, as written", "short model, exact"):
        low = float(shown.loc[row, theirs])
        assert low == pytest.approx(float(shown.loc[row, ours]) - 10, abs=0.11)
    assert shown.loc["LSH r = 512, 16 rounds", theirs] != DASH
    assert shown.loc["exact", "gpu run, 95%"] == DASH != shown.loc["OVO 65", "gpu run, 95%"]
    data = table.data.set_index("method")
    assert data.loc["OVO 65", "other_value"] == data.loc["OVO 65", "value"] - 10
    kept = table.display.drop(columns=[theirs, "gpu run, 95%"])
    assert kept.equals(plain.display)


def test_table_2_has_lines_of_the_other_run(records, other):
    table, plain = table_2(records, other), table_2(records)
    shown = table.display.set_index(["kernel", "perplexity"])
    for kernel in ("exponential", "polynomial (deg 2)", "elu"):
        for column in ("exact", "OVO-1", "OVA-65"):
            ours = float(shown.loc[(kernel, "ours"), column].replace(",", ""))
            theirs = float(shown.loc[(kernel, "gpu run"), column].replace(",", ""))
            assert theirs == pytest.approx(ours - 10, abs=0.11)
        assert shown.loc[(kernel, "gpu run, relative to exact"), "exact"] == "× 1.00"
    rows = table.data
    known = rows[rows["value"].notna()]
    assert (known["other_value"] == known["value"] - 10).all()
    assert rows["other_value"].notna().equals(rows["value"].notna())
    without = table.display[~table.display["perplexity"].str.startswith("gpu run")]
    assert without.reset_index(drop=True).equals(plain.display)


def test_captions_say_where_the_other_run_comes_from(records, other):
    for table in (table_1(records, other), table_2(records, other)):
        for words in ("gpu run: gpu scale; data: other text; hardware: a made-up GPU", "8.19M"):
            assert words in table.caption
    assert "masked_long 2,000 steps" in table_1(records, other).caption
    assert "masked_long" not in table_2(records, other).caption
    assert label(other) == "gpu run" and described([]) == ""


def test_a_model_the_other_run_lacks_is_dashes_and_no_masked_model_no_columns(records, other):
    causal = [record for record in other if record["model"] == "causal_elu"]
    assert table_1(records, causal).display.equals(table_1(records).display)
    shown = table_2(records, causal).display.set_index(["kernel", "perplexity"])
    assert shown.loc[("exponential", "gpu run"), "exact"] == DASH
    assert shown.loc[("elu", "gpu run"), "exact"] != DASH


def test_a_run_of_the_reports_own_scale_is_not_shown_twice(records, other):
    assert of_another_scale(other, records) == of_another_scale(reversed(other), records) != []
    assert of_another_scale(records, records) == []


def test_figure_2_has_a_panel_for_the_other_run(records, other):
    one, two = (figures.figure_2(records, o).to_dict() for o in ([], other))
    assert one == figures.figure_2(records).to_dict() and "hconcat" not in one
    assert [panel["title"] for panel in two["hconcat"]] == ["(a) ours", "(b) gpu run"]
    drawn = [row["loss"] for rows in two["datasets"].values() for row in rows if "loss" in row]
    for given in (records, other):
        exact = model_named(given, "causal_elu")["cells"][0]["value"]
        assert any(abs(math.exp(loss) - exact) < 1e-6 * exact for loss in drawn)
    masked = [record for record in other if record["task"] == "masked"]
    assert figures.figure_2(records, masked).to_dict() == one


def test_the_page_names_the_other_run_unless_it_is_of_the_same_scale(
    records, other, training, tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr(figures, "save", lambda chart, path: path.write_bytes(b""))
    for name, given in (("same", records), ("other", other)):
        write_report(records, training, tokens, tmp_path / name, given)
    texts = {path.name: (path / "index.html").read_text() for path in tmp_path.iterdir()}
    assert "made-up GPU" not in texts["same"] and "gpu run" not in texts["same"]
    for name in ("table_1", "table_2"):
        assert "gpu run" in (tmp_path / "other" / f"{name}.md").read_text()
        assert "gpu run" not in (tmp_path / "same" / f"{name}.md").read_text()
    facts = texts["other"].partition("What was run")[2].partition("</section>")[0]
    assert facts.count("a made-up GPU") == len(other)
