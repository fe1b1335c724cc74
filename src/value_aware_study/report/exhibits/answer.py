"""The answer as pictures: perplexity against keys, and facts right against keys kept in a cache."""

from collections.abc import Iterator, Sequence

import altair as alt
import pandas as pd

from value_aware_attention.records.cache_record import FULL, CacheRecord
from value_aware_attention.records.record import Record
from value_aware_study.report import charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits import caches, pretrained
from value_aware_study.report.frame import Row

MOST_TIMES = 22
"""Largest ratio of perplexities on the axis; what lies above it is cut off"""
TIMES = [1, 1.5, 2, 3, 5, 10, 20]
FACTS = {
    caches.DEFAULT: "the default",
    "KVzip": "KVzip (reads twice)",
    "mean attention, all queries, one budget": "mean attention",
    "H2O": "H2O",
    "recent (StreamingLLM)": "StreamingLLM",
    "SnapKV": "SnapKV",
}
"""Caches of the figure, with their names on the lines"""
HIDDEN = "by weight + mean slot, exact mass"


def answer(records: Sequence[Record], prompted: Sequence[CacheRecord]) -> Exhibit | None:
    """Shows each decoder's perplexity against r, and a cache's right facts; None for no decoder."""
    if not (decoders := pretrained.decoders(records)):
        return None
    parts = [(pretrained.label(record), pd.DataFrame(_ratios(record))) for record in decoders]
    panels = [_perplexity_panel(data, name) for name, data in parts]
    facts = next((r for r in caches.pooled(prompted) if r.task == "needles"), None)
    captions = [_floors(record) for record in decoders]
    if facts:
        data = pd.DataFrame(_facts(facts))
        parts.append((f"facts: {facts.prefix:,} tokens, {facts.model}", data))
        panels.append(_facts_panel(data, facts))
        captions.append(_whole(facts))
    data = pd.concat([data.assign(figure=name) for name, data in parts], ignore_index=True)
    return Exhibit(
        "hero",
        pretrained.finding(decoders),
        " ".join(captions),
        [
            f"{pretrained.SCORED} Bars: 95% intervals over windows. Perplexities above "
            f"× {MOST_TIMES} are cut off; the numbers have them. "
            f"{pretrained.origins(decoders)}"
        ],
        panels,
        Table(
            data,
            {
                "figure": data["figure"],
                "keys chosen": data["series"],
                "r, or share kept": data["count"].map("{:.3g}".format),
                "value": [
                    f"{value:.1f}%" if at < 1 else words.times(value)
                    for at, value in zip(data["count"], data["value"], strict=True)
                ],
                "95% interval": words.intervals(data, 2),
            },
            grouped=True,
        ),
        shared=True,
        listed="Keys and facts",
    )


def _ratios(record: Record) -> Iterator[Row]:
    """Yields perplexity over exact attention's, of every rule with a curve, and of a window."""
    for row in pretrained.curve_rows(record):
        if row["series"] != HIDDEN:
            yield row
    if window := pretrained.find(record, pretrained.WINDOW):
        row = pretrained.row_of(record, window)
        yield {"series": "first 4 + last 12 tokens", "count": 16} | row


def _perplexity_panel(data: pd.DataFrame, name: str) -> look.Panel:
    x = charts.count_axis("keys that each token may look at, r", data["count"].tolist())
    y = alt.Y(
        "value:Q",
        title="lower is better",
        scale=alt.Scale(type="log", domain=[0.93, MOST_TIMES], nice=False),
        axis=alt.Axis(values=TIMES, labelExpr="'× ' + datum.value"),
    )
    drawn = data[["series", "count", "value", "low", "high"]]
    drawn = drawn.assign(
        said=words.sentences(drawn, "{series}, r = {count:.0f}, perplexity over exact")
    )
    model, _, rest = name.partition(", ")
    title = [f"{model}: perplexity over exact's", rest]
    marks = pretrained.CURVE_MARKS | {"first 4 + last 12 tokens": look.Mark.of("green")}
    return charts.figure([*charts.level(1.0), *charts.on_lines(drawn, marks, x, y)], title)


def _facts(record: CacheRecord) -> Iterator[Row]:
    for row in caches.rows(record):
        if row["cache"] in FACTS:
            ends = {"value": "right", "low": "right_low", "high": "right_high"}
            yield {"model": record.model, "text": record.text, "length": record.prefix} | {
                "series": FACTS[row["cache"]], "count": row["keep"], "whole": row["whole"],
                **{end: None if row[name] is None else 100 * row[name]
                   for end, name in ends.items()},
            }  # fmt: skip


def _facts_panel(data: pd.DataFrame, record: CacheRecord) -> look.Panel:
    shares = sorted(data["count"].unique())
    x = alt.X(
        "count:Q",
        title="share of the prompt's keys kept",
        scale=alt.Scale(
            type="log", base=2, domain=[shares[0] / 1.15, 1.15 * shares[-1]], nice=False
        ),
        axis=alt.Axis(
            values=shares, labelExpr="'1/' + format(1 / datum.value, '.2~r')", grid=False
        ),
    )
    y = alt.Y("value:Q", title="higher is better", scale=alt.Scale(type="linear", domain=[0, 105]))
    drawn = data[["series", "count", "value"]]
    drawn = drawn.assign(
        said=words.sentences(drawn, "{series}, {count:.3g} of the keys", "% right")
    )
    marks = {name: look.cache_mark(cache) for cache, name in FACTS.items()}
    full = 100 * sum(record.cells[0].right) / len(record.cells[0].right)
    title = ["Facts in a prompt: answers' tokens", "right, %; dashed: with all keys"]
    return charts.figure([*charts.level(full), *charts.on_lines(drawn, marks, x, y)], title)


def _floors(record: Record) -> str:
    """States the perplexity without keys, and without attention, as multiples of exact's."""
    rules = {"the mean of all values": pretrained.MEAN_ALONE, "no attention": pretrained.NO_OUTPUT}
    found = {name: cell for name, rule in rules.items() if (cell := pretrained.find(record, rule))}
    each = (
        f"{words.times(pretrained.row_of(record, cell)['value'])} for {name}"
        for name, cell in found.items()
    )
    exact = f"{pretrained.label(record)}: exact perplexity {record.cells[0].value:.1f}"
    return "; ".join([exact, *each]) + "."


def _whole(record: CacheRecord) -> str:
    """States the whole answers that caches with a quarter of the keys have right."""
    names = {FULL: "all keys"} | FACTS
    each = (
        f"{names[row['cache']]} {row['whole']:.0%}"
        for row in caches.rows(record)
        if row["cache"] in names and row["keep"] in (caches.QUARTER, 1.0)
    )
    prompts = len(record.cells[0].right)
    return (
        f"Whole answers right, of {prompts} prompts, with a quarter of the keys: {', '.join(each)}."
    )
