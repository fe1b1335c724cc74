"""One look for every figure: colours, shapes, sizes, and the layers all figures share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import altair as alt
import pandas as pd

from value_aware_study.cards import Card, cards
from value_aware_study.reporting.labels import KERNEL_LABELS


class Mark(NamedTuple):
    colour: str
    shape: str


class Look(NamedTuple):
    """How heavy a curve is: the width of its line, the area of its points, its opacity."""

    line: float
    point: float
    opacity: float


PLAIN, MUTED = Look(1.8, 48, 1.0), Look(1.1, 26, 0.8)


# Okabe and Ito's palette: told apart with every common colour blindness; shapes for print. The
# methods' own marks are in their cards.
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
Channel = TypeVar("Channel", alt.X, alt.Y)
Chart = alt.Chart | Panel | alt.HConcatChart | alt.ConcatChart


def kernel_mark(kernel: str) -> Mark:
    return KERNEL_MARKS.get(KERNEL_LABELS.get(kernel, kernel), Mark(OTHER, "circle"))


def method_marks(settings: pd.DataFrame) -> dict[str, Mark]:
    """Colour and shape of each curve (`series`) of some settings, in legend order.

    A method looks the same in every figure.
    """
    present = set(settings["series"])
    marks: dict[str, Mark] = {}
    shaded: dict[str, Mark] = {}
    for card in cards().values():
        for name, own in card.marks().items():
            marks |= {name: Mark(own["colour"], own["shape"])} if name in present else {}
        shaded |= _shades(card, settings)
    marks |= shaded
    return marks | {name: Mark(OTHER, "circle") for name in sorted(present - set(marks))}


def _shades(card: Card, settings: pd.DataFrame) -> dict[str, Mark]:
    """Shades of one hue for a method's curves, by the argument that tells them apart."""
    of_card = settings[settings["approximation"] == card.name]
    if "shades" not in card.mark or of_card.empty:
        return {}
    names = of_card.sort_values(list(card.curves))["series"].unique()
    shades, count = card.mark["shades"], len(names)
    last = len(shades) - 1
    places = [round(i * last / (count - 1)) for i in range(count)] if count > 1 else [last - 1]
    return {n: Mark(shades[at], card.mark["shape"]) for n, at in zip(names, places, strict=True)}


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


def log_axis(
    kind: type[Channel], field: str, title: str | None, ends: Mapping[str, Any], **axis: Any
) -> Channel:
    """A logarithmic axis; `ends` are its scale's options, `axis` those of its ticks and labels."""
    scale = alt.Scale(type="log", nice=False, **ends)
    return kind(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(**axis))


def count_axis(field: str, title: str, values: Sequence[float]) -> alt.X:
    """A logarithmic axis of keys or features, marked at the powers of two."""
    low, high = min(values, default=1.0), max(values, default=2.0)
    ends = {"base": 2, "domain": [low / 1.2, high * 1.2]}
    ticks = {"values": powers_of_two(values), "format": "d"}
    return log_axis(alt.X, field, title, ends, **ticks, grid=False, labelOverlap="greedy")


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
