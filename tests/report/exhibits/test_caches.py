"""Tables of cache methods name the best score, the queries and the range over trainings."""

from dataclasses import replace

import pytest
from surveyed import cache_cell, cache_record

from tests.report.drawn import rows
from value_aware_attention.measurement.cache_record import (
    CacheCell,
    CacheGaps,
    CacheRecord,
    Estimate,
)
from value_aware_study.report.contents import cache_section
from value_aware_study.report.exhibit import Table
from value_aware_study.report.exhibits.caches import gaps
from value_aware_study.report.frame import FLOOR


def level(cell: CacheCell, error: float, right: float) -> CacheCell:
    """Gives a cell an error on both texts, twice the KL, and a share of right answers."""
    by_unit = {"error": (error,) * 2, "kl": (2 * error,) * 2, "exact_match": (right,) * 2}
    ends = cell.ends | {"exact_match": replace(cell.error, value=right)}
    return replace(cell, error=replace(cell.error, value=error), by_unit=by_unit, ends=ends)


def trained(task: str, model: str, joint: float, right: float) -> CacheRecord:
    """Builds a record of a joint set whose error is given; random keys leave 0.4, scores more."""
    methods = [
        ("random", "nothing", 0, 0.4), ("snapkv", "last", 32, 0.5), ("snapkv", "last", 16, 0.25),
        ("value_aware", "last", 32, joint), ("value_aware", "hindsight", 64, 0.01),
    ]  # fmt: skip
    cells = [
        level(cache_cell(name, observed, error, rows), error, right if error == joint else 0.0)
        for name, observed, rows, error in methods
    ]
    exact = {"exact_match": replace(cells[0].error, value=1.0)}
    record = replace(cache_record(), task=task, model=model, cells=tuple(cells))
    return replace(record, exact=exact)


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    records = [
        trained("copying", "copying", 0.3, 0.0), trained("recall", "recall_second", 0.3, 0.5),
        trained("recall", "recall_third", 0.1, 0.75), trained("recall", "recall", 0.2, 1.0),
    ]  # fmt: skip
    section = cache_section(records)
    return {exhibit.name: exhibit.table for exhibit in section.exhibits if exhibit.table}


def test_random_choice_is_named_and_so_is_the_best_of_any_queries(tables: dict[str, Table]) -> None:
    row = tables["cache_gain"].display.set_index("texts").loc["recall"]
    assert (row["observed"], row["best"]) == ("last 32", "random")
    assert row["best of any queries"] == "SnapKV (last 16)"
    ratios = tables["cache_gain"].data.set_index("texts").loc["recall"]
    assert (ratios["error"], ratios["distance"], ratios["any error"]) == (0.5, 0.5, 0.8)
    assert ratios["prefills"] == 0.01 / 0.002


def test_recall_comes_first_and_a_further_training_has_no_panel(tables: dict[str, Table]) -> None:
    (methods,) = (table for name, table in tables.items() if name.startswith("cache_methods"))
    assert [name.split(":")[0] for name in methods.display.columns[2:]] == ["recall", "copying"]
    assert tables["cache_agreement"].data["texts"].tolist() == ["recall", "copying"]


def test_a_record_without_cells_at_a_share_has_no_panel_there() -> None:
    recall = trained("recall", "recall", 0.2, 1.0)
    cells = tuple(replace(cell, r=2 * cell.r) for cell in recall.cells)
    other = replace(trained("copying", "copying", 0.3, 0.0), cells=cells)
    exhibits = {exhibit.name: exhibit for exhibit in cache_section([recall, other]).exhibits}
    parts = [exhibit for name, exhibit in exhibits.items() if name.startswith("cache_methods_")]
    assert [exhibit.choices for exhibit in parts] == [["recall"], ["copying"]]
    assert all(len(exhibit.charts) == 1 for exhibit in parts)


def test_a_distance_of_zero_is_drawn_at_the_floor() -> None:
    record = cache_record()
    *others, pooled = record.cells
    cells = [*others, replace(pooled, ends={"kl": replace(pooled.error, value=0.0)})]
    exhibits = {
        exhibit.name: exhibit
        for exhibit in cache_section([replace(record, cells=tuple(cells))]).exhibits
    }
    drawn = [row["value"] for row in rows(exhibits["cache_memory"].charts[0]) if "value" in row]
    assert min(drawn) == FLOOR < max(drawn)


def test_what_a_method_loses_is_one_bar_a_task_of_factors_end_to_end() -> None:
    factors = {"criterion": 0.5, "information": 10.0, "sharing": 100.0, "weights": 1.0}
    estimates = {
        name: Estimate(value=value, low=None, high=None) for name, value in factors.items()
    }
    measured = CacheGaps(
        method="snapkv", observed="last", rows=8, r=8, layer=None, head=None, **estimates
    )  # fmt: skip
    exhibit = gaps(
        [replace(cache_record(), gaps=(measured, replace(measured, observed="hindsight")))]
    )
    assert exhibit and "SnapKV (queries observed: last 8)" in exhibit.caption
    [panel] = exhibit.charts
    ends = {row["series"].partition(":")[0]: (row["begin"], row["end"]) for row in rows(panel)}
    assert ends["information"] == (0, 1) and ends["sharing"] == (1, 3)
    assert ends["criterion"] == pytest.approx((0, -0.30103))  # a gain is left of × 1
