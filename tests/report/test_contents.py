"""The report's page holds the exhibits that a run's records allow, and names the others."""

import random
from dataclasses import replace

import pytest
from synthetic import UNKNOWN, probed, with_cells

from tests.report.pages import exploration
from value_aware_study.report import page as page_module
from value_aware_study.report.contents import report_page
from value_aware_study.report.frame import Results
from value_aware_study.report.page import write_page

TABLES = (
    *("table_1", "table_2", "table_3", "table_4", "table_4_causal", "grid", "models"),
    *("keys_needed", "claims", "findings"),
)
FIGURES = ("hero", "drawing", *(f"figure_{number}" for number in range(1, 9)))
FILES = {
    *(f"{name}.{suffix}" for name in (*TABLES, *FIGURES) for suffix in ("csv", "md")),
    *(f"{name}.png" for name in (*FIGURES, "hero_dark", "drawing_dark")),
    *("explorer.json", "index.html", "SHA256SUMS"),
}
TITLES = ["The claims", "The paper", "Every r", "Your model: tiny", "How it was measured"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(page_module, "png", lambda *_: b"")


def test_the_report_is_this_set_of_files_and_a_page_of_sections(
    records, training, tokens, tmp_path, undrawn
):
    given = {"explored": exploration(), "probed": [probed()]}
    page = report_page(Results.of(records, training, tokens, **given))
    assert [section.title for section in page.sections] == TITLES
    hero, explorer, *_ = page.exhibits()
    assert "tiny" in hero.title and explorer.name == "explorer"
    assert [one.name for one in explorer.exploration.models] == ["tiny"]
    write_page(page, tmp_path)
    files = {name for name in contents(tmp_path) if not name.startswith("model_")}
    assert files == FILES
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "make repro" in text
    named = [one.name for one in page.exhibits() if "no hardware" in " ".join(one.notes)]
    assert named == ["models"]


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(records, training, tokens, tmp_path):
    few = [record for record in records if record.task == "masked"]
    for folder, given in (("one", few), ("other", random.Random(0).sample(few, len(few)))):
        results = Results.of(given, dict(reversed(training.items())), tokens)
        write_page(report_page(results), tmp_path / folder)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_a_page_without_most_models_names_what_is_not_there(records):
    lonely = with_cells(records[0], lambda cell: replace(cell, **UNKNOWN))
    page = report_page(Results.of([lonely]))
    leads = {section.title: section.lead for section in page.sections}
    assert leads["The paper"].endswith("Not measured yet: Table 1, Figure 1, Figure 3.")
    assert "Not measured yet: the token explorer" in leads["The claims"]
    assert not {"table_1", "figure_1"} & {exhibit.name for exhibit in page.exhibits()}


def test_no_records_are_refused_in_one_line():
    with pytest.raises(ValueError, match="no evaluation records") as error:
        report_page(Results.of([]))
    assert "\n" not in str(error.value)
