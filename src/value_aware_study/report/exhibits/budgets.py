"""One budget for many heads, and models that decode with compressed caches.

Of budgets the gain of pooled keys over equal ones, and the heads that get them: every method is
compared with itself, with the same queries, search and number of keys in all. Of decoding quality
against memory and against time.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from value_aware_attention.measurement.cache_record import (
    FULL,
    CacheCell,
    CacheRecord,
    DecodingRecord,
)
from value_aware_study.report.charts import (
    JOINED,
    count_axis,
    curves,
    direction,
    figure,
    heat_map,
    powers,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.caches import (
    END,
    OBSERVED,
    OPENS,
    OWN,
    TRAININGS,
    distance,
    keys_of,
    label,
    named,
    ratio,
    ratios,
    shown,
)
from value_aware_study.report.look import SERIES, Mark, Panel
from value_aware_study.report.measured import FLOOR
from value_aware_study.report.results import RANGE, with_range
from value_aware_study.report.words import DASH, intervals, number, sentences, whole, with_interval

OWN_COLOURS = SERIES[2:]
"""Colours of cache methods: neither of the two oracles'"""
POOLED = "model"
SEES = "repeat"
"""Queries of the figures: every model with a prefix allows them."""
MEANING = (
    "Equal: every head keeps r keys. A budget a layer, or one for the model: r keys a head on "
    "average; in each text, the key whose loss costs the output least is dropped, again and again. "
    "One budget where it helps: the prefix is read once more with either choice, and a text gets "
    "the one budget if the model's outputs then stay nearer to the exact ones, otherwise r keys in "
    "every head. Profiled: the number of keys of each layer or head is the same for all texts, "
    "found on other texts by the KL that it costs there. Keys are counted as used, the 2 first and "
    "4 last of each head among them."
)
SAME = ["texts", "one key of", "r", "method", "observed", "budget"]


def by_memory(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Draws the model's distance from the exact one against the keys kept, equal and pooled."""
    found = {record.task: frame for record in records if len(frame := _curves(record))}
    if not found:
        return None
    curved = {task: frame for task, frame in found.items() if frame["count"].nunique() >= JOINED}
    found = curved or found  # the deeper models have two sizes
    data = pd.concat([frame.assign(texts=task) for task, frame in found.items()])
    milli = data.assign(**{end: 1e3 * data[end] for end in ("value", "low", "high")})
    display = data[["texts", "series"]].assign(
        r=data["count"].astype(str),
        distance=[number(value, 2) for value in milli["value"]],
        **{"95% interval": intervals(milli)},
    )
    return Exhibit(
        "cache_memory",
        "Quality against memory: one budget for the whole model, and equal ones",
        "KL from the exact model's next tokens with the method in all layers, in nats.",
        [MEANING, "Queries observed: those of the prefix read once more (repeat). The table has "
         "milli-nats."],
        [_memory_panel(task, frame) for task, frame in found.items()],
        Table(data, display),
        choices=list(found),
    )  # fmt: skip


def _curves(record: CacheRecord) -> pd.DataFrame:
    """Lists the cells of methods that were measured with one budget, at every size."""
    cells = [cell for cell in record.cells if shown(cell) == SEES and not cell.refits]
    pooled = {cell.method for cell in cells if cell.pool == POOLED}
    rows = [
        {"series": named(cell), "method": cell.method, "pool": cell.pool, "count": cell.r,
         "value": far.value, "low": far.low, "high": far.high}
        for cell in cells
        if cell.method in pooled and cell.pool in ("", POOLED)
        for far in [distance(cell)]
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _memory_panel(task: str, frame: pd.DataFrame) -> Panel:
    methods = list(dict.fromkeys(frame["method"]))
    one = frame.drop_duplicates("series")
    marks = {
        name: Mark.of(OWN_COLOURS[methods.index(method)], "circle" if pool else "cross")
        for name, method, pool in zip(one["series"], one["method"], one["pool"], strict=True)
    }
    frame = frame.assign(said=sentences(frame, "{series}, {count:,.0f} keys a head", " nats"))
    values = frame["value"].clip(FLOOR)
    ends = frame[["low", "high"]].clip(values.min() / 2, 2 * values.max())
    x = count_axis("keys kept of the prefix, a head on average", frame["count"].tolist())
    y = powers(alt.Y, "value", direction("KL, nats", "lower"), values.tolist(), room=2)
    return figure(curves(frame.assign(value=values, **ends), marks, x, y), task)


def gains(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Tabulates errors and the model's distances with other budgets over those with equal ones."""
    rows = [row for record in records for row in _gains(record)]
    if not rows:
        return None
    data = with_range(pd.DataFrame(rows), SAME, "distance")
    trainings = {"over trainings": intervals(data, 2, ends=RANGE)} if RANGE[0] in data else {}
    display = (
        data[SAME]
        .astype(str)
        .assign(
            method=data["method"].map(label),
            **{"KL over equal": ratios(data, "distance")},
            **trainings,
            **{
                "error over equal": ratios(data, "error"),
                "own measure, equal → this": [
                    f"{number(one, 3)} → {number(two, 3)}" if pd.notna(one) else ""
                    for one, two in zip(data["equal"], data["own"], strict=True)
                ],
            },
        )
    )
    return Exhibit(
        "cache_budgets",
        "What budgets other than equal ones gain",
        "Ratios to the same method with r keys in every head; below 1 it gains.",
        [
            MEANING,
            "Ratios of sums over the same texts, with paired 95% intervals. The own measure is the "
            "share of right answers, or, of Markov chains, nats above Bayes.",
            TRAININGS,
            OBSERVED,
        ],
        table=Table(data, display),
    )


def _gains(record: CacheRecord) -> Iterator[dict[str, Any]]:
    def place(cell: CacheCell) -> tuple[str, str, int]:
        return cell.method, shown(cell), cell.r

    equal = {place(cell): cell for cell in record.cells if not cell.pool}
    for cell in record.cells:
        base = equal.get(place(cell))
        if not cell.pool or base is None:
            continue
        own = next((name for name in OWN if name in cell.ends), None)
        far = next(name for name in END if name in cell.ends)
        keys = keys_of(record)
        yield {
            "texts": record.task, "one key of": keys // cell.r, "r": cell.r,
            "method": cell.method, "observed": shown(cell), "budget": cell.pool,
            **ratio(cell, base, far, "distance"), **ratio(cell, base, "error", "error"),
            "equal": own and base.ends[own].value, "own": own and cell.ends[own].value,
        }  # fmt: skip


def keys_by_head(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Draws the number of keys that each head keeps of one budget for the model."""
    rows = [
        {"texts": record.task, "r": cell.r, "observed": shown(cell), "layer": layer, "head": head,
         "value": keys}
        for record in records
        for cell in sorted(record.cells, key=lambda cell: cell.r)
        if cell.joint and not cell.refits and cell.pool == POOLED and shown(cell) == SEES
        for layer, heads in enumerate(cell.keys)
        for head, keys in enumerate(heads)
    ]  # fmt: skip
    if not rows:
        return None
    data = pd.DataFrame(rows)
    frame = data.assign(text=[whole(value) for value in data["value"]], low=None, high=None)
    display = data[["texts", "r", "layer", "head"]].astype(str).assign(keys=frame["text"])
    names = [f"{task}, r = {r}" for task, r in data[["texts", "r"]].drop_duplicates().to_numpy()]
    panels = [
        heat_map(part.drop(columns=["texts", "observed", "r"]), name, data["value"], " keys")
        for name, (_, part) in zip(names, frame.groupby(["texts", "r"], sort=False), strict=True)
    ]
    return Exhibit(
        "cache_keys",
        "Which layers and heads keep the keys of one budget",
        "Keys that each key-value head keeps, the mean over texts; r a head on average.",
        [MEANING],
        panels,
        Table(data, display),
        choices=names,
    )


DECODED = (
    "A prompt is read exactly, its cache is compressed, and the tokens after it are decoded one by "
    "one: KL from the model with its full cache, against the bytes of the cache and the time of a "
    "token."
)
DECODING = [
    "KL is in nats a token, with the text's tokens given. The shares of right answers and of equal "
    "tokens are of freely decoded tokens (always the most likely one), counted where the task asks "
    "for an answer. In texts and Markov chains, a right token is the text's own. Bytes are those "
    "that the layers hold of a compressed prompt: keys, values, and the places of keys.",
    "Time is the processor's for one token, in parts of the full cache's. With short prompts and "
    "small models it is that of the program around the attention; for long prompts see "
    "python -m benchmarks.decoding. Choosing is done once a prompt.",
]
SMALLEST = 1e-6
"""Least KL that is drawn, in nats: below it lies rounding."""
UNITS = "95% intervals over texts; of the time, over the parts in which texts were read."


def by_cache(records: Sequence[DecodingRecord]) -> Exhibit | None:
    """Draws KL against bytes and the time of a token for every cache, a choice a text."""
    if not records:
        return None
    known = {task: place for place, task in enumerate(OPENS)}
    ordered = sorted(records, key=lambda record: known.get(record.task, len(known)))
    data = pd.concat([_frame(record) for record in ordered], ignore_index=True)
    parts = list(data.groupby("texts", sort=False))
    return Exhibit(
        "decoding",
        "Decoding with a compressed cache",
        DECODED,
        [*DECODING, UNITS],
        [
            _panel(frame, against, title)
            for _, frame in parts
            for against, title in (
                (frame["bytes"] / frame["full_bytes"], "bytes"),
                (frame["time"], "time a token"),
            )
        ],
        Table(data, _display(data)),
        choices=[str(name) for name, _ in parts],
    )


def _frame(record: DecodingRecord) -> pd.DataFrame:
    """Lists the cells of a record, a row each."""
    rows = []
    for cell in record.cells:
        row = {
            "texts": record.task, "cache": cell.cache, "keep": cell.keep, "r": cell.r,
            "bytes": cell.bytes, "full_bytes": cell.full_bytes, "ms": cell.milliseconds,
            "prompt_seconds": cell.prompt_seconds, "choosing_seconds": cell.choosing_seconds,
        }  # fmt: skip
        for name in ("kl", "nats", "right", "same", "time"):
            ends = getattr(cell, name)
            row |= {name: ends.value, f"{name}_low": ends.low, f"{name}_high": ends.high}
        rows.append(row)
    return pd.DataFrame(rows)


def _display(data: pd.DataFrame) -> pd.DataFrame:
    def shown(name: str, digits: int, times: float = 1.0) -> list[str]:
        rows = data[[name, f"{name}_low", f"{name}_high"]].astype(float) * times
        return [with_interval(v, low, high, digits) for v, low, high in rows.to_numpy()]

    def numbers(values: pd.Series, digits: int) -> list[str]:
        return [number(value, digits) for value in values]

    of_full = (data["cache"] == FULL).to_numpy()
    return data[["texts", "cache"]].assign(
        **{
            "keys kept, %": numbers(100 * data["keep"], 1),
            "KL, nats": np.where(of_full, DASH, shown("kl", 4)),
            "right, %": shown("right", 1, 100),
            "as the full cache, %": shown("same", 1, 100),
            "KiB": numbers(data["bytes"] / 1024, 1),
            "bytes, %": numbers(100 * data["bytes"] / data["full_bytes"], 1),
            "ms a token": numbers(data["ms"], 2),
            "choosing, s": np.where(of_full, DASH, numbers(data["choosing_seconds"], 3)),
        }
    )


def _marks(frame: pd.DataFrame) -> dict[str, Mark]:
    names = [name for name in dict.fromkeys(frame["cache"]) if name != FULL]
    return {name: Mark.of(OWN_COLOURS[place]) for place, name in enumerate(names)}


def _panel(frame: pd.DataFrame, against: pd.Series, title: str) -> Panel:
    """Draws KL against bytes or time, in parts of the full cache's."""
    drawn = frame["cache"] != FULL
    values = frame.loc[drawn, ["kl", "kl_low", "kl_high"]].astype(float).clip(lower=SMALLEST)
    low, high = values["kl"].min() / 2, 2 * values["kl"].max()
    points = pd.DataFrame(
        {
            "series": frame["cache"][drawn],
            "count": against[drawn],
            "value": values["kl"],
            "low": values["kl_low"].clip(low, high),
            "high": values["kl_high"].clip(low, high),
        }
    )
    told = points.assign(
        **frame.loc[drawn, ["kl_low", "kl_high"]].set_axis(["low", "high"], axis=1)
    )
    told["value"] = frame.loc[drawn, "kl"]
    points["said"] = sentences(told, f"{{series}}, {{count:.0%}} of the {title}", " nats")
    x = alt.X("count:Q", title=f"{title}, of the full cache's", axis=alt.Axis(format=".0%"))
    y = powers(alt.Y, "value", direction("KL, nats", "lower"), [low, high], room=1)
    return figure(curves(points, _marks(frame), x, y), f"{frame['texts'].iloc[0]}: {title}")
