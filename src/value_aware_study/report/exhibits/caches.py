"""Compressed caches of a pretrained decoder, on prompts with continuations unseen by them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import altair as alt
import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.estimate import short
from value_aware_study.report import charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import Row

REFERENCE_CACHE = "single losses, SnapKV's queries"
"""The reference for the other caches: the same score from the queries that SnapKV observes"""
LEAST_RIGHT = 0.5
"""Share of right tokens of the full cache; below it, a task does not distinguish caches"""
USES = {
    "single losses, all queries, one budget": ("the default", "LeaveOneOut"),
    "single losses, 128 queries, one budget": ("a quicker choice", "LeaveOneOut, rows=128"),
    "single losses, all queries": ("as many keys in every head", "LeaveOneOut, pool=None"),
    "mean attention, all queries, one budget": ("the plainest score", "ObservedAttention"),
    "SnapKV": ("the cheapest choice", "SnapKV, its authors' settings"),
    "KVzip": ("a second reading of the prompt", "KVzip, its authors' settings"),
}
"""Caches that docs/caches.md recommends or compares -> their purpose and their setting"""
PROMPT_TITLES = {
    "running_text": "Running text",
    "needles": "Needles",
    "recalled_list": "A recalled list",
}


def pooled(records: Sequence[CacheRecord]) -> Iterator[CacheRecord]:
    """Joins the prompts of all texts, for the same model, kind, length and caches.

    Leaves out records without `REFERENCE_CACHE`.
    """
    alike = words.grouped(
        ((r.model, r.task, r.prefix, tuple((cell.cache, cell.keep) for cell in r.cells)), r)
        for r in records
        if {cell.keep for cell in r.cells[1:]}
        == {c.keep for c in r.cells if c.cache == REFERENCE_CACHE}
    )
    for several in alike.values():
        cells = [
            replace(cells[0], **{
                name: tuple(chain(*(getattr(cell, name) for cell in cells)))
                for name in ("kl", "nats", "right")
            })
            for cells in zip(*(record.cells for record in several), strict=True)
        ]  # fmt: skip
        yield replace(
            several[0], cells=tuple(cells), text=", ".join(record.text for record in several)
        )


def rows(record: CacheRecord) -> Iterator[Row]:
    """Tabulates the cells: KL over that of `REFERENCE_CACHE`, paired over prompts, and answers."""
    full = record.cells[0]
    others = {cell.keep: cell for cell in record.cells if cell.cache == REFERENCE_CACHE}
    for cell in record.cells[1:]:
        ratio, other = record.ratio(cell, others[cell.keep]), others[cell.keep]
        yield {
            "task": f"{PROMPT_TITLES[record.task]}, {record.prefix:,} tokens", "texts": record.text,
            "prompts": len(cell.kl), "keep": cell.keep, "cache": cell.cache,
            "kl": float(np.mean(cell.kl)), "ratio": ratio.value, "low": ratio.low,
            "high": ratio.high, "worst": max(np.divide(cell.kl, other.kl)),
            "right": float(np.mean(cell.right)), "whole": float(np.mean(np.equal(cell.right, 1))),
            "nats": float(np.mean(cell.nats)), "right_full": float(np.mean(full.right)),
            "tells": record.task == "running_text" or np.mean(full.right) >= LEAST_RIGHT,
        }  # fmt: skip


def caches_compared(records: Sequence[CacheRecord]) -> list[Exhibit]:
    """Shows the loss of each group of caches on each kind of prompt, at every share of keys."""
    return [
        _exhibit(f"caches_{number}", record)
        for number, record in enumerate(pooled(records), start=1)
    ]


def to_use(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Tabulates the caches of `USES` on text and needles; None if one was not measured."""
    tables: dict[str, pd.DataFrame] = {}
    for record in pooled([r for r in records if r.model == records[0].model]):
        data = pd.DataFrame(rows(record)).query("keep == 0.25").set_index("cache")
        if set(USES) <= set(data.index):
            tables.setdefault(record.task, data.loc[list(USES)])
    if not {"running_text", "needles"} <= set(tables):
        return None
    text, needles = tables["running_text"], tables["needles"]
    data = text.assign(needles=needles["right"], full=needles["right_full"]).reset_index()
    uses, settings = zip(*USES.values(), strict=True)
    display = {
        "for": uses, "setting": settings, "KL / SnapKV's queries": data["ratio"].map(short),
        "95% interval": words.intervals(data, 3, short), "worst text": data["worst"].map(short),
        "needles, tokens right": [f"{x:.1%}" for x in data["needles"]],
    }  # fmt: skip
    best = data.iloc[0]
    return Exhibit(
        "caches_use",
        f"Which cache to use: with a quarter of the keys the default leaves "
        f"{words.times(best['ratio'])} of the KL and has {best['needles']:.1%} of the needles' "
        "tokens right",
        f"{records[0].model}, {best['task'].lower()}, {best['prompts']} prompts: KL from the exact "
        "prediction over that of the same score with SnapKV's queries. With all keys "
        f"{best['full']:.1%} of the needles' tokens are right. It saves memory, not time.",
        table=Table(data, pd.DataFrame(display)),
        listed="Which cache to use",
    )


def _exhibit(name: str, record: CacheRecord) -> Exhibit:
    data = pd.DataFrame(rows(record))
    data = data.assign(name=data["cache"], series=[f"{x:.3g} of the keys" for x in data["keep"]])
    written = {
        "cache": data["cache"], "keys": data["series"], "KL, nats": data["kl"].map(short),
        "KL / SnapKV's queries": data["ratio"].map(short),
        "95% interval": words.intervals(data, 3, short), "worst prompt": data["worst"].map(short),
    }  # fmt: skip
    notes = [
        f"The same score with SnapKV's queries (the last 32) is what others are divided by. "
        f"{data['prompts'][0]} prompts of {record.text}; intervals of geometric means, paired over "
        f"prompts. Published methods are at their authors' settings. Later queries are an oracle.",
    ]
    if data["prompts"][0] > 1:
        taus = {keep: _agreement(record, keep) for keep in sorted(data["keep"].unique())}
        written_taus = ", ".join(f"{tau:.2f} at {keep:.3g}" for keep, tau in taus.items())
        notes.append(
            f"Kendall's tau of the order of caches between halves of the prompts: {written_taus}"
            f"{'' if min(taus.values()) >= 0.8 else '; below .8 no order is claimed'}."
        )
    if record.task != "running_text":
        written["tokens right"] = [f"{x:.1%}" for x in data["right"]]
        written["answers right"] = [f"{x:.0%}" for x in data["whole"]]
        notes.append(f"The full cache has {data['right_full'][0]:.1%} of the tokens right.")
    if not data["tells"].all():
        notes.append("That is too few to tell caches apart: the model cannot do this task.")
    return Exhibit(
        name,
        _finding(data),
        f"KL from {record.model}'s exact prediction, a token, with a compressed cache: lower is "
        f"better.",
        notes,
        [_panel(data)],
        Table(data, pd.DataFrame(written)),
        listed=data["task"][0] + ", joint choice" * ("joint set" in set(data["cache"])),
    )


def _agreement(record: CacheRecord, keep: float) -> float:
    """Computes Kendall's tau between the orders of caches by KL on two halves of the prompts."""
    kl = np.log([cell.kl for cell in record.cells if cell.keep == keep])
    tau: float = kendalltau(kl[:, ::2].mean(axis=1), kl[:, 1::2].mean(axis=1)).statistic
    return tau


def _finding(data: pd.DataFrame) -> str:
    """Names the best cache that is no oracle, at the middle share of keys."""
    shares = sorted(data["keep"].unique())
    middle = data[(data["keep"] == shares[len(shares) // 2]) & ~data["cache"].str.contains("later")]
    best = middle.loc[middle["ratio"].idxmin()]
    return (
        f"{best['task']}, {best['series']}: {best['cache']} leaves {words.times(best['ratio'])} of "
        f"the KL that the same score from SnapKV's queries leaves"
    )


def _kind(cache: str) -> str:
    """Names, as in `look.CACHE_MARKS`, what chooses a cache's keys."""
    if "later" in cache:
        return "an oracle, later queries"
    if cache in look.CACHE_MARKS:
        return cache
    if cache.startswith("mean attention"):
        return "attention, one budget"
    if cache.startswith(("single losses", "joint set")):
        return f"value-aware, {'one budget' if 'one budget' in cache else 'other budgets'}"
    return "other published methods"


def _panel(data: pd.DataFrame) -> look.Panel:
    title = charts.direction("KL / single losses with SnapKV's queries", "lower")
    drawn = data.assign(value=data["ratio"])
    drawn = drawn.assign(said=words.sentences(drawn, "{name}, {series}"))
    x = charts.powers(
        alt.X,
        "value",
        title,
        drawn[["value", "low", "high"]].astype(float).stack().dropna().tolist(),
    )
    drawn["hue"] = drawn["cache"].map(_kind)
    return charts.toggled(
        [*charts.reference(1.0, "same"), *charts.dots(drawn, look.CACHE_MARKS, x)],
        34,
        data["task"][0],
    )
