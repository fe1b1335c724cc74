"""The probe's page from a record: what it says, what it writes, and never a half of it."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from probed import LENGTH, model, tokenizer, words

from value_aware_attention import probe
from value_aware_attention.probe.lines import match
from value_aware_study.reporting import figures
from value_aware_study.reporting.probe import write_probe
from value_aware_study.reporting.probe_figures import (
    heat_map,
    heat_size,
    keys_by_head,
    keys_needed_figure,
)

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {"length": LENGTH, "rows": 4, "search": "fast"}


@pytest.fixture(scope="module")
def record() -> dict:
    """A causal model's with grouped-query attention."""
    report = probe.probe(model("llama"), tokenizer(), words(100), windows=3, name="tiny", **QUICK)
    return report.record


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "save", lambda chart, path: path.touch())


@pytest.mark.usefixtures("undrawn")
def test_tables_hold_the_record(record: dict, tmp_path: Path) -> None:
    write_probe(record, tmp_path)
    heads = pd.read_csv(tmp_path / "heads.csv")
    assert len(heads) == 2 * 2 * 4 * len(record["sizes"])  # methods, layers, heads, sizes
    row = heads[(heads.layer == 1) & (heads["head"] == 2) & (heads.method == "optimal_v_aware")]
    stored = record["by_head"]["optimal_v_aware"]
    np.testing.assert_allclose(row.error, stored["error"][1][2])
    np.testing.assert_allclose(row.high, stored["high"][1][2])
    layers = pd.read_csv(tmp_path / "layers.csv")
    assert len(layers) == len(record["keys_needed"]) and set(layers.layer) == {"all", "0", "1"}
    metric = pd.read_csv(tmp_path / "end_metric_table.csv")
    assert metric.value.tolist() == pytest.approx([c["value"] for c in record["cells"]])
    assert json.loads((tmp_path / "record.json").read_text()) == record


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_was_found_and_how_causal_rows_count(
    record: dict, tmp_path: Path
) -> None:
    write_probe(record, tmp_path)
    page = (tmp_path / "index.html").read_text()
    for text in (record["headline"], "A causal query sees its past alone", "3 of 6 windows"):
        assert text in page
    assert "post hoc" not in page
    write_probe(record | {"post_hoc": True, "causal": False}, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "post hoc" in page and "A causal query" not in page


@pytest.mark.usefixtures("undrawn")
def test_one_window_is_a_page_without_intervals(tmp_path: Path) -> None:
    report = probe.probe(model("bert"), tokenizer(), words(100), windows=1, sizes=[1, 4], **QUICK)
    write_probe(report.record, tmp_path)
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["cells"][1]["low"] is None and written["cells"][1]["value"] is not None


def test_a_failure_leaves_the_folder_as_it_was(
    record: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text("before")
    monkeypatch.setattr(figures, "save", lambda chart, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_probe(record, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == "before"


def rows(chart: object) -> list[dict]:
    return [row for data in chart.to_dict()["datasets"].values() for row in data]


def test_heat_maps_have_a_cell_for_every_layer_and_head(record: dict) -> None:
    at = record["sizes"].index(heat_size(record))
    assert record["sizes"][at] == 4
    for chart in (heat_map(record), keys_by_head(record)):
        cells = {(row["series"], row["layer"], row["head"]): row for row in rows(chart)}
        assert len(cells) == 2 * 2 * 4
    cells = {(row["series"], row["layer"], row["head"]): row for row in rows(heat_map(record))}
    stored = record["by_head"]["optimal_v_oblivious"]["error"][1][3][at]
    assert cells["OVO", 1, 3]["value"] == max(stored, 1e-6)


def test_the_layers_figure_has_every_count(record: dict) -> None:
    drawn = rows(keys_needed_figure(record))
    stored = [row for row in record["keys_needed"] if row["head"] is None]
    counts = {(row["series"], row["place"], row["keys"]) for row in drawn}
    for row in stored:
        series = {"optimal_v_oblivious": "OVO", "optimal_v_aware": "OVA"}[row["method"]]
        place = "all" if row["layer"] is None else str(row["layer"])
        assert (series, place, row["keys"]) in counts


def test_matching_keys_are_the_fewest_with_no_larger_error(record: dict) -> None:
    methods = record["output_error"]["methods"]
    aware, oblivious = (
        np.sum(methods[name]["layers"], axis=0)
        for name in ("optimal_v_aware", "optimal_v_oblivious")
    )
    for r in (1, 2, 4):
        found = match(record, r)["keys"]
        assert (oblivious[: found - 1] > aware[r - 1]).all()
        assert oblivious[found - 1] <= aware[r - 1] or found == LENGTH
        assert match(record, r)["low"] <= found <= match(record, r)["high"]
    assert match(record, 5) is None
