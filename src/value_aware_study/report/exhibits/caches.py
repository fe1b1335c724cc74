"""Compressed caches of a pretrained decoder, on prompts with continuations unseen by them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import altair as alt
import numpy as np
import pandas as pd

from value_aware_attention.records.cache_record import FULL, CacheRecord
from value_aware_attention.records.estimate import DASH, short, with_interval
from value_aware_study.report import charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import Row

REFERENCE_CACHE = "single losses, SnapKV's queries"
"""The reference of the ratios in the files: the same score from the queries that SnapKV observes"""
LEAST_RIGHT = 0.5
"""Share of right tokens of the full cache; below it, a task does not distinguish caches"""
MOST_SHOWN = 9
"""Most caches in a figure; its numbers have all"""
QUARTER = 0.25
DEFAULT_CACHE = "single losses, all queries, one budget"
USES = {
    FULL: ("all keys", DASH),
    DEFAULT_CACHE: ("the default", "LeaveOneOut"),
    "KVzip": ("KVzip (reads twice)", "its authors' settings"),
    "mean attention, all queries, one budget": ("mean attention", "ObservedAttention"),
    "single losses, 128 queries, one budget": ("a quicker choice", "LeaveOneOut, rows=128"),
    "single losses, all queries": ("as many keys in every head", "LeaveOneOut, pool=None"),
    "H2O": ("H2O", "its authors' settings"),
    "recent (StreamingLLM)": ("StreamingLLM", "its authors' settings"),
    "SnapKV": ("SnapKV", "its authors' settings"),
}
"""Caches that stand out: their displayed name and their setting"""
PROMPT_TITLES = {
    "running_text": "Running text",
    "needles": "Facts",
    "recalled_list": "A recalled list",
}
KL_ENDS, ENDS = ["kl", "kl_low", "kl_high"], ("value", *charts.END_COLUMNS)


def label(cache: str) -> str:
    return USES.get(cache, (cache, ""))[0]


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
    """Tabulates the cells: KL, right tokens and whole answers, and KL over `REFERENCE_CACHE`'s."""
    others = {cell.keep: cell for cell in record.cells if cell.cache == REFERENCE_CACHE}
    for cell in record.cells:
        row: Row = {
            "task": f"{PROMPT_TITLES[record.task]}, {record.prefix:,} tokens", "texts": record.text,
            "prompts": len(cell.kl), "keep": cell.keep, "cache": cell.cache,
            "kl": float(np.mean(cell.kl)),
        }  # fmt: skip
        if other := others.get(cell.keep):
            row |= {"ratio" if end == "value" else end: x
                    for end, x in vars(record.ratio(cell, other)).items()}  # fmt: skip
            row["worst"] = max(np.divide(cell.kl, other.kl))
        yield row | {
            "right": float(np.mean(cell.right)), "whole": float(np.mean(np.equal(cell.right, 1))),
            "nats": float(np.mean(cell.nats)), "right_full": float(np.mean(record.cells[0].right)),
            **{
                f"{name}_{end}": getattr(cell.ends[name], end)
                for name in ("kl", "right")
                for end in charts.END_COLUMNS
            },
        }  # fmt: skip


def caches_compared(records: Sequence[CacheRecord]) -> list[Exhibit]:
    """Shows the losses of caches on each kind of prompt, at every share of keys."""
    return [
        _exhibit(f"caches_{number}", record)
        for number, record in enumerate(pooled(records), start=1)
    ]


def to_use(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Tabulates the caches of `USES` with a quarter of the keys; None if none was measured."""
    tables: dict[str, pd.DataFrame] = {}
    for record in pooled([r for r in records if r.model == records[0].model]):
        data = pd.DataFrame(rows(record))
        data = data[data["keep"].isin([QUARTER, 1.0])].set_index("cache")
        if {FULL, DEFAULT_CACHE} <= set(data.index):
            tables.setdefault(record.task, data)
    if not {"running_text", "needles"} <= set(tables):
        return None
    names = [name for name in USES if any(name in data.index for data in tables.values())]
    columns = ["prompts", "right", "whole", "kl", "kl_low", "kl_high"]
    data = pd.concat(
        {task: data.reindex(names)[columns] for task, data in tables.items()}, axis="columns"
    )
    text, facts = tables["running_text"].loc[DEFAULT_CACHE], tables["needles"].loc[DEFAULT_CACHE]
    display = {
        "cache": [USES[name][0] for name in names],
        "setting": [USES[name][1] for name in names],
        "text: next tokens right": percent(data["running_text", "right"]),
        "facts: tokens right": percent(data["needles", "right"]),
        "facts: whole answers right": percent(data["needles", "whole"], 0),
    }
    if "recalled_list" in tables:
        display["a list: tokens right"] = percent(data["recalled_list", "right"])
    display["text: KL, nats a token"] = data["running_text", "kl"].map(short).tolist()
    counts = (f"{PROMPT_TITLES[k].lower()} {of['prompts'].iloc[0]}" for k, of in tables.items())
    return Exhibit(
        "caches_use",
        f"Which cache to use: with a quarter of the keys the default has {facts['right']:.1%} of "
        f"the facts' tokens right, of {facts['right_full']:.1%} with all keys",
        f"{records[0].model}, {text['task'].partition(', ')[2]}. Prompts: {', '.join(counts)}. A "
        "fact is asked for after the keys are chosen. A compressed cache saves memory before time.",
        table=Table(
            data.set_axis([f"{task}_{name}" for task, name in data], axis=1).reset_index(), display
        ),
        listed="Which cache to use",
    )


def percent(shares: pd.Series, digits: int = 1) -> list[str]:
    """Writes shares as percentages, and what was not measured as a dash."""
    return [DASH if words.missing(x) else f"{x:.{digits}%}" for x in shares]


def _exhibit(name: str, record: CacheRecord) -> Exhibit:
    data = pd.DataFrame(rows(record))
    shares = sorted(set(data["keep"]) - {1.0})
    middle = shares[len(shares) // 2]
    first = [1.0, middle, *reversed(shares)]
    data = data.assign(place=data["keep"].map(first.index)).sort_values(["place", "kl"])
    data = data.drop(columns="place").reset_index(drop=True)
    full, prompts = data.iloc[0], int(data["prompts"][0])
    best = data[(data["keep"] == middle) & ~data["cache"].str.contains("later")].iloc[0]
    notes = [
        f"{prompts} prompts of {record.text}; 95% intervals over prompts. Published methods have "
        "their authors' settings. A cache that sees later queries is an oracle.",
    ]
    caption = "KL from its exact prediction, in nats a token. Lower is better."
    if record.task != "running_text":
        caption = (
            f"the answers' tokens right. With all keys {full['right']:.1%} are, and "
            f"{full['whole']:.0%} of whole answers."
        )
        if full["right"] < LEAST_RIGHT:
            notes.append("That is too few to tell caches apart: the model cannot do this task.")
    return Exhibit(
        name,
        _finding(best),
        f"{record.model} with a compressed cache, {prompts} prompts: {caption}",
        notes,
        [_panel(data, record, best["cache"])],
        _table(data, record),
        listed=full["task"] + ", joint choice" * ("joint set" in set(data["cache"])),
    )


def _table(data: pd.DataFrame, record: CacheRecord) -> Table:
    of_text = record.task == "running_text"
    whole = {} if of_text else {"whole answers right": percent(data["whole"], 0)}
    kl = [with_interval(x, low, high, 3, short) for x, low, high in data[KL_ENDS].to_numpy()]
    return Table(
        data,
        {
            "keys kept": data["keep"].map(share),
            "cache": data["cache"].map(label),
            "next tokens right" if of_text else "tokens right": percent(data["right"]),
            **whole,
            "KL, nats a token": kl,
        },
        grouped=True,
    )


def share(keep: float) -> str:
    return "all keys" if keep == 1 else f"{keep:.3g} of the keys"


def _finding(best: pd.Series) -> str:
    """Names the cache of least KL that is no oracle, at one share of keys."""
    return (
        f"{best['task']}, {share(best['keep'])}: predictions change least with "
        f"{label(best['cache'])}, {best['right']:.1%} of the tokens right of "
        f"{best['right_full']:.1%} with all keys"
    )


def _panel(data: pd.DataFrame, record: CacheRecord, best: str) -> look.Panel:
    """Draws the cache that the title names and those of `USES`, filled up with those of least KL.

    The best stand first.
    """
    data, of_text = data[data["keep"] < 1], record.task == "running_text"
    uses = [cache for cache in USES if cache in set(data["cache"])]
    names = [*dict.fromkeys([best, *uses, *data["cache"]])][:MOST_SHOWN]
    drawn = data[data["cache"].isin(names)]
    drawn = drawn.assign(name=drawn["cache"].map(label), series=drawn["keep"].map(share))
    order = drawn["name"].unique().tolist()
    if of_text:
        drawn = drawn.assign(**dict(zip(ENDS, drawn[KL_ENDS].to_numpy().T, strict=True)))
        numbers = drawn[list(ENDS)].astype(float).stack().dropna()
        title = charts.direction("KL, nats a token", "lower")
        x = charts.powers(alt.X, "value", title, numbers[numbers > 0].tolist())
    else:
        drawn = drawn.assign(value=100 * drawn["right"], low=np.nan, high=np.nan)
        title = charts.direction("tokens right, %", "higher")
        x = alt.X("value:Q", title=title, scale=alt.Scale(domain=[0, 100]))
    sentences = words.sentences(drawn, "{name}, {series}", " nats" if of_text else "% right")
    drawn = drawn[["name", "series", *ENDS]].assign(hue=drawn["name"], said=sentences)
    marks = {label(name): look.cache_mark(name) for name in names}
    marks |= {
        share(keep): look.Mark("var(--muted)", look.SHARE_SHAPES.get(keep, "diamond"))
        for keep in sorted(set(data["keep"]), reverse=True)
    }
    full = [] if of_text else charts.reference(100 * data["right_full"].iloc[0], "all keys")
    dots = charts.dots(drawn, marks, x, order=order)
    return charts.toggled([*full, *dots], 34, data["task"].iloc[0])
