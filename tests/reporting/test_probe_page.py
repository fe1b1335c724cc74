"""The probe's page from a record: what it says, what it writes, and never a half of it."""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from synthetic import AWARE, OBLIVIOUS, gap_cell, probed, with_attention

from value_aware_attention.measurement.record import Record, SkewnessGap
from value_aware_study.report.measurements import sentence
from value_aware_study.reporting import figures
from value_aware_study.reporting.probe import write_probe
from value_aware_study.reporting.probe_figures import (
    heat_map,
    heat_size,
    keys_by_head,
    keys_needed_figure,
)

HEADLINE = "On <tiny>, 4 value-aware keys match 8."


@pytest.fixture(scope="module")
def record() -> Record:
    return probed()


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("value_aware_study.reporting.probe.headline", lambda record: HEADLINE)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "save", lambda chart, path: path.touch())


@pytest.mark.usefixtures("undrawn")
def test_tables_hold_the_record(record: Record, tmp_path: Path) -> None:
    write_probe(record, tmp_path)
    heads = pd.read_csv(tmp_path / "heads.csv")
    errors = record.attention[0].output_error
    assert len(heads) == 2 * 2 * 4 * 5  # methods, layers, heads, sizes
    row = heads[(heads.layer == 1) & (heads["head"] == 2) & (heads.method == AWARE)]
    stored = [at for at in errors.errors if (at.layer, at.head, at.method) == (1, 2, AWARE)]
    assert row.error.tolist() == pytest.approx([at.error for at in stored])
    assert row.high.tolist() == pytest.approx([at.high for at in stored])
    layers = pd.read_csv(tmp_path / "layers.csv")
    assert len(layers) == len(errors.keys_needed) and set(layers.layer) == {"all", "0", "1"}
    metric = pd.read_csv(tmp_path / "end_metric_table.csv")
    assert metric.value.tolist() == pytest.approx([cell.value for cell in record.cells])
    matching = pd.read_csv(tmp_path / "matching_keys.csv")
    assert matching.keys_needed.tolist() == [match.keys for match in errors.matching_keys]
    assert Record.from_json((tmp_path / "record.json").read_text()) == record


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_was_found_and_how_causal_rows_count(
    record: Record, tmp_path: Path
) -> None:
    write_probe(record, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<strong>On &lt;tiny&gt;, 4 value-aware keys match 8.</strong>" in page
    for text in (
        "A causal query sees its past alone",
        "tiny (TinyForCausalLM, 2 layers of 4 heads of 8 dimensions), exponential kernel",
        "3 of 6 windows of 16 tokens, 50% of the text&#39;s 96 tokens",
        "32 queries of each head and window",
        "hardware: no hardware, synthetic; torch 0.0.",
    ):
        assert text in page
    assert "post hoc" not in page and "skewness" not in page
    links = re.findall(r"(?:src|href)='([^']*)'", page)
    assert len(links) == 6 + 3 * 2 + 2 and all((tmp_path / link).is_file() for link in links)
    not_causal = replace(record.attention[0].output_error, causal=False)
    write_probe(with_attention(record, post_hoc=True, output_error=not_causal), tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "post hoc" in page and "A causal query" not in page


@pytest.mark.usefixtures("undrawn")
def test_kernels_put_in_post_hoc_stand_beside_the_models_own(tmp_path: Path) -> None:
    given = probed(("exponential", "elu"))
    cells = tuple(gap_cell(layer, degree, 4, {"4": 2}) for layer in (0, 1) for degree in (0, 2))
    gap = SkewnessGap(rows=64, cells=cells)
    write_probe(with_attention(given, skewness_gap=gap), tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert f"elu, post hoc: {sentence(given.attention[1].output_error)}." in page
    assert (tmp_path / "skewness_gap.png").exists() and "64 queries a layer" in page
    rows = pd.read_csv(tmp_path / "matching_keys.csv")
    assert set(rows.model) == {"exponential, its own", "elu, post hoc"}


@pytest.mark.usefixtures("undrawn")
def test_one_window_is_a_page_without_intervals(tmp_path: Path) -> None:
    record = probed(known=False)
    write_probe(record, tmp_path)
    written = Record.from_json((tmp_path / "record.json").read_text())
    assert written.cells[1].low is None and written.cells[1].value is not None
    assert "Here without intervals" in (tmp_path / "index.html").read_text()


def test_the_same_record_gives_the_same_bytes(record: Record, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_probe(record, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_failure_leaves_the_folder_as_it_was(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text("before")
    monkeypatch.setattr(figures, "save", lambda chart, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_probe(record, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == "before"


def rows(chart: object) -> list[dict]:
    return [row for data in chart.to_dict()["datasets"].values() for row in data]


def test_heat_maps_have_a_cell_for_every_layer_and_head(record: Record) -> None:
    assert heat_size(record) == 4
    for chart in (heat_map(record), keys_by_head(record)):
        cells = {(row["series"], row["layer"], row["head"]): row for row in rows(chart)}
        assert len(cells) == 2 * 2 * 4
    cells = {(row["series"], row["layer"], row["head"]): row for row in rows(heat_map(record))}
    [stored] = [
        at.error
        for at in record.attention[0].output_error.errors
        if (at.layer, at.head, at.method, at.r) == (1, 3, OBLIVIOUS, 4)
    ]
    assert cells["OVO", 1, 3]["value"] == stored


def test_the_layers_figure_has_every_count(record: Record) -> None:
    counts = {
        (row["series"], row["place"], row["keys"]) for row in rows(keys_needed_figure(record))
    }
    for row in record.attention[0].output_error.keys_needed:
        if row.head is None:
            series = {OBLIVIOUS: "OVO", AWARE: "OVA"}[row.method]
            assert (series, "all" if row.layer is None else str(row.layer), row.keys) in counts
