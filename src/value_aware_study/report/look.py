"""How the report looks: colours for light and dark, the theme of its charts, and their layers.

A chart is drawn from a frame with the columns `name`, `series`, `value`, `low` and `high`: the
value of a series at a named row, and its 95% interval. Colours are CSS variables, so that a chart
on the page follows the page's; in files they are the light ones.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import altair as alt
import pandas as pd
import vl_convert

__all__ = [
    "COLOURS",
    "OPACITY",
    "SERIES",
    "SHOWN",
    "THEME",
    "Mark",
    "Panel",
    "bars",
    "direction",
    "dots",
    "layered",
    "log_axis",
    "png",
    "ramp",
    "reference",
    "specification",
    "toggled",
]

# Light, dark. The series are Okabe and Ito's palette, told apart with every common colour
# blindness, darkened on light where it has less than 3:1 contrast and lightened on dark.
COLOURS = {
    "ground": ("#ffffff", "#14171b"),
    "raised": ("#f3f5f7", "#20252b"),
    "ink": ("#1a1e23", "#e7eaee"),
    "muted": ("#56606b", "#a3adb8"),
    "line": ("#d9dde2", "#353c45"),
    "blue": ("#0072b2", "#4aa5dc"),
    "vermillion": ("#d55e00", "#f07f35"),
    "green": ("#008a64", "#1fb58b"),
    "purple": ("#b65d91", "#c2719f"),
    "orange": ("#b07800", "#e69f00"),
    "sky": ("#3a8fc4", "#7cc6f0"),
    "grey": ("#737373", "#9a9a9a"),
    "deep": ("#0a3a66", "#cfe6fa"),
    "plum": ("#8a2d6c", "#e6a6cc"),
    "wine": ("#56123f", "#f7d3e8"),
    "teal": ("#00838f", "#3fc1cf"),
    "brown": ("#8c5a2b", "#c99a6b"),
    "olive": ("#6b7a00", "#b5c437"),
}
SERIES = tuple(COLOURS)[5:]
"""Names of the colours that a series may have."""

WIDTH, GAP = 640, 40
"""Pixels, in files: the width of a figure's panels together, and the space between two."""

Panel = alt.Chart | alt.LayerChart | alt.FacetChart
Side = Literal["top", "bottom"]


class Mark(NamedTuple):
    """How a series is drawn: a colour, as CSS has it, and a Vega shape."""

    colour: str
    shape: str = "circle"

    @classmethod
    def of(cls, name: str, shape: str = "circle") -> "Mark":
        """A mark in one of the colours of `SERIES`."""
        if name not in SERIES:
            raise ValueError(f"{name!r} is not a colour of a series; they are {', '.join(SERIES)}")
        return cls(f"var(--{name})", shape)


THEME: dict[str, Any] = {
    "font": "system-ui, Liberation Sans, sans-serif",
    "background": "transparent",
    "padding": 4,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "gridColor": "var(--line)",
        "domainColor": "var(--muted)",
        "tickColor": "var(--muted)",
        "labelFontSize": 13,
        "titleFontSize": 13,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelPadding": 6,
        "labelLimit": 260,
    },
    "legend": {
        "title": None,
        "labelColor": "var(--ink)",
        "labelFontSize": 14,
        "labelLimit": 320,
        "symbolSize": 130,
        "symbolOpacity": 1,
        "columnPadding": 10,
    },
    "title": {"color": "var(--ink)", "fontSize": 14, "anchor": "start"},
    "text": {"color": "var(--ink)", "fontSize": 13},
    "rule": {"color": "var(--muted)"},
}

SHOWN = alt.selection_point(name="shown", fields=["series"], bind="legend", toggle="true")
OPACITY = alt.when(SHOWN).then(alt.value(1)).otherwise(alt.value(0.1))


RAMP = (
    Mark.of("sky"),
    Mark.of("blue", "square"),
    Mark.of("deep", "triangle-up"),
    Mark.of("orange", "diamond"),
    Mark.of("grey", "cross"),
)


def ramp(names: Sequence[str]) -> dict[str, Mark]:
    """Marks of ordered series, such as sizes: a hue that stands out more and more, by shape too."""
    return {name: RAMP[place % len(RAMP)] for place, name in enumerate(names)}


def direction(title: str, better: Literal["lower", "higher"]) -> str:
    """The title of an axis, with the direction that is better."""
    return f"{title}, {better} is better"


def log_axis(title: str) -> alt.X:
    """A logarithmic axis of values, labelled with powers of ten in one form: 1e-4, 1e0, 1e2."""
    power = "'1e' + round(log(datum.value) / LN10)"
    axis = alt.Axis(labelExpr=power, tickCount=6, labelOverlap="parity", labelSeparation=8)
    return alt.X("value:Q", title=title, scale=alt.Scale(type="log"), axis=axis)


def bars(
    frame: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X, rows: str | None
) -> list[alt.Chart]:
    """A horizontal bar for each series of each row, its value at its end; `rows` is their title."""
    y = alt.Y("name:N", sort=None, title=rows, axis=alt.Axis(domain=False, ticks=False))
    base = _base(frame, marks, x, legend="top")
    base = base.encode(y=y, yOffset=alt.YOffset("series:N", sort=list(marks)))
    ends = base.mark_text(align="left", dx=5, fontWeight="bold")
    return [base.mark_bar(height={"band": 0.86}), ends.encode(text=alt.Text("value:Q", format=","))]


def dots(
    frame: pd.DataFrame,
    marks: Mapping[str, Mark],
    x: alt.X,
    published: pd.DataFrame | None = None,
    order: Sequence[str] = (),
) -> list[alt.Chart]:
    """A dot with its interval for each series of each row; rows in `order`, or by their mean.

    `published` values of the same rows and series are hollow marks.
    """
    order = order or frame.groupby("name")["value"].mean().sort_values().index.tolist()
    axis = alt.Axis(grid=True, domain=False, ticks=False, labelPadding=10)  # a mark at 0 has room
    y = alt.Y("name:N", sort=order, title=None, axis=axis)
    shapes = alt.Scale(domain=list(marks), range=[mark.shape for mark in marks.values()])
    low = x.copy()
    low.shorthand = "low:Q"
    base = _base(frame, marks, x).encode(y=y)
    shape = alt.Shape("series:N", scale=shapes)
    layers = [base.mark_point(filled=True, size=90).encode(y=y, shape=shape)]
    if _ends(frame):
        layers.insert(0, base.mark_rule(strokeWidth=1.6).encode(x=low, x2="high:Q"))
    if published is not None:
        outlined = _base(published, marks, x).encode(y=y, shape=shape)
        layers.append(outlined.mark_point(filled=False, strokeWidth=1.8, size=130))
    return layers


def reference(value: float, name: str) -> list[alt.Chart]:
    """A dashed vertical line at a value, such as exact attention's, with its name above it."""
    base = alt.Chart(pd.DataFrame({"value": [value], "name": [name]})).encode(x="value:Q")
    label = base.mark_text(baseline="bottom", dy=-4).encode(y=alt.value(0), text="name:N")
    return [base.mark_rule(strokeDash=[5, 4]), label]


def toggled(layers: Sequence[alt.Chart], step: int = 24) -> Panel:
    """Layers as one chart as wide as its place, `step` pixels a row; its legend toggles series."""
    rows = max(layer.data["name"].nunique() for layer in layers)
    return layered(layers).properties(height=rows * step)


def layered(layers: Sequence[alt.Chart]) -> Panel:
    """Layers as one chart as wide as its place; its legend toggles series.

    Vega-Lite binds the selection to a legend of the layer that has it: the first one with a colour.
    """
    place = next(i for i, one in enumerate(layers) if one.encoding.color is not alt.Undefined)
    bound = layers[place].add_params(SHOWN)
    return alt.layer(*layers[:place], bound, *layers[place + 1 :]).properties(width="container")


def _ends(frame: pd.DataFrame) -> list[str]:
    """The columns of the interval, where it is known of some value."""
    return [name for name in ("low", "high") if name in frame and frame[name].notna().any()]


def _base(
    frame: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X, legend: Side = "bottom"
) -> alt.Chart:
    columns = ["name", "series", "value", *_ends(frame)]
    colours = alt.Scale(domain=list(marks), range=[mark.colour for mark in marks.values()])
    numbers = [alt.Tooltip(f"{name}:Q", format=".5~g") for name in columns[2:]]
    return alt.Chart(frame[columns]).encode(
        x=x,
        color=alt.Color("series:N", scale=colours, legend=alt.Legend(orient=legend)),
        opacity=OPACITY,
        tooltip=[*(alt.Tooltip(f"{name}:N") for name in columns[:2]), *numbers],
    )


def specification(chart: Panel | alt.ConcatChart) -> dict[str, Any]:
    """A chart as Vega-Lite, its numbers to six digits; the page's script adds the theme."""
    with alt.data_transformers.enable("default", max_rows=None):
        text = chart.to_json()
    given: dict[str, Any] = json.loads(text, parse_float=lambda x: float(f"{float(x):.6g}"))
    return {name: part for name, part in given.items() if name not in ("$schema", "config")}


def png(charts: Sequence[Panel], rows: int = 1) -> bytes:
    """Rows of panels as a PNG at twice its size, of a few rows; the same charts, the same bytes."""
    columns = len(charts) // rows
    width = (WIDTH - GAP * (columns - 1)) // columns
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Automatically deduplicated selection parameter")
        panels = alt.concat(*(chart.properties(width=width) for chart in charts), columns=columns)
    theme = {**THEME, "background": "var(--ground)", "concat": {"spacing": GAP}}
    given = json.dumps(specification(panels) | {"config": theme})
    light = re.sub(rf"var\(--({'|'.join(COLOURS)})\)", lambda found: COLOURS[found[1]][0], given)
    return vl_convert.vegalite_to_png(light, scale=2 if rows == 1 else 1.25)
