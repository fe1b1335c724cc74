"""The answer as pictures: perplexity against keys, and facts right against keys kept in a cache."""

from collections.abc import Sequence

import altair as alt
import pandas as pd

from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.record import Record
from value_aware_study.report import charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits import caches, pretrained

MOST_TIMES = 22  # times exact: what lies above is cut off
NOT_DRAWN = "by weight + mean slot, exact mass"
SHORT = {
    "chosen for the output (OVA)": "OVA",
    "output, the mean a candidate": "OVA + mean",
    "by weight + mean slot": "mean slot",
    "chosen by weight (OVO)": "OVO",
    "first 4 + window": "window",
}
"""Names of curves on their lines: a long name would hide other lines"""
FACTS = [
    caches.DEFAULT_CACHE,
    "KVzip",
    "mean attention, all queries, one budget",
    "H2O",
    "recent (StreamingLLM)",
    "SnapKV",
]


def answer(records: Sequence[Record], prompted: Sequence[CacheRecord]) -> Exhibit | None:
    """Shows each decoder's perplexity against r, and a cache's right facts; None for no decoder."""
    if not (decoders := pretrained.decoders(records)):
        return None
    parts = {
        pretrained.label(record): pd.DataFrame(
            row for row in pretrained.curve_rows(record) if row["series"] != NOT_DRAWN
        )
        for record in decoders
    }
    panels = [_perplexity_panel(data, name) for name, data in parts.items()]
    told = [_floors(record) for record in decoders]
    facts = next((record for record in caches.pooled(prompted) if record.task == "needles"), None)
    if facts:
        data = pd.DataFrame(caches.rows(facts)).assign(model=facts.model, length=facts.prefix)
        parts[f"{facts.model}, facts in {facts.prefix:,} tokens, % right"] = _facts(data)
        panels.append(_facts_panel(_facts(data), 100 * data["right_full"][0]))
        told.append(_whole(data.set_index("cache")))
    data = pd.concat([data.assign(figure=name) for name, data in parts.items()], ignore_index=True)
    return Exhibit(
        "hero",
        pretrained.finding(decoders),
        " ".join(told),
        [
            f"{pretrained.SCORED} Above × {MOST_TIMES} curves are cut off. "
            f"{pretrained.origins(decoders)}"
        ],
        panels,
        Table(
            data,
            {
                "figure": data["figure"],
                "keys": data["series"],
                "r, or share kept": data["count"].map("{:.3g}".format),
                "value": data["value"].map("{:,.2f}".format),
                "95% interval": words.intervals(data, 2),
            },
            grouped=True,
        ),
        shared=True,
        listed="Keys and facts",
    )


def _perplexity_panel(data: pd.DataFrame, name: str) -> look.Panel:
    x = charts.count_axis("keys that each token may look at, r", data["count"].tolist())
    y = alt.Y(
        "value:Q",
        title="lower is better",
        scale=alt.Scale(type="log", domain=[0.84, MOST_TIMES], nice=False),
        axis=alt.Axis(values=[1, 1.5, 2, 3, 5, 10, 20], labelExpr="'× ' + datum.value"),
    )
    drawn = data[["series", "count", "value", "low", "high"]]
    sentences = words.sentences(drawn, "{series}, r = {count:.0f}, perplexity over exact")
    marks = {SHORT.get(name, name): mark for name, mark in pretrained.CURVE_MARKS.items()}
    drawn = drawn.assign(said=sentences, series=drawn["series"].replace(SHORT))
    lines = charts.on_lines(drawn, marks, x, y, exact=1.0)
    model, _, rest = name.partition(", ")
    return charts.figure(lines, [f"{model}: perplexity over exact's", rest])


def _facts(data: pd.DataFrame) -> pd.DataFrame:
    """Selects the caches of the figure, with percentages as values."""
    data = data[data["cache"].isin(FACTS)]
    percentages = {"value": "right", "low": "right_low", "high": "right_high"}
    return data[["model", "texts", "length", "prompts", "whole"]].assign(
        series=data["cache"].map(caches.label),
        count=data["keep"],
        **{end: 100 * data[name].astype(float) for end, name in percentages.items()},
    )


def _facts_panel(data: pd.DataFrame, full: float) -> look.Panel:
    shares = sorted(data["count"].unique())
    x = alt.X(
        "count:Q",
        title="share of the prompt's keys kept",
        scale=alt.Scale(type="log", domain=[shares[0] / 1.15, 1.15 * shares[-1]], nice=False),
        axis=alt.Axis(
            values=shares, labelExpr="'1/' + format(1 / datum.value, '.2~r')", grid=False
        ),
    )
    y = alt.Y(
        "value:Q",
        title="higher is better",
        scale=alt.Scale(type="linear", domain=[0, 105], nice=False),
        axis=alt.Axis(values=[0, 20, 40, 60, 80, 100]),
    )
    drawn = data[["series", "count", "value"]]
    sentences = words.sentences(drawn, "{series}, {count:.3g} of the keys", "% right")
    marks = {caches.label(cache): look.cache_mark(cache) for cache in FACTS}
    return charts.figure(
        charts.on_lines(drawn.assign(said=sentences), marks, x, y, exact=full),
        ["Facts in a prompt: answers' tokens", "right, %; dashed: with all keys"],
    )


def _floors(record: Record) -> str:
    """States the perplexity without keys, and without attention, as multiples of exact's."""
    rules = {"with the mean of all values": pretrained.MEAN_ALONE, "off": pretrained.NO_OUTPUT}
    floors = (
        f"; attention {name}: {words.times(pretrained.row_of(record, cell)['value'])}"
        for name, rule in rules.items()
        if (cell := pretrained.find(record, rule))
    )
    exact = record.cells[0].value
    return f"{pretrained.label(record)}: exact perplexity {exact:.1f}{''.join(floors)}."


def _whole(data: pd.DataFrame) -> str:
    """States the whole answers that caches with a quarter of the keys have right."""
    data = data[data["keep"].isin([caches.QUARTER, 1.0])]
    named = [cache for cache in (caches.FULL, *FACTS) if cache in data.index]
    each = (f"{caches.label(cache)} {data.loc[cache, 'whole']:.0%}" for cache in named)
    return (
        f"Whole answers right, of {data['prompts'].iloc[0]} prompts, with a quarter of the keys: "
        f"{', '.join(each)}."
    )
