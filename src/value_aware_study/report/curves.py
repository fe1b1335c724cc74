"""Curves against a count of keys, with their intervals.

They are drawn from a frame with the columns `series`, `count`, `value`, and `low` and `high`, the
ends of the value's 95% interval.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_study.report.look import OPACITY, SHOWN, Mark, Panel

__all__ = ["count_axis", "curves", "figure", "level", "powers", "powers_of_two", "upright"]

HEIGHT = 300


def powers_of_two(values: Iterable[float]) -> list[int]:
    """Ticks of an axis of counts: the powers of two that span the values."""
    counts = list(values)
    first, last = math.floor(math.log2(min(counts))), math.ceil(math.log2(max(counts)))
    return [2**power for power in range(first, last + 1)]


def count_axis(title: str, values: Sequence[float]) -> alt.X:
    """A logarithmic axis of counts, marked at the powers of two."""
    domain = [min(values) / 1.2, max(values) * 1.2]
    scale = alt.Scale(type="log", base=2, domain=domain, nice=False)
    axis = alt.Axis(values=powers_of_two(values), format="d", grid=False, labelOverlap="parity")
    return alt.X("count:Q", title=title, scale=scale, axis=axis)


def powers(kind: Any, field: str, title: str, values: Iterable[float], room: float = 1.5) -> Any:
    """A logarithmic axis (`kind` alt.X or alt.Y) marked at the powers of ten: 1e-4, 1e0, 1e2."""
    low, high = min(values), max(values)
    ticks = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    label = "'1e' + round(log(datum.value) / LN10)"
    axis = alt.Axis(values=[10.0**power for power in ticks], labelExpr=label)
    scale = alt.Scale(type="log", domain=[low / room, high * room], nice=False)
    return kind(f"{field}:Q", title=title, scale=scale, axis=axis)


def curves(frame: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Intervals, lines and points of every series."""
    ends = [name for name in ("low", "high") if name in frame and frame[name].notna().any()]
    names = list(marks)
    colours = alt.Scale(domain=names, range=[mark.colour for mark in marks.values()])
    shapes = alt.Scale(domain=names, range=[mark.shape for mark in marks.values()])
    numbers = [alt.Tooltip(f"{name}:Q", format=".5~g") for name in ("count", "value", *ends)]
    base = alt.Chart(frame[["series", "count", "value", *ends]]).encode(
        x=x,
        y=y,
        color=alt.Color("series:N", scale=colours, legend=alt.Legend(orient="bottom", columns=2)),
        opacity=OPACITY,
        tooltip=["series:N", *numbers],
    )
    points = base.mark_point(filled=True, size=60)
    layers = [base.mark_line(), points.encode(shape=alt.Shape("series:N", scale=shapes))]
    if ends:
        low = y.copy()
        low.shorthand = "low:Q"
        layers.insert(0, base.mark_rule(strokeWidth=1.4).encode(y=low, y2="high:Q"))
    return layers


def level(value: float, name: str) -> list[alt.Chart]:
    """A dashed horizontal line at a value, with its name under its left end."""
    base = alt.Chart(pd.DataFrame({"value": [value], "name": [name]})).encode(y="value:Q")
    label = base.mark_text(align="left", baseline="top", dy=5)
    return [base.mark_rule(strokeDash=[5, 4]), label.encode(x=alt.value(6), text="name:N")]


def upright(count: int, name: str) -> list[alt.Chart]:
    """A thin vertical line at a count, with its name above it."""
    base = alt.Chart(pd.DataFrame({"count": [count], "name": [name]})).encode(x="count:Q")
    label = base.mark_text(align="right", baseline="bottom", dx=4, dy=-4)
    return [base.mark_rule(), label.encode(y=alt.value(0), text="name:N")]


def figure(layers: Sequence[alt.Chart], title: str = "", height: int = HEIGHT) -> Panel:
    """Layers as one panel as wide as its place; its legend toggles series."""
    panel = alt.layer(*layers).properties(width="container", height=height)
    return (panel.properties(title=title) if title else panel).add_params(SHOWN)
