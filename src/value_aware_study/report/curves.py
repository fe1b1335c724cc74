"""Curves against a count: keys that a query keeps, random features, steps of training.

They are drawn from a frame with the columns `series`, `count`, `value`, and `low` and `high`, the
ends of the value's 95% interval; where models were trained again, also with `trained_low` and
`trained_high`, the range over the trainings.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt
import pandas as pd

from value_aware_study.report.look import OPACITY, SHOWN, Mark, Panel, layered
from value_aware_study.report.replicates import RANGE, ranged

__all__ = [
    "PLAIN",
    "QUIET",
    "Look",
    "change_axis",
    "count_axis",
    "curves",
    "extent",
    "figure",
    "level",
    "powers",
    "powers_of_ten",
    "powers_of_two",
    "upright",
]

HEIGHT = 300
JOINED = 3
"""A series of fewer points is not joined: what lies between them was not measured."""
STEPS = [step * 10.0**power for power in range(-3, 3) for step in (1, 3)]


class Look(NamedTuple):
    """How heavy a curve is: the width of its line, the area of its points."""

    line: float
    point: float


PLAIN, QUIET = Look(1.8, 56), Look(1.1, 34)


def powers_of_two(values: Iterable[float]) -> list[int]:
    """Ticks of an axis of counts: the powers of two that span the values."""
    counts = list(values) or [1.0]
    first, last = math.floor(math.log2(min(counts))), math.ceil(math.log2(max(counts)))
    return [2**power for power in range(first, last + 1)]


def powers_of_ten(values: Iterable[float]) -> list[float]:
    """Ticks of a logarithmic axis: the powers of ten that span the values."""
    known = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    return [10.0**power for power in range(first, last + 1)]


def count_axis(title: str, values: Sequence[float]) -> alt.X:
    """A logarithmic axis of counts, marked at the powers of two."""
    low, high = min(values, default=1.0), max(values, default=2.0)
    scale = alt.Scale(type="log", base=2, domain=[low / 1.2, high * 1.2], nice=False)
    axis = alt.Axis(
        values=powers_of_two(values),
        format="d",
        grid=False,
        labelOverlap="parity",
        labelSeparation=6,
    )
    return alt.X("count:Q", title=title, scale=scale, axis=axis)


def powers(kind: Any, field: str, title: str, values: Collection[float], room: float = 1.5) -> Any:
    """A logarithmic axis (`kind` alt.X or alt.Y) marked at the powers of ten: 1e-4, 1e0, 1e2."""
    axis = alt.Axis(
        values=powers_of_ten(values),
        labelExpr="'1e' + round(log(datum.value) / LN10)",
        labelOverlap="parity",
        grid=kind is alt.Y,
    )
    domain = [min(values, default=1.0) / room, max(values, default=1.0) * room]
    scale = alt.Scale(type="log", domain=domain, nice=False)
    return kind(f"{field}:Q", title=title, scale=scale, axis=axis)


def extent(*frames: pd.DataFrame) -> list[float]:
    """Everything of these frames that an axis of values has to have room for."""
    names = ("value", "low", "high", *RANGE)
    return [value for frame in frames for name in names if name in frame for value in frame[name]]


def change_axis(title: str, values: Iterable[Any], around: float) -> alt.Y:
    """An axis of changes, 0 marked "exact": even up to `around`, logarithmic beyond.

    The paper's changes are many times ours; both are to be read.
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    low, high = min([0.0, *known]), max([around, *known])
    ends = [min(1.15 * low, -around / 3), 1.15 * high]
    scale = alt.Scale(type="symlog", constant=around, domain=ends, nice=False)
    ticks = [step for step in STEPS if around <= step <= 1.15 * high]
    below = [-step for step in STEPS if around <= step <= -low]
    label = "datum.value ? format(datum.value, '~r') : 'exact'"
    axis = alt.Axis(values=[*below, 0.0, *ticks], labelExpr=label, labelOverlap="greedy")
    return alt.Y("value:Q", title=title, scale=scale, axis=axis)


def curves(
    frame: pd.DataFrame,
    marks: Mapping[str, Mark],
    x: alt.X,
    y: alt.Y,
    look: Look = PLAIN,
    published: pd.DataFrame | None = None,
) -> list[alt.Chart]:
    """Intervals, lines and points of every series; `published` values are hollow marks.

    The range over trainings is a wide pale bar behind the interval.
    """
    frame = frame.assign(points=frame.groupby("series")["series"].transform("size"))
    base = _base(frame, marks, x, y)
    low = y.copy()
    low.shorthand = "low:Q"
    layers = [base.mark_line(strokeWidth=look.line).transform_filter(f"datum.points >= {JOINED}")]
    if _ends(frame):
        layers.insert(0, base.mark_rule(strokeWidth=0.8 * look.line).encode(y=low, y2="high:Q"))
    if ranged(frame):
        layers.insert(0, _range_over_trainings(frame, base, y))
    shape = _shape(marks)
    layers.append(base.mark_point(filled=True, size=look.point).encode(shape=shape))
    if published is not None and len(published):
        hollow = _base(published, marks, x, y).encode(shape=shape)
        layers.append(hollow.mark_point(filled=False, strokeWidth=1.8, size=120))
    return layers


def _base(frame: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X, y: alt.Y) -> alt.Chart:
    numbers = ["count", "value", *_ends(frame), *ranged(frame)]
    kept = [name for name in ("series", *numbers, "points") if name in frame]
    colours = alt.Scale(domain=list(marks), range=[mark.colour for mark in marks.values()])
    return alt.Chart(frame[kept]).encode(
        x=x,
        y=y,
        color=alt.Color("series:N", scale=colours, legend=alt.Legend(orient="bottom", columns=2)),
        opacity=OPACITY,
        tooltip=["series:N", *(alt.Tooltip(f"{name}:Q", format=".5~g") for name in numbers)],
    )


def _range_over_trainings(frame: pd.DataFrame, base: alt.Chart, y: alt.Y) -> alt.Chart:
    lowest = y.copy()
    lowest.shorthand = f"{RANGE[0]}:Q"
    pale = alt.when(SHOWN).then(alt.value(0.3)).otherwise(alt.value(0.05))
    bars = base.transform_filter(f"isValid(datum.{RANGE[0]})").mark_rule(strokeWidth=9)
    return bars.encode(y=lowest, y2=f"{RANGE[1]}:Q", opacity=pale)


def _ends(frame: pd.DataFrame) -> list[str]:
    """The columns of the interval, where it is known of some value."""
    return [name for name in ("low", "high") if name in frame and frame[name].notna().any()]


def _shape(marks: Mapping[str, Mark]) -> alt.Shape:
    scale = alt.Scale(domain=list(marks), range=[mark.shape for mark in marks.values()])
    return alt.Shape("series:N", scale=scale)


def level(value: float, name: str = "") -> list[alt.Chart]:
    """A dashed horizontal line at a value, with its name, if it has one, under its left end."""
    base = alt.Chart(pd.DataFrame({"value": [value], "name": [name]})).encode(y="value:Q")
    label = base.mark_text(align="left", baseline="top", dy=5)
    line = base.mark_rule(strokeDash=[5, 4])
    return [line, label.encode(x=alt.value(6), text="name:N")] if name else [line]


def upright(count: int, name: str) -> list[alt.Chart]:
    """A thin vertical line at a count, with its name above it."""
    base = alt.Chart(pd.DataFrame({"count": [count], "name": [name]})).encode(x="count:Q")
    label = base.mark_text(align="right", baseline="bottom", dx=4, dy=-4)
    return [base.mark_rule(), label.encode(y=alt.value(0), text="name:N")]


def figure(layers: Sequence[alt.Chart], title: str = "", height: int = HEIGHT) -> Panel:
    """Layers as one panel as wide as its place; its legend toggles series."""
    panel = layered(layers).properties(height=height)
    return panel.properties(title=title) if title else panel
