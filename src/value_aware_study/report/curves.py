"""Curves against the number of keys, with their intervals.

A frame has the columns `r`, `series` and `value`, and `low` and `high` where intervals are known.
"""

import math
from collections.abc import Mapping, Sequence

import altair as alt
import pandas as pd

from value_aware_study.report.look import SHOWN, Mark, Panel

__all__ = [
    "FLOOR",
    "count_axis",
    "curves",
    "error_axis",
    "level",
    "panel",
    "powers_of_two",
    "upright",
]

HEIGHT = 300
FLOOR = 1e-6
"""Smaller relative errors, zero included, are drawn here: below it is mostly rounding."""


def powers_of_two(first: float, last: float) -> list[int]:
    """Ticks of an axis of counts: the powers of two that span them."""
    return [2**power for power in range(int(math.log2(first)), math.ceil(math.log2(last)) + 1)]


def count_axis(title: str, first: float, last: float, field: str = "r") -> alt.X:
    """A logarithmic axis of keys, marked at powers of two."""
    scale = alt.Scale(type="log", base=2, domain=[first / 1.2, last * 1.2], nice=False)
    ticks = powers_of_two(first, last)
    axis = alt.Axis(values=ticks, format="d", grid=False, labelOverlap="parity")
    return alt.X(f"{field}:Q", title=title, scale=scale, axis=axis)


def error_axis(title: str, highest: float, field: str = "value") -> alt.Y:
    """A logarithmic axis of relative errors from `FLOOR` on, labelled 1e-6, 1e-5, ..."""
    powers = range(round(math.log10(FLOOR)), math.ceil(math.log10(highest)) + 1)
    scale = alt.Scale(type="log", domain=[FLOOR / 1.5, highest * 1.3], nice=False)
    label = "'1e' + round(log(datum.value) / LN10)"
    axis = alt.Axis(values=[10.0**power for power in powers], labelExpr=label)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=axis)


def curves(frame: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """A line a series, marks at powers of two, and intervals where they are known."""
    ends = [name for name in ("low", "high") if name in frame and frame[name].notna().any()]
    names = list(marks)
    colours = alt.Scale(domain=names, range=[mark.colour for mark in marks.values()])
    shapes = alt.Scale(domain=names, range=[mark.shape for mark in marks.values()])
    base = alt.Chart(frame[["r", "series", "value", *ends]]).encode(
        x=x,
        y=y,
        color=alt.Color("series:N", scale=colours, legend=alt.Legend(orient="bottom", columns=2)),
        opacity=alt.when(SHOWN).then(alt.value(1)).otherwise(alt.value(0.1)),
        tooltip=[
            "series:N",
            "r:Q",
            *(alt.Tooltip(f"{n}:Q", format=".4~g") for n in ("value", *ends)),
        ],
    )
    points = base.transform_filter("log(datum.r) / LN2 % 1 == 0").mark_point(filled=True, size=60)
    layers = [
        base.mark_line(strokeWidth=2),
        points.encode(shape=alt.Shape("series:N", scale=shapes)),
    ]
    if ends:
        bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.4)
        layers.insert(0, bars.encode(y=_of(y, "low"), y2="high:Q"))
    return layers


def _of(y: alt.Y, field: str) -> alt.Y:
    """The axis for another field."""
    other = y.copy()
    other.shorthand = f"{field}:Q"
    return other


def level(value: float, name: str, y: alt.Y) -> list[alt.Chart]:
    """A dashed horizontal line at a value, with its name at its left end."""
    frame = pd.DataFrame({"level": [value], "name": [name]})
    base = alt.Chart(frame).encode(y=_of(y, "level"))
    label = base.mark_text(align="left", baseline="bottom", dx=4, dy=-3)
    return [base.mark_rule(strokeDash=[5, 4]), label.encode(x=alt.value(0), text="name:N")]


def upright(keys: int, name: str) -> list[alt.Chart]:
    """A thin vertical line at a number of keys, with its name above it."""
    base = alt.Chart(pd.DataFrame({"keys": [keys], "name": [name]})).encode(x="keys:Q")
    label = base.mark_text(align="right", baseline="bottom", dx=4, dy=-4)
    return [base.mark_rule(strokeWidth=1), label.encode(y=alt.value(0), text="name:N")]


def panel(layers: Sequence[alt.Chart], title: str) -> Panel:
    """Layers as one chart as wide as its place; its legend toggles series."""
    chart = alt.layer(*layers, title=alt.Title(title, offset=16))
    return chart.properties(width="container", height=HEIGHT).add_params(SHOWN)
