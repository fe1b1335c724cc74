"""One look for every figure: colours, shapes, sizes, and the layers all figures share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

# Okabe and Ito's palette: told apart with every common colour blindness.
EXACT = "#404040"
METHOD_COLOURS = {
    "OVO": "#D55E00",
    "OVA": "#0072B2",
    "sliding window": "#009E73",
    "ORF, as written": "#7A5C00",
    "ORF, Performer scaling": "#E69F00",
}
# Shades of one hue, from the fewest hash rounds to the most.
LSH_SHADES = ("#E3A6CC", "#C66BA4", "#98337A", "#5F1049")
METHOD_SHAPES = {"OVO": "circle", "OVA": "square", "sliding window": "triangle-up"}
KERNEL_COLOURS = {"exponential": "#332288", "polynomial (deg 2)": "#AA4466", "elu": "#44AA99"}
KERNEL_SHAPES = {"exponential": "circle", "polynomial (deg 2)": "square", "elu": "triangle-up"}
MODEL_COLOURS = {"short": "#88A8C8", "long": "#1F3A5F"}
OTHER = "#777777"

FONT = "Liberation Sans"
HEIGHT = 300

Chart = alt.Chart | alt.LayerChart | alt.HConcatChart


def method_colours(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each curve, in legend order; the same method always gets the same colour."""
    present = set(labels)
    colours = {name: colour for name, colour in METHOD_COLOURS.items() if name in present}
    lsh = sorted((name for name in present if name.startswith("LSH")), key=_rounds)
    for place, name in enumerate(lsh):
        last = len(LSH_SHADES) - 1
        colours[name] = LSH_SHADES[round(place * last / max(len(lsh) - 1, 1)) if lsh[1:] else 2]
    return colours | {name: OTHER for name in sorted(present - set(colours))}


def _rounds(label: str) -> int:
    return int("".join(filter(str.isdigit, label)) or 0)


def colour(
    field: str, colours: Mapping[str, str], *, columns: int = 1, title: str | None = None
) -> alt.Color:
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    legend = alt.Legend(title=title, columns=columns, symbolType="circle")
    return alt.Color(f"{field}:N", scale=scale, legend=legend)


def shape(field: str, shapes: Mapping[str, str]) -> alt.Shape:
    scale = alt.Scale(domain=list(shapes), range=list(shapes.values()))
    return alt.Shape(f"{field}:N", scale=scale, legend=alt.Legend(title=None))


def powers_of_two(values: Iterable[float]) -> list[int]:
    """Ticks of an axis of counts: the powers of two that span the values."""
    counts = list(values)
    if not counts:
        return [1]
    first, last = math.floor(math.log2(min(counts))), math.ceil(math.log2(max(counts)))
    return [2**power for power in range(first, last + 1)]


def count_axis(field: str, title: str, values: Sequence[float]) -> alt.X:
    """A logarithmic axis of keys or features, marked at the powers of two."""
    ticks = powers_of_two(values)
    low, high = min(values, default=1), max(values, default=2)
    scale = alt.Scale(type="log", base=2, domain=[low / 1.15, high * 1.15], nice=False)
    axis = alt.Axis(values=ticks, format="d", grid=False, labelOverlap="greedy")
    return alt.X(f"{field}:Q", title=title, scale=scale, axis=axis)


@dataclass(frozen=True)
class ValueAxis:
    """The vertical axis that the points, bars and lines of one panel share."""

    title: str
    scale: alt.Scale

    def of(self, field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", title=self.title, scale=self.scale)


def error_bars(base: alt.Chart, low: str, high: str, y: ValueAxis) -> alt.Chart:
    """Vertical bars from `low` to `high`, in the colour of their points."""
    return base.mark_rule(strokeWidth=1.3, opacity=0.75).encode(y=y.of(low), y2=f"{high}:Q")


def dashed_line(value: float | None, label: str, at: float, y: ValueAxis) -> list[alt.Chart]:
    """A dashed horizontal line at the exact model's value, with its name above the left end."""
    if value is None:
        return []
    frame = pd.DataFrame({"exact": [value], "at": [at], "label": [label]})
    position = y.of("exact")
    rule = alt.Chart(frame).mark_rule(strokeDash=[6, 4], strokeWidth=1.4, color=EXACT)
    text = alt.Chart(frame).mark_text(align="left", baseline="top", dy=5, color=EXACT, fontSize=12)
    return [rule.encode(y=position), text.encode(x="at:Q", y=position, text="label:N")]


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
        .configure_legend(labelFontSize=12, titleFontSize=12, labelLimit=260, symbolSize=90)
        .configure_title(fontSize=14, fontWeight="bold", anchor="start", offset=10)
        .configure_view(stroke=None)
        .configure_concat(spacing=36)
    )
