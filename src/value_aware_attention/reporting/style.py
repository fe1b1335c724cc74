"""One look for every figure: colours, shapes, sizes, and the layers all figures share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import altair as alt
import pandas as pd


class Mark(NamedTuple):
    colour: str
    shape: str


class Look(NamedTuple):
    """How heavy a curve is: the width of its line, the area of its points, its opacity."""

    line: float
    point: float
    opacity: float


PLAIN, MUTED = Look(1.8, 48, 1.0), Look(1.1, 26, 0.8)


# Okabe and Ito's palette: told apart with every common colour blindness; shapes for print.
METHOD_MARKS = {
    "OVO": Mark("#D55E00", "circle"),
    "OVA": Mark("#0072B2", "square"),
    "OVO keys + optimal weights": Mark("#E8A97C", "circle"),
    "OVA keys + attention weights": Mark("#7DB4DA", "square"),
    "α|v|, 2-norm (Kobayashi)": Mark("#8C8C8C", "triangle-up"),
    "α|v|, 1-norm (VATP)": Mark("#B9B9B9", "triangle-down"),
    "CAOTE": Mark("#A58B6F", "diamond"),
    "sampled from α": Mark("#3D3D3D", "cross"),
    "sliding window": Mark("#009E73", "triangle-up"),
    "dilated window": Mark("#6CC5A8", "triangle-down"),
    "Longformer": Mark("#00573F", "square"),
    "BigBird": Mark("#7FA800", "diamond"),
    "strided": Mark("#B4CC66", "triangle-up"),
    "fixed": Mark("#5B6B1E", "triangle-down"),
    "random keys": Mark("#9C9C9C", "cross"),
    "ORF, as written": Mark("#7A5C00", "cross"),
    "ORF, Performer scaling": Mark("#E69F00", "triangle-down"),
    "random Fourier features": Mark("#F2CC72", "circle"),
    "linear attention": Mark("#9A6A00", "square"),
    "Nyström": Mark("#CC3366", "diamond"),
    "Linformer": Mark("#EB9AB8", "triangle-up"),
}
# Shades of one hue, from the fewest hash rounds to the most.
LSH_SHADES = ("#E3A6CC", "#C66BA4", "#98337A", "#5F1049")
KERNEL_MARKS = {
    "exponential": Mark("#332288", "circle"),
    "polynomial (deg 2)": Mark("#AA4466", "square"),
    "elu": Mark("#44AA99", "triangle-up"),
}
SHORT, LONG = Mark("#7FA3C7", "circle"), Mark("#1F3A5F", "square")
OTHER = "#777777"
EXACT = "#404040"

FONT = "Liberation Sans"
HEIGHT = 290

Panel = alt.LayerChart | alt.FacetChart
Chart = alt.Chart | Panel | alt.HConcatChart | alt.ConcatChart


def method_marks(labels: Iterable[str]) -> dict[str, Mark]:
    """Colour and shape of each curve, in legend order; a method looks the same in every figure."""
    present = set(labels)
    marks = {name: mark for name, mark in METHOD_MARKS.items() if name in present}
    lsh = sorted((name for name in present if name.startswith("LSH")), key=_rounds)
    last = len(LSH_SHADES) - 1
    for place, name in enumerate(lsh):
        shade = LSH_SHADES[round(place * last / (len(lsh) - 1)) if len(lsh) > 1 else 2]
        marks[name] = Mark(shade, "diamond")
    return marks | {name: Mark(OTHER, "circle") for name in sorted(present - set(marks))}


def _rounds(label: str) -> int:
    return int("".join(filter(str.isdigit, label)) or 0)


def series(field: str, marks: Mapping[str, Mark], columns: int = 3) -> dict[str, Any]:
    """Colour and shape encodings of a field, with one legend for both under the panel."""
    names = list(marks)
    legend = alt.Legend(title=None, orient="bottom", columns=columns, symbolOpacity=1)
    colours = alt.Scale(domain=names, range=[mark.colour for mark in marks.values()])
    shapes = alt.Scale(domain=names, range=[mark.shape for mark in marks.values()])
    return {
        "color": alt.Color(f"{field}:N", scale=colours, legend=legend),
        "shape": alt.Shape(f"{field}:N", scale=shapes, legend=legend),
    }


@dataclass(frozen=True)
class ValueAxis:
    """The vertical axis that the points, bars and lines of one panel share."""

    title: str | None
    domain: tuple[float, float]

    def of(self, field: str) -> alt.Y:
        scale = alt.Scale(domain=list(self.domain), nice=False, zero=False)
        axis = alt.Axis(tickCount=6)
        return alt.Y(f"{field}:Q", title=self.title, scale=scale, axis=axis)


def value_axis(title: str | None, values: Iterable[Any]) -> ValueAxis:
    """An axis that spans the values, with room for the name of a line at the lowest of them."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    span = (high - low) or 1.0
    return ValueAxis(title, (low - 0.1 * span, high + 0.04 * span))


def powers_of_two(values: Iterable[float]) -> list[int]:
    """Ticks of an axis of counts: the powers of two that span the values."""
    counts = list(values) or [1.0]
    first, last = math.floor(math.log2(min(counts))), math.ceil(math.log2(max(counts)))
    return [2**power for power in range(first, last + 1)]


def count_axis(field: str, title: str, values: Sequence[float]) -> alt.X:
    """A logarithmic axis of keys or features, marked at the powers of two."""
    low, high = min(values, default=1.0), max(values, default=2.0)
    scale = alt.Scale(type="log", base=2, domain=[low / 1.2, high * 1.2], nice=False)
    axis = alt.Axis(values=powers_of_two(values), format="d", grid=False, labelOverlap="greedy")
    return alt.X(f"{field}:Q", title=title, scale=scale, axis=axis)


def line_name(value: float | None, name: str, at: float, y: ValueAxis) -> list[alt.Chart]:
    """The name of a horizontal line at a value, under its left end."""
    if value is None:
        return []
    frame = pd.DataFrame({"exact": [value], "at": [at], "name": [name]})
    text = alt.Chart(frame).mark_text(align="left", baseline="top", dy=5, color=EXACT, fontSize=12)
    return [text.encode(x="at:Q", y=y.of("exact"), text="name:N")]


def dashed_line(value: float | None, name: str, at: float, y: ValueAxis) -> list[alt.Chart]:
    """A dashed horizontal line at the exact model's value, with its name under the left end."""
    if value is None:
        return []
    rule = alt.Chart(pd.DataFrame({"exact": [value]})).mark_rule(
        strokeDash=[6, 4], strokeWidth=1.4, color=EXACT
    )
    return [rule.encode(y=y.of("exact")), *line_name(value, name, at, y)]


def head_line(head_dim: int, counts: Sequence[float], y: ValueAxis) -> list[alt.Chart]:
    """A thin vertical line at r = d + 1, from where OVA is exact (Caratheodory), if on the axis."""
    keys = head_dim + 1
    if not counts or not min(counts) <= keys <= max(counts):
        return []
    frame = pd.DataFrame({"keys": [keys], "top": [y.domain[1]], "label": [f"d + 1 = {keys}"]})
    rule = alt.Chart(frame).mark_rule(color="#B5B5B5", strokeWidth=1).encode(x="keys:Q")
    text = alt.Chart(frame).mark_text(
        align="left", baseline="top", dx=5, dy=2, color="#707070", fontSize=12
    )
    return [rule, text.encode(x="keys:Q", y=y.of("top"), text="label:N")]


def empty(message: str) -> alt.Chart:
    """A figure that says why there is nothing to see."""
    frame = pd.DataFrame({"message": [message]})
    return alt.Chart(frame, width=560, height=120).mark_text(fontSize=14).encode(text="message:N")


def styled(chart: Any) -> Any:
    """The settings every figure ends with: font, sizes, white ground, quiet grid."""
    text = {"labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal"}
    axis = {"gridColor": "#E8E8E8", "domainColor": "#888888", "tickColor": "#888888"}
    return (
        chart.configure(font=FONT, background="white", padding=12)
        .configure_axis(**text, **axis, titlePadding=8)
        .configure_legend(labelFontSize=12, labelLimit=260, symbolSize=80, columnPadding=22)
        .configure_title(fontSize=14, fontWeight="bold", anchor="start", frame="group", offset=8)
        .configure_view(stroke=None)
        .configure_concat(spacing=30)
    )
