"""Exhibits of caches join texts, divide by one score, and say what they cannot tell."""

from dataclasses import replace

import pytest
from synthetic import rows as synthetic_rows

from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.records.cache_record import FULL, CacheCell, CacheRecord
from value_aware_study.report import look
from value_aware_study.report.exhibits.caches import (
    MOST_SHOWN,
    REFERENCE_CACHE,
    USES,
    caches_compared,
    label,
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


def test_the_caches_to_use_are_shown_where_text_and_needles_have_the_default() -> None:
    factors = {name: 0.25 + place for place, name in enumerate(USES) if name != FULL}
    text, needles = (
        replace(found, cells=(found.cells[0], *(
            replace(found.cells[1], cache=name, keep=0.25, kl=(factor, 2 * factor))
            for name, factor in (factors | {REFERENCE_CACHE: 1.0}).items()
        )))
        for found in (record(task, "novels", (0.1, 0.4)) for task in ("running_text", "needles"))
    )  # fmt: skip
    assert to_use([text]) is None and to_use([text, *TEXT]) is None
    exhibit = to_use([text, needles])
    assert list(exhibit.table.data["cache"]) == list(USES)
    kl = exhibit.table.data["running_text_kl"][1:]
    assert list(kl) == pytest.approx([1.5 * factor for factor in factors.values()])
    assert "the default has 50.0% of the facts' tokens right, of 100.0%" in exhibit.title
    assert "running text 2, facts 2." in exhibit.caption and "a list" not in str(exhibit.table)
    without = [replace(r, cells=(*r.cells[:2], *r.cells[3:])) for r in (text, needles)]
    assert set(USES) - set(to_use(without).table.data["cache"]) == {"KVzip"}


def test_ratios_are_paired_and_the_best_that_is_no_oracle_is_named() -> None:
    (exhibit,) = caches_compared(TEXT)
    data = exhibit.table.data
    full, *others = rows(next(pooled(TEXT)))
    assert full["cache"] == FULL and "ratio" not in full and full["right"] == 1.0
    for row in others:
        assert row["ratio"] == pytest.approx(OTHERS[row["cache"]])
        assert row["worst"] == pytest.approx(OTHERS[row["cache"]])
        assert row["kl_low"] < row["kl"] == pytest.approx(0.25 * row["ratio"] / row["keep"])
    assert set(data["prompts"]) == {4} and list(data["keep"][:5]) == [1.0, *[0.25] * 4]
    assert exhibit.title == (
        "Running text, 512 tokens, 0.25 of the keys: predictions change least with all queries, "
        "50.0% of the tokens right of 100.0% with all keys"
    )
    assert "whole answers right" not in exhibit.table.display


def test_a_figure_has_eight_caches_first_those_that_stand_out() -> None:
    full, *cells = TEXT[0].cells
    many = [
        replace(cell, cache=name, kl=tuple(place * x for x in cell.kl))
        for cell in cells
        if cell.cache == REFERENCE_CACHE
        for place, name in enumerate([REFERENCE_CACHE, *map(str, range(9)), "KVzip"], start=1)
    ]
    (exhibit,) = caches_compared([replace(TEXT[0], cells=(full, *many))])
    drawn = {row["name"] for row in synthetic_rows(*exhibit.charts) if "name" in row}
    assert len(drawn - {"all keys"}) == MOST_SHOWN and label("KVzip") in drawn
    assert len(exhibit.table.data) == 1 + len(many) and exhibit.table.grouped


def test_one_prompt_has_no_interval() -> None:
    (alone,) = caches_compared([record("running_text", "novels", (0.1,))])
    assert not alone.table.data["kl_low"].notna().any()


@pytest.mark.parametrize(("right", "said"), [(1.0, False), (0.2, True)])
def test_a_task_that_the_model_cannot_do_is_named(right: float, said: bool) -> None:
    (exhibit,) = caches_compared([record("needles", "novels", (0.1, 0.4), right)])
    assert f"With all keys {right:.1%} are" in exhibit.caption
    assert ("the model cannot do this task" in " ".join(exhibit.notes)) == said
    assert exhibit.table.display["whole answers right"][1] == ("50%" if right == 1 else "0%")


def test_a_cache_has_the_colour_of_what_chooses_its_keys() -> None:
    ova, ovo = (look.ORACLE_MARKS[name].colour for name in look.ORACLE_MARKS)
    for cache, colour in {
        "single losses, later queries, one budget": ova,
        "joint set": ova,
        "mean attention, all queries, one budget": ovo,
        "H2O": look.OTHER.colour,
    }.items():
        assert look.cache_mark(cache).colour == colour
