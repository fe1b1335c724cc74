"""Every head of every layer of a model: its output error, and the keys that it needs."""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import interval
from value_aware_study.report.look import Panel
from value_aware_study.report.measurements import AWARE, NONE, OBLIVIOUS
from value_aware_study.report.oracles import NAMES

__all__ = ["error_by_head", "heat_size", "keys_by_head"]

SIZE, SHARE = 4, 0.05
BRIGHT = 0.55
"""Of the scale of colours: from here on text is black."""
LABELLED_HEADS = 16
"""Up to so many, cells carry their numbers."""
SCALE = (
    "Both panels have one logarithmic scale of colours, from the first percentile on; the "
    "brighter, the more."
)
Rows = list[dict[str, Any]]


def heat_size(record: Record) -> int:
    """The number of keys of the heat map: 4, or the measured one nearest to it."""
    sizes = {cell.parameters["r"] for cell in record.cells[1:]}
    return min(sizes, key=lambda size: (abs(size - SIZE), size))


def error_by_head(record: Record, name: str, setting: str) -> Exhibit:
    """The relative output error of each head with few keys, in percent."""
    size = heat_size(record)
    rows: Rows = [
        {"method": at.method, "layer": at.layer, "head": at.head}
        | {"value": _percent(at.error), "low": _percent(at.low), "high": _percent(at.high)}
        for at in record.attention[0].output_error.errors
        if at.r == size and at.head is not None
    ]
    title, caption = (
        f"Output error of each head with {size} keys",
        f"Relative squared output error with {size} keys, in percent; lower is better.",
    )
    return _exhibit(name, title, caption, [SCALE, captions.BEST_FOUND, setting], rows, two_digits)


def keys_by_head(record: Record, name: str, setting: str) -> Exhibit:
    """The keys that each head needs for 5% error."""
    rows: Rows = [
        {"method": row.method, "layer": row.layer, "head": row.head}
        | {"value": row.keys, "low": row.low, "high": row.high}
        for row in record.attention[0].output_error.keys_needed
        if row.head is not None and row.share == SHARE
    ]
    title = f"Keys that each head needs for an output error of {SHARE:.0%}"
    caption = f"The fewest of {record.length:,} keys; lower is better."
    return _exhibit(name, title, caption, [SCALE, captions.BEST_FOUND, setting], rows, number_of)


def two_digits(value: float) -> str:
    """A percentage to two significant digits: "35", "3.5", "0.35", "<.01"."""
    return "<.01" if value < 0.01 else f"{float(f'{value:.2g}'):g}"


def number_of(value: float) -> str:
    """A count: "1,024"."""
    return f"{value:,.0f}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _exhibit(
    name: str,
    title: str,
    caption: str,
    notes: Sequence[str],
    rows: Rows,
    text: Callable[[float], str],
) -> Exhibit:
    frame = pd.DataFrame(rows)
    shown = [NONE if pd.isna(value) else text(value) for value in frame["value"]]
    frame = frame.astype({"value": float}).assign(text=shown)
    methods = (OBLIVIOUS, AWARE)
    return Exhibit(
        name, title, caption, notes, [_heat_map(frame, method) for method in methods], _table(frame)
    )


def _heat_map(frame: pd.DataFrame, method: str) -> Panel:
    """Layers by heads, as wide as its place; the smallest percent of the values is one colour."""
    heads = int(frame["head"].max()) + 1
    first = max(float(frame["value"].quantile(0.01)), 1e-6)
    last = max(float(frame["value"].max()), first * 1.01)
    scale = alt.Scale(type="log", scheme="viridis", domain=[first, last], clamp=True)
    shown: list[Any] = ["layer:O", "head:O", alt.Tooltip("value:Q", format=".3~g")]
    if frame["low"].notna().all():
        shown += [alt.Tooltip(f"{end}:Q", format=".3~g") for end in ("low", "high")]
    places = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False)
    base = alt.Chart(frame[frame["method"] == method].drop(columns="method")).encode(
        x=alt.X("head:O", title="head", axis=places),
        y=alt.Y("layer:O", title="layer", axis=places),
        tooltip=shown,
    )
    cells = [base.mark_rect().encode(color=alt.Color("value:Q", scale=scale, legend=None))]
    if heads <= LABELLED_HEADS:
        bright = f"log(datum.value / {first}) > {BRIGHT} * log({last} / {first})"
        black, white, grey = (alt.value(colour) for colour in ("black", "white", "grey"))
        without = "!isValid(datum.value)"  # a cell without a number is not filled
        ink = alt.when(without).then(grey).when(bright).then(black).otherwise(white)
        size = alt.ExprRef(f"max(8, min(13, width / {heads} / 2.8))")
        cells.append(base.mark_text(fontSize=size).encode(text="text:N", color=ink))
    height = 26 * frame["layer"].nunique()
    return alt.layer(*cells, title=NAMES[method]).properties(width="container", height=height)


def _table(frame: pd.DataFrame) -> Table:
    """One row a layer, head and method."""
    data = frame.drop(columns="text")
    display = data[["layer", "head"]].astype(str)
    display["method"] = data["method"].map(NAMES)
    display["value"] = frame["text"]
    display["95% interval"] = [
        interval(*ends, 2) for ends in zip(data["low"], data["high"], strict=True)
    ]
    return Table(data, display)
