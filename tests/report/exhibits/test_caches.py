"""Exhibits of caches join texts, divide by one score, and say what they cannot tell."""

from dataclasses import replace

import pytest

from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.records.cache_record import FULL, CacheCell, CacheRecord
from value_aware_attention.records.estimate import DASH
from value_aware_study.report.exhibits.caches import (
    REFERENCE_CACHE,
    USES,
    _kind,
    caches_compared,
    pooled,
    rows,
    to_use,
)

OTHERS = {"SnapKV": 2.0, REFERENCE_CACHE: 1.0, "all queries": 0.25, "later queries": 0.1}


def record(task: str, text: str, kl: tuple[float, ...], right: float = 1.0) -> CacheRecord:
    """Makes a record whose KL is that of `REFERENCE_CACHE` times a factor of each cache."""
    count = len(kl)
    full = CacheCell(
        cache=FULL, keep=1.0, kl=(1e-12,) * count, nats=(0.1,) * count, right=(right,) * count
    )
    cells = [
        CacheCell(
            cache=name, keep=keep, kl=tuple(factor * x / keep for x in kl), nats=(0.2,) * count,
            right=(right, *(0.0,) * (count - 1)),
        )
        for keep in (0.5, 0.25, 0.125)
        for name, factor in OTHERS.items()
    ]  # fmt: skip
    return CacheRecord(
        model="tiny", task=task, text=text, description="made up", prefix=512, run_on=run_on(),
        cells=(full, *cells),
    )  # fmt: skip


TEXT = [record("running_text", name, (0.1, 0.4)) for name in ("novels", "articles")]


def test_texts_are_joined_by_kind_length_and_caches() -> None:
    needles = record("needles", "novels", (0.1, 0.2))
    longer = replace(needles, prefix=1024)
    fewer = replace(TEXT[0], cells=TEXT[0].cells[:9])
    joined = list(pooled([*TEXT, needles, longer, fewer]))
    assert [(r.task, r.prefix, r.text) for r in joined] == [
        ("running_text", 512, "novels, articles"),
        ("needles", 512, "novels"),
        ("needles", 1024, "novels"),
        ("running_text", 512, "novels"),
    ]
    assert joined[0].cells[1].kl == TEXT[0].cells[1].kl + TEXT[1].cells[1].kl
    alone = [cell for cell in needles.cells if cell.cache != REFERENCE_CACHE]
    other = [replace(needles, model="another"), replace(needles, cells=tuple(alone))]
    assert [r.model for r in pooled([needles, *other])] == ["tiny", "another"]


def test_the_caches_to_use_are_shown_where_text_and_needles_have_all_of_them() -> None:
    factors = dict(zip(USES, (0.25, 0.5, 0.8, 0.4, 2.0, 0.3), strict=True)) | {REFERENCE_CACHE: 1.0}
    text, needles = (
        replace(found, cells=(found.cells[0], *(
            replace(found.cells[1], cache=name, keep=0.25, kl=(factor, 2 * factor))
            for name, factor in factors.items()
        )))
        for found in (record(task, "novels", (0.1, 0.4)) for task in ("running_text", "needles"))
    )  # fmt: skip
    assert to_use([text]) is None and to_use([text, *TEXT]) is None
    exhibit = to_use([text, needles])
    assert list(exhibit.table.data["ratio"]) == pytest.approx(list(factors.values())[:-1])
    assert "the default leaves × 0.25 of the KL and has 50.0% of" in exhibit.title
    assert list(exhibit.table.display["for"]) == [use for use, _ in USES.values()]


def test_ratios_are_paired_and_the_best_that_is_no_oracle_is_named() -> None:
    (exhibit,) = caches_compared(TEXT)
    data = exhibit.table.data
    for row in rows(next(pooled(TEXT))):
        assert row["ratio"] == pytest.approx(OTHERS[row["cache"]])
        assert row["worst"] == pytest.approx(OTHERS[row["cache"]])
    assert set(data["prompts"]) == {4} and data["tells"].all()
    assert exhibit.title == (
        "Running text, 512 tokens, 0.25 of the keys: all queries leaves × 0.25 of the KL that the "
        "same score from SnapKV's queries leaves"
    )
    notes = " ".join(exhibit.notes)
    assert "1.00 at 0.125, 1.00 at 0.25, 1.00 at 0.5." in notes and "no order" not in notes
    assert "tokens right" not in exhibit.table.display


def test_an_order_that_halves_do_not_share_is_not_claimed() -> None:
    (alone,) = caches_compared([record("running_text", "novels", (0.1,))])  # no halves
    assert set(alone.table.display["95% interval"]) == {DASH}
    assert "Kendall" not in " ".join(alone.notes)
    cells = [
        replace(cell, kl=cell.kl[::-1] if number % 2 else cell.kl)
        for number, cell in enumerate(TEXT[0].cells)
    ]
    (exhibit,) = caches_compared([replace(TEXT[0], cells=tuple(cells))])
    assert "below .8 no order is claimed" in " ".join(exhibit.notes)


@pytest.mark.parametrize(("right", "said"), [(1.0, False), (0.2, True)])
def test_a_task_that_the_model_cannot_do_is_named(right: float, said: bool) -> None:
    (exhibit,) = caches_compared([record("needles", "novels", (0.1, 0.4), right)])
    notes = " ".join(exhibit.notes)
    assert f"The full cache has {right:.1%} of the tokens right." in notes
    assert ("the model cannot do this task" in notes) == said
    assert exhibit.table.display["answers right"][0] == ("50%" if right == 1 else "0%")


def test_a_cache_has_the_colour_of_what_chooses_its_keys() -> None:
    kinds = {
        "KVzip": "KVzip",
        "H2O": "other published methods",
        "joint set": "value-aware, other budgets",
        "single losses, all queries, one budget, floor": "value-aware, one budget",
        "single losses, later queries, one budget": "an oracle, later queries",
    }
    assert {cache: _kind(cache) for cache in kinds} == kinds
