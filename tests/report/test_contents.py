"""The report's page holds the exhibits that a run's records allow, and names the others."""

import random
from dataclasses import replace

import pytest
from synthetic import UNKNOWN, with_cells

from tests.refusals import assert_refused
from value_aware_study.report.contents import report_page
from value_aware_study.report.frame import Results
from value_aware_study.report.page import write_page
from value_aware_study.report.records import links_of


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(records, training, tokens, tmp_path):
    few = [record for record in records if record.task == "masked"]
    for folder, order in (("one", few), ("other", random.Random(0).sample(few, len(few)))):
        results = Results.of(order, dict(reversed(training.items())), tokens)
        write_page(report_page(results), tmp_path / folder)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_a_page_without_most_models_names_what_is_not_there(records):
    lonely = with_cells(records[0], lambda cell: replace(cell, **UNKNOWN))
    page = report_page(Results.of([lonely]))
    leads = {section.title: section.lead for section in page.sections}
    assert list(leads) == ["Answer", "The paper", "Everything"]
    assert leads["The paper"].endswith("Not measured yet: Table 1, Figure 1, Figure 3.")
    assert "Not measured yet: the token explorer" in leads["Answer"]
    assert not {"table_1", "figure_1"} & {exhibit.name for exhibit in page.exhibits()}
    assert [part.name for part in page.sections[-1].within] == ["every_r", "how"]


def test_code_and_manual_are_linked_where_the_citation_has_them(tmp_path):
    file = tmp_path / "CITATION.cff"
    assert links_of(file) == {}
    file.write_text("title: t\nrepository-code: https://code\ndoi: 10.1/x\n")
    assert links_of(file) == {"Code": "https://code", "DOI": "https://doi.org/10.1/x"}


def test_no_records_are_refused_in_one_line():
    assert_refused("no evaluation records", report_page, Results.of([]))


@pytest.mark.parametrize(
    ("scale", "is_said"), [("smoke", True), ("laptop", True), ("hours", False)]
)
def test_a_page_of_short_trainings_says_first_what_they_are_for(records, scale, is_said):
    short = next(record for record in records if record.model == "masked_short")
    page = report_page(Results.of([replace(short, scale=scale)]))
    assert page.lead.startswith("Keys are chosen") is not is_said


def test_verdicts_of_published_runs_stand_beside_but_for_other_toys(records):
    scales = {scale: {} for scale in (records[0].scale, "laptop", "hours")}
    page = report_page(Results.of(records[:1], verdicts=scales))
    claims = next(exhibit for exhibit in page.exhibits() if exhibit.name == "claims")
    columns = [name for name in claims.table.display if name.startswith("verdict,")]
    assert columns == ["verdict, published", "verdict, hours"]
