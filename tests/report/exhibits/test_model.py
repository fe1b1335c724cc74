"""A probed model's section and page say, draw and write the numbers of its record."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from drawn import rows
from synthetic import AWARE, OBLIVIOUS, probed, with_attention

from value_aware_attention.records.record import Record
from value_aware_study.report.contents import model_section, write_probe
from value_aware_study.report.exhibits.model import two_digits
from value_aware_study.report.words import ORACLES

HEADLINE = "On <tiny>, 4 value-aware keys match 8."


@pytest.fixture(scope="module")
def record() -> Record:
    return probed()


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("value_aware_study.report.contents.headline", lambda record: HEADLINE)


def exhibits(record: Record) -> dict:
    section = model_section(record)
    return {exhibit.name.removeprefix("model_"): exhibit for exhibit in section.exhibits}


@pytest.mark.usefixtures("undrawn")
def test_the_heads_and_the_record_are_files(record: Record, tmp_path: Path) -> None:
    write_probe(record, tmp_path)
    heads = pd.read_csv(tmp_path / "heads.csv")
    errors = record.attention[0].output_error
    assert len(heads) == 2 * 2 * 4 * 5  # methods, layers, heads, sizes
    row = heads[(heads.layer == 1) & (heads["head"] == 2) & (heads.method == AWARE)]
    stored = [at for at in errors.errors if (at.layer, at.head, at.method) == (1, 2, AWARE)]
    assert row.error.tolist() == pytest.approx([at.error for at in stored])
    assert row.high.tolist() == pytest.approx([at.high for at in stored])
    assert Record.from_json((tmp_path / "record.json").read_text()) == record


@pytest.mark.usefixtures("undrawn")
def test_the_page_begins_with_what_was_found_and_says_how(record: Record, tmp_path: Path) -> None:
    write_probe(replace(record, model="<tiny>"), tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<p>On &lt;tiny&gt;, 4 value-aware keys match 8. At one" in page and "<tiny>" not in page
    assert "hardware: no hardware, synthetic, 1 thread; torch 0.0." in page
    assert "post hoc" not in page and "skewness" not in page.lower()


def test_another_kernel_than_the_models_own_is_said(record: Record) -> None:
    not_causal = replace(record.attention[0].output_error, causal=False)
    section = model_section(with_attention(record, post_hoc=True, output_error=not_causal))
    assert "post hoc" in section.lead
    notes = [note for exhibit in section.exhibits for note in exhibit.notes]
    assert not any("A causal query" in note for note in notes)


def test_one_window_is_a_section_without_intervals() -> None:
    by_name = exhibits(probed(known=False))
    for name in ("end_metric", "layers", "output_error"):
        for panel in by_name[name].charts:
            assert not any(row.get("low") for row in rows(panel))
    assert set(by_name["end_metric"].table.display["95% interval"]) == {"–", "1.00 to 1.00"}


@pytest.mark.parametrize(
    ("percent", "text"),
    [(5e-4, "<.01"), (0.0149, "0.015"), (0.35, "0.35"), (3.46, "3.5"), (216.0, "220")],
)
def test_a_cell_has_two_significant_digits(percent: float, text: str) -> None:
    assert two_digits(percent) == text


def test_one_head_that_is_nearly_exact_does_not_take_the_scale(record: Record) -> None:
    errors = record.attention[0].output_error
    lowest = min(at.error for at in errors.errors if at.head is not None and at.r == 4)
    small = tuple(
        replace(at, error=1e-12) if (at.layer, at.head, at.r) == (0, 0, 4) else at
        for at in errors.errors
    )
    by_name = exhibits(with_attention(record, output_error=replace(errors, errors=small)))
    scale = by_name["error_by_head"].charts[0].to_dict()["layer"][0]["encoding"]["color"]["scale"]
    assert scale["clamp"] and 1e-12 < scale["domain"][0] < 100 * lowest


def test_what_was_not_measured_is_left_out(record: Record) -> None:
    errors = replace(record.attention[0].output_error, matching_keys=())
    by_name = exhibits(with_attention(record, output_error=errors))
    assert "matching_keys" not in by_name and "end_metric" in by_name


def test_budgets_of_heads_are_a_table_where_they_were_measured(record: Record) -> None:
    assert "head_budgets" not in exhibits(record)
    budget = {"share": 0.05, "keys": 3.25, "each": "equal"}
    cell = replace(record.cells[1], approximation=OBLIVIOUS, parameters=budget)
    exhibit = exhibits(replace(record, budgets=(cell,)))["head_budgets"]
    assert exhibit.table.rows() == [
        ["5%", "3.2", f"{ORACLES[OBLIVIOUS]}, all heads alike", "31.00", "30.90 to 31.10"]
    ]
    assert "Exact attention: 30.00" in exhibit.caption
