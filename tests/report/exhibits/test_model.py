"""A probed model's section and page say, draw and write the numbers of its record."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from drawn import rows
from synthetic import OBLIVIOUS, probed, with_attention

from value_aware_attention.records.record import Record
from value_aware_study.report.contents import model_section, write_probe
from value_aware_study.report.exhibits.model import error_by_head, head_budgets, two_digits
from value_aware_study.report.words import ORACLES

HEADLINE = "On <tiny>, 4 value-aware keys match 8."


@pytest.fixture(scope="module")
def record() -> Record:
    return probed(heads=2, sizes=(1, 4))


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("value_aware_study.report.contents.headline", lambda record: HEADLINE)


def exhibits(record: Record) -> dict:
    section = model_section(record)
    return {exhibit.name.removeprefix("model_"): exhibit for exhibit in section.exhibits}


@pytest.mark.usefixtures("undrawn")
def test_a_page_begins_with_what_was_found_beside_its_record_and_heads(
    record: Record, tmp_path: Path
) -> None:
    sly = replace(record, model="<tiny>")
    write_probe(sly, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<p>On &lt;tiny&gt;, 4 value-aware keys match 8. At one" in page and "<tiny>" not in page
    assert "hardware: no hardware, synthetic, 1 thread; torch 0.0." in page
    assert "post hoc" not in page and "skewness" not in page.lower()
    assert Record.from_json((tmp_path / "record.json").read_text()) == sly
    heads = pd.read_csv(tmp_path / "heads.csv")
    stored = [vars(at) for at in record.attention[0].output_error.errors if at.head is not None]
    pd.testing.assert_frame_equal(heads, pd.DataFrame(stored)[list(heads)], rtol=1e-6)
    assert list(heads) == ["layer", "head", "method", "r", "error", "low", "high"]


def test_another_kernel_is_said_and_what_was_not_measured_left_out(record: Record) -> None:
    errors = replace(record.attention[0].output_error, causal=False, matching_keys=())
    section = model_section(with_attention(record, post_hoc=True, output_error=errors))
    assert "post hoc" in section.lead
    notes = [note for exhibit in section.exhibits for note in exhibit.notes]
    assert not any("A causal query" in note for note in notes)
    names = {exhibit.name for exhibit in section.exhibits}
    assert "model_end_metric" in names and "model_matching_keys" not in names


def test_one_window_is_a_section_without_intervals() -> None:
    by_name = exhibits(probed(heads=2, sizes=(1, 4), known=False))
    for name in ("end_metric", "layers", "output_error"):
        assert not any(row.get("low") for row in rows(*by_name[name].charts))
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
    one_exact = with_attention(record, output_error=replace(errors, errors=small))
    chart = error_by_head(one_exact, "error_by_head", "").charts[0].to_dict()
    scale = chart["layer"][0]["encoding"]["color"]["scale"]
    assert scale["clamp"] and 1e-12 < scale["domain"][0] < 100 * lowest


def test_budgets_of_heads_are_a_table_where_they_were_measured(record: Record) -> None:
    assert head_budgets(record, "head_budgets", "") is None
    budget = {"share": 0.05, "keys": 3.25, "each": "equal"}
    cell = replace(record.cells[1], approximation=OBLIVIOUS, parameters=budget)
    exhibit = head_budgets(replace(record, budgets=(cell,)), "head_budgets", "")
    assert exhibit.table.rows() == [
        ["5%", "3.2", f"{ORACLES[OBLIVIOUS]}, all heads alike", "31.00", "30.90 to 31.10"]
    ]
    assert "Exact attention: 30.00" in exhibit.caption
