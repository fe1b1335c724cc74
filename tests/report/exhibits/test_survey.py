"""The survey compares every method at equal budgets in panels, a table and sentences."""

import re
from dataclasses import replace

import pytest
import vl_convert
from drawn import rows
from surveyed import survey_record, survey_results
from synthetic import UNKNOWN, with_cells

from value_aware_attention.records.estimate import DASH
from value_aware_study.report.exhibits import survey
from value_aware_study.report.exhibits.survey import budget_settings, findings
from value_aware_study.report.frame import FLOOR, Results
from value_aware_study.report.look import specification


def test_both_panels_have_the_closest_method_first_below_the_limit() -> None:
    """The limit is the edge of what is shaded."""
    panels = survey.distance(survey_results()).charts
    drawn = [row for row in rows(panels[0]) if "low" in row]
    assert {row["series"] for row in drawn} == {"16 keys", "64 keys"}
    assert min(row["value"] for row in drawn) == FLOOR
    order, of_cost = (panel.to_dict()["layer"][-1]["encoding"]["y"]["sort"] for panel in panels)
    assert order[0] == survey.LIMIT and order == of_cost
    shade = panels[0].layer[0]
    assert shade.to_dict()["mark"]["type"] == "rect"
    assert shade.data["value"].tolist() == pytest.approx([0.04, FLOOR])


def test_a_cost_beyond_all_others_is_a_number_at_the_edge() -> None:
    def worse(cell):
        far = cell.approximation == "sliding_window" and cell.budget == 16
        return replace(cell, value=5000.0, low=None, high=None) if far else cell

    [_, cost] = survey.distance(Results.of([with_cells(survey_record("masked"), worse)])).charts
    drawn = rows(cost)
    assert [row["text"] for row in drawn if "text" in row] == ["+4,900.0 ▸"]
    assert max(row["value"] for row in drawn if "value" in row) < 100


def test_the_sentences_name_the_closest_method_that_does_not_look_at_the_weights() -> None:
    def closer(cell):
        near = replace(cell.error, relative=0.001)
        return replace(cell, error=near) if cell.approximation == "sliding_window" else cell

    moved = Results.of([with_cells(survey_record(), closer)])
    for results, closest in ((survey_results(), "strided"), (moved, "sliding window")):
        assert f"closest practical method is {closest}" in findings(budget_settings(results))


def test_the_picture_scales_every_query_by_its_largest_weight() -> None:
    exhibit = survey.patterns([survey_record(), survey_record("masked", picture=None)])
    exact, other = exhibit.charts
    assert exhibit.choices == ["causal, elu"]
    assert exact.to_dict()["title"] == "causal, elu: exact attention"
    drawn = [(row["query"], row["key"], row["weight"]) for row in rows(exact)]
    assert drawn == [(0, 0, 1.0), (1, 0, 0.5), (1, 1, -0.25)]
    svg = vl_convert.vegalite_to_svg(specification(exact))
    assert re.findall(r"strength: ([\d.]+);", svg) == ["1", "1", "0.5"]
    assert '["def", "f"][datum.value]' in str(exact.to_dict())
    assert {row["method"] for row in rows(other)} == {"Nyström (2.5)"}
    assert survey.patterns([survey_record(picture=None)]) is None


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_a_single_unit_has_no_interval_in_table_and_figure(task: str) -> None:
    single = with_cells(survey_record(task), lambda cell: replace(cell, **UNKNOWN))
    exhibit = survey.distance(Results.of([single]))
    assert set(exhibit.table.display["interval"]) == {DASH}
    assert not any("low" in row for row in rows(exhibit.charts[1]))
