"""Axes and layers of charts: bars, dots with intervals, and curves against a count.

Bars and dots are drawn from a frame with the columns `name`, `series`, `value`, `low` and `high`:
the value of a series in a named row, and its 95% interval. Curves have a `count` (keys, features,
steps) instead of the name; columns `training_<name>` hold the values of single trainings.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from textwrap import wrap
from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd

from value_aware_study.report.frame import filled
from value_aware_study.report.look import NEAREST_MARK, Mark, Panel, oracle_marks
from value_aware_study.report.words import of_trainings, sentences

SERIES_SHOWN = alt.selection_point(name="shown", fields=["series"], bind="legend", toggle="true")
OPACITY = alt.when(SERIES_SHOWN).then(alt.value(1)).otherwise(alt.value(0.1))
END_COLUMNS = ("low", "high")
JOINED = 3
"""Fewest points of a joined series: fewer leave too much unmeasured between them"""
TICK_STEPS = [step * 10.0**power for power in range(-3, 3) for step in (1, 3)]
TENS = [
    *(f"10⁻{power}" for power in "⁹⁸⁷⁶⁵⁴"),
    *("0.001", "0.01", "0.1", "1", "10", "100", "1,000"),
    *(f"10{power}" for power in "⁴⁵⁶⁷⁸⁹"),
]
POWER = f"{json.dumps(TENS, ensure_ascii=False)}[round(log(datum.value) / LN10) + 9]"
"""Labels powers of ten: 10⁻⁴, 0.01, 1, 100"""
LINE = 27
"""Most letters per line of a name, of a row or in a legend"""
SIDE, LETTER = 300.0, 7.4
"""Pixels of the panel in which names on lines find their place, and the width of a letter"""
Drawn = list[alt.Chart]


def direction(title: str, better: Literal["lower", "higher"]) -> str:
    """Writes the title of an axis, with the direction that is better."""
    return f"{title}, {better} is better"


ERROR_AXIS = direction("relative squared output error", "lower")
"""Title of the output error's axis, the same in every figure"""


def powers_of_two(values: Iterable[float]) -> list[int]:
    """Builds ticks of an axis of counts: the powers of two that span the values."""
    counts = list(values) or [1.0]
    first, last = math.floor(math.log2(min(counts))), math.ceil(math.log2(max(counts)))
    return [2**power for power in range(first, last + 1)]


def count_axis(title: str, values: Sequence[float], field: str = "count") -> alt.X:
    """Builds a logarithmic axis of counts, marked at the powers of two."""
    low, high = min(values, default=1.0), max(values, default=2.0)
    ticks: dict[str, Any] = {"values": powers_of_two(values), "format": "d", "grid": False}
    return alt.X(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(type="log", base=2, domain=[low / 1.2, high * 1.2], nice=False),
        axis=alt.Axis(**ticks, labelOverlap="parity", labelSeparation=6),
    )


def powers(kind: Any, field: str, title: str, values: Collection[float]) -> Any:
    """Builds a logarithmic axis (`kind` alt.X or alt.Y) marked at the powers of ten."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    ticks, grid = [10.0**power for power in range(first, last + 1)], kind is alt.Y
    return kind(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(
            type="log",
            domain=[min(values, default=1.0) / 1.5, max(values, default=1.0) * 1.5],
            nice=False,
        ),
        axis=alt.Axis(values=ticks, labelExpr=POWER, labelOverlap="parity", grid=grid),
    )


def change_axis(title: str, values: Iterable[Any], around: float) -> alt.Y:
    """Builds an axis of changes with 0 marked "exact": linear up to `around`, logarithmic beyond.

    The paper's changes are many times ours; this scale shows both.
    """
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    low, high = min([0.0, *finite]), max([around, *finite])
    ends = [min(1.15 * low, -around / 3), 1.15 * high]
    ticks = [step for step in TICK_STEPS if around <= step <= 1.15 * high]
    below = [-step for step in TICK_STEPS if around <= step <= -low]
    return alt.Y(
        "value:Q",
        title=title,
        scale=alt.Scale(type="symlog", constant=around, domain=ends, nice=False),
        axis=alt.Axis(
            values=[*below, 0.0, *ticks],
            labelExpr="datum.value ? format(datum.value, '~r') : 'exact'",
            labelOverlap="greedy",
        ),
    )


def ratio_axis(title: str, ratios: pd.DataFrame) -> alt.Y:
    """Builds a logarithmic axis of ratios to exact attention's value; it includes 1."""
    numbers = ratios[["value", *END_COLUMNS]].astype(float).where(lambda number: number > 0)
    low, high = min(1.0, numbers.min(axis=None)), max(1.0, numbers.max(axis=None))
    room = max((high / low) ** 0.08, 1.01)
    return alt.Y(
        "value:Q",
        title=title,
        scale=alt.Scale(type="log", domain=[low / room, high * room], nice=False),
        axis=alt.Axis(
            values=TICK_STEPS if high > 3 * low else alt.Undefined,
            tickCount=6,
            format=",~r",
            labelOverlap="greedy",
        ),
    )


def extent(*frames: pd.DataFrame) -> list[float]:
    """Lists all numbers of these frames that an axis of values must cover."""
    return [
        value
        for frame in frames
        for name in ("value", *END_COLUMNS, *of_trainings(frame))
        if name in frame
        for value in frame[name]
    ]


def colour(marks: Mapping[str, Mark], **legend: Any) -> alt.Color:
    return alt.Color(
        "series:N",
        scale=alt.Scale(domain=list(marks), range=[mark.colour for mark in marks.values()]),
        legend=alt.Legend(**legend, labelExpr=wrapped(marks)) if legend else alt.Undefined,
    )


def shape(marks: Mapping[str, Mark], **legend: Any) -> alt.Shape:
    return alt.Shape(
        "series:N",
        scale=alt.Scale(domain=list(marks), range=[mark.shape for mark in marks.values()]),
        legend=alt.Legend(**legend, labelExpr=wrapped(marks)) if legend else alt.Undefined,
    )


def wrapped(names: Iterable[str]) -> str:
    """Writes names in lines of at most `LINE` letters, as an expression for labels."""
    lines = {name: wrap(name, LINE) for name in names if len(name) > LINE}
    return f"{json.dumps(lines)}[datum.label] || datum.label"


def of_field(axis: Any, field: str) -> Any:
    """Copies an axis for another column of the frame."""
    copied = axis.copy()
    copied.shorthand = f"{field}:Q"
    return copied


def bars(frame: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X) -> Drawn:
    """Draws a bar with its interval for each series of each row, and the value at the bar's end.

    If the interval is too short to show behind the number, the number stands after it.
    """
    is_short = frame["high"] - frame["value"] < 0.2 * frame[["value", *END_COLUMNS]].max().max()
    frame, marks = (
        frame.assign(end=frame["high"].where(is_short, frame["value"])),
        _drawn(marks, frame),
    )
    base = _base(
        frame, ("name", "series"), ("value", "end"), colour(marks, orient="top", columns=2), x=x
    )
    base = base.encode(
        y=alt.Y("name:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False)),
        yOffset=alt.YOffset("series:N", sort=list(marks)),
        tooltip="said:N",
    )
    ends = {"x": of_field(x, "low"), "x2": "high:Q", "color": alt.value("var(--ink)")}
    label: Any = {"align": "left", "dx": 5, "fontWeight": "bold"}
    halo = base.mark_text(
        **label, stroke="var(--ground)", strokeWidth=5
    )  # in front of the interval
    text: Any = {"x": of_field(x, "end"), "text": alt.Text("value:Q", format=",")}
    return [
        base.mark_bar(height={"band": 0.86}),
        *([base.mark_rule(strokeWidth=1.4).encode(**ends)] if filled(frame, END_COLUMNS) else []),
        halo.encode(**text, color=alt.value("var(--ground)")),
        base.mark_text(**label).encode(**text),
    ]


def dots(
    frame: pd.DataFrame,
    marks: Mapping[str, Mark],
    x: alt.X,
    published: pd.DataFrame | None = None,
    order: Sequence[str] = (),
) -> Drawn:
    """Draws a dot with its interval for each series of each row; rows in `order`, or by their mean.

    `published` values of the same rows and series are hollow marks. With a column `hue` that names
    the mark of a row's colour, the series differ by shape alone.
    """
    order = order or frame.groupby("name")["value"].mean().sort_values().index.tolist()
    label = wrapped(frame["name"].unique())
    up: Any = {"condition": {"test": f"length(datum.label) > {LINE}", "value": -7}, "value": 0}
    axis = alt.Axis(
        grid=True, domain=False, ticks=False, labelExpr=label, labelLimit=0, labelOffset=up,
        labelPadding=10,  # room for a mark at 0
    )  # fmt: skip
    y = alt.Y("name:N", sort=order, title=None, axis=axis)
    hues = {name: marks[name] for name in frame.get("hue", ())}
    labels, numbers = ("name", "series", "hue")[: 3 if hues else 2], ("value",)
    marks = _drawn(marks, frame, published)
    colours, shapes = colour(marks, **LEGEND), shape(marks)
    if hues:
        ink, scale = "var(--muted)", colour(hues)["scale"]
        colours = alt.Color("hue:N", scale=scale, legend=None)
        shapes = shape(marks, orient="top", symbolFillColor=ink, symbolStrokeColor=ink)
    base = _base(frame, labels, numbers, colours, x=x, y=y, tooltip="said:N")
    layers = [base.mark_point(filled=True, size=90).encode(shape=shapes)]
    if filled(frame, END_COLUMNS):
        rule = base.mark_rule(strokeWidth=1.6)
        rule = rule.encode(x=of_field(x, "low"), x2="high:Q")
        layers.insert(len(layers) if hues else 0, rule)  # a legend toggles by the first layer
    if published is not None:
        hollow = _base(published, labels, numbers, colours, x=x, y=y, tooltip="said:N")
        hollow = hollow.encode(shape=shapes)
        layers.append(hollow.mark_point(filled=False, strokeWidth=1.8, size=130))
    return layers


def curves(
    frame: pd.DataFrame,
    marks: Mapping[str, Mark],
    x: alt.X,
    y: alt.Y,
    published: pd.DataFrame | None = None,
) -> Drawn:
    """Draws intervals, lines and points of every series; `published` values are hollow marks.

    Single trainings are small pale marks. The mark nearest to the pointer has a ring and shows its
    sentence (`said`).
    """
    marks = _drawn(marks, frame, published)
    labels, numbers, colours = ("series",), ("count", "value"), colour(marks, **LEGEND)
    base = _base(frame, labels, numbers, colours, x=x, y=y)
    joined = frame[frame.groupby("series")["series"].transform("size") >= JOINED]
    line = _base(joined, labels, numbers, colours, x=x, y=y)
    width, size = 1.8, 56
    layers = [line.mark_line(strokeWidth=width)] if len(joined) else []
    if filled(frame, END_COLUMNS):
        layers.insert(
            0, base.mark_rule(strokeWidth=0.8 * width).encode(y=of_field(y, "low"), y2="high:Q")
        )
    if trainings := of_trainings(frame.dropna(axis="columns", how="all")):
        places = frame[[*labels, "count", *trainings]]
        places = places.melt([*labels, "count"], value_name="value").dropna(subset="value")
        single = _base(places, labels, numbers, colours, x=x, y=y)
        single = single.encode(
            shape=shape(marks),
            opacity=alt.when(SERIES_SHOWN).then(alt.value(0.5)).otherwise(alt.value(0.05)),
        )
        layers.append(single.mark_point(filled=True, size=0.6 * size))
    layers.append(base.mark_point(filled=True, size=size).encode(shape=shape(marks)))
    if published is not None and len(published):
        layers.append(
            _base(published, labels, numbers, colours, x=x, y=y)
            .encode(shape=shape(marks))
            .mark_point(filled=False, strokeWidth=1.8, size=120)
        )
    told = pd.concat([_told(marked, labels, numbers) for marked in (frame, published)])
    return [*layers, nearest(told.dropna(subset="value"), x, y)]


def against_keys(frame: pd.DataFrame, metric: str) -> list[Panel]:
    """Draws ratios to exact attention's metric against r: a panel a `name`, on equal axes."""
    x = count_axis("keys kept, r", frame["count"].tolist())
    y = ratio_axis(direction(f"{metric} / exact attention's", "lower"), frame)
    return [
        figure([*level(1.0), *curves(rows, oracle_marks(rows), x, y)], str(name))
        for name, rows in frame.groupby("name", sort=False)
    ]


def on_lines(
    frame: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X, y: alt.Y, exact: float
) -> Drawn:
    """Draws curves with their names on the lines, and a dashed line at exact attention's value.

    What lies beyond the axes is cut off.
    """
    layers = curves(frame, marks, x, y)
    colours = layers[0].encoding.color
    for layer in layers:
        layer.mark["clip"] = True
        for channel in (layer.encoding.color, layer.encoding.shape):
            if channel is not alt.Undefined:
                channel["legend"] = None
    for (dx, dy), names in name_places(frame, x, y, exact).groupby(["dx", "dy"]):
        base = alt.Chart(names[["series", "count", "value"]]).encode(x=x, y=y, text="series:N")
        place: Any = {"align": "left" if dx > 0 else "right", "dx": dx, "dy": dy}
        halo = base.mark_text(**place, stroke="var(--ground)", strokeWidth=4)
        layers += [halo, base.mark_text(**place, fontWeight="bold").encode(color=colours)]
    return [*level(exact), *layers]


def name_places(frame: pd.DataFrame, x: alt.X, y: alt.Y, exact: float) -> pd.DataFrame:
    """Chooses the point of each curve, and its corner, where the name is furthest from others.

    The name also keeps away from the horizontal line at the value `exact`.

    `dx` and `dy` are pixels from the point, in a panel of `SIDE` by `SIDE` pixels.
    """
    frame = frame.assign(across=_pixels(x, frame["count"]), up=_pixels(y, frame["value"]))
    of_series = [curve for _, curve in frame.sort_values("count").groupby("series", sort=False)]
    beyond, rows = np.array([[6.0], [0.0]]), []  # a mark is wider than its point
    lines = [curve[["across", "up"]].to_numpy(float).T for curve in of_series]
    lines = [np.hstack([at[:, :1] - beyond, at, at[:, -1:] + beyond]) for at in lines]
    lines.append(np.array([[0.0, SIDE], [*_pixels(y, pd.Series([exact] * 2))]]))
    for curve in of_series:
        width, places = LETTER * len(curve["series"].iloc[0]), []
        for dx, dy, point in product((9, -9), (-9, 9), curve.to_dict("records")):
            start, height = point["across"] + dx - (dx < 0) * width, point["up"] - dy
            span = np.linspace(start, start + width, 50)
            ups = [np.interp(span, at[0], at[1], left=np.inf, right=np.inf) for at in lines]
            gap = min(float(np.abs(np.array(ups) - height).min()), 10.0)
            fits = 0 <= start <= SIDE - width and 0 <= height <= SIDE
            places.append((fits, gap, point | {"dx": dx, "dy": dy}, [span, np.full(50, height)]))
        _, _, place, line = max(places, key=lambda place: place[:2])
        rows.append(place)
        lines.append(np.array(line))
    return pd.DataFrame(rows)


def _pixels(axis: alt.X | alt.Y, values: pd.Series) -> pd.Series:
    """Returns the places of values on an axis with a domain, in pixels of a panel of `SIDE`."""
    scale = axis["scale"]
    change = np.log if scale["type"] == "log" else np.asarray
    low, high = change(scale["domain"])
    return SIDE * (change(values.astype(float)) - low) / (high - low)


def nearest(frame: pd.DataFrame, x: alt.X, y: alt.Y) -> alt.Chart:
    """Draws a ring around the mark nearest to the pointer, and shows the sentence of that mark."""
    near = alt.selection_point(
        name=NEAREST_MARK, on="pointerover", clear="pointerout", nearest=True
    )
    ring = alt.when(near, empty=False).then(alt.value(1)).otherwise(alt.value(0))
    sentence = alt.TooltipValue(alt.ExprRef("(datum.datum || datum).said"))  # Voronoi wraps datum
    points = alt.Chart(frame).mark_point(size=180, strokeWidth=1.5, color="var(--ink)")
    return points.encode(x=x, y=y, opacity=ring, tooltip=sentence).add_params(near)


LEGEND: dict[str, Any] = {"orient": "bottom", "columns": 2}


def _drawn(marks: Mapping[str, Mark], *frames: pd.DataFrame | None) -> dict[str, Mark]:
    """Returns the marks of series that have a row, so that a legend names only what is drawn."""
    names = {name for frame in frames if frame is not None for name in frame["series"]}
    return {name: mark for name, mark in marks.items() if name in names}


def _told(
    frame: pd.DataFrame | None, labels: Sequence[str], numbers: Sequence[str]
) -> pd.DataFrame:
    """Returns the columns of a mark's sentence, adding the sentence if the caller gave none."""
    if frame is None:
        return pd.DataFrame(columns=[*numbers, "said"])
    if "said" not in frame:
        frame = frame.assign(
            said=sentences(frame, ", ".join(f"{{{name}}}" for name in (*labels, *numbers[:-1])))
        )
    return frame[[*numbers, "said"]]


def _base(
    frame: pd.DataFrame,
    labels: Sequence[str],
    numbers: Sequence[str],
    colours: alt.Color,
    **axes: Any,
) -> alt.Chart:
    """Encodes the series of a frame by colour; with the axis `tooltip`, shows their sentences."""
    numbers = [*numbers, *filled(frame, END_COLUMNS)]
    drawn = frame[[name for name in (*labels, *numbers) if name in frame]]
    if labels[0] == "name":
        drawn = drawn.assign(said=_told(frame, labels, ["value"])["said"])
    return alt.Chart(drawn).encode(color=colours, opacity=OPACITY, **axes)


def level(value: float, name: str = "") -> Drawn:
    """Draws a dashed horizontal line at a value, with any name under its left end."""
    base = alt.Chart(pd.DataFrame({"value": [value], "name": [name]})).encode(y="value:Q")
    label = base.mark_text(align="left", baseline="top", dy=5)
    line = base.mark_rule(strokeDash=[5, 4])
    return [line, label.encode(x=alt.value(6), text="name:N")] if name else [line]


def reference(value: float, name: str) -> Drawn:
    """Draws a dashed vertical line at a value, such as exact attention's, named above it."""
    base = alt.Chart(pd.DataFrame({"value": [value], "name": [name]})).encode(x="value:Q")
    return [
        base.mark_rule(strokeDash=[5, 4]),
        base.mark_text(baseline="bottom", dy=-4).encode(y=alt.value(0), text="name:N"),
    ]


def upright(count: int) -> Drawn:
    """Draws a thin vertical line at a count of keys, labelled "d + 1 = 65" above it."""
    base = alt.Chart(pd.DataFrame({"count": [count], "name": [f"d + 1 = {count}"]})).encode(
        x="count:Q"
    )
    return [
        base.mark_rule(),
        base.mark_text(align="right", baseline="bottom", dx=4, dy=-4).encode(
            y=alt.value(0), text="name:N"
        ),
    ]


def figure(layers: Sequence[alt.Chart], title: str | list[str] = "", height: int = 300) -> Panel:
    """Joins layers into one panel as wide as its place; its legend toggles series.

    Vega-Lite binds the selection to the legend of its layer: the first layer with a colour.
    """
    place = [layer.encoding.color is not alt.Undefined for layer in layers].index(True)
    panel = alt.layer(*layers[:place], layers[place].add_params(SERIES_SHOWN), *layers[place + 1 :])
    panel = panel.properties(width="container", height=height)
    return panel.properties(title=title) if title else panel


def toggled(layers: Sequence[alt.Chart], step: int = 24, title: str = "") -> Panel:
    """Joins layers of bars or dots into one panel, `step` pixels per row; its legend toggles."""
    return figure(layers, title, max(layer.data["name"].nunique() for layer in layers) * step)


def heat_map(frame: pd.DataFrame, title: str, among: pd.Series, unit: str) -> Panel:
    """Draws layers by heads, with `value` as colour and its `text`; `among` sets a common scale.

    The smallest percent of `among` share one colour. `unit` follows the value in sentences.
    """
    heads = int(frame["head"].max()) + 1
    first = max(float(among.quantile(0.01)), 1e-6)
    last = max(float(among.max()), first * 1.01)
    told = sentences(frame, f"{title}, layer {{layer}}, head {{head}}", unit)
    places = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False)
    base = alt.Chart(frame[["layer", "head", "value", "text"]].assign(said=told)).encode(
        x=alt.X("head:O", title="head", axis=places),
        y=alt.Y("layer:O", title="layer", axis=places),
        tooltip="said:N",
    )
    cells = [
        base.mark_rect().encode(
            color=alt.Color(
                "value:Q",
                scale=alt.Scale(type="log", scheme="viridis", domain=[first, last], clamp=True),
                legend=None,
            )
        )
    ]
    if heads <= 16:  # more numbers would be unreadable
        bright = f"log(datum.value / {first}) > 0.55 * log({last} / {first})"
        black, white, grey = (alt.value(colour) for colour in ("black", "white", "grey"))
        without = "!isValid(datum.value)"  # cells without a number stay empty
        ink = alt.when(without).then(grey).when(bright).then(black).otherwise(white)
        cells.append(
            base.mark_text(fontSize=alt.ExprRef(f"max(8, min(13, width / {heads} / 2.8))")).encode(
                text="text:N", color=ink
            )
        )
    return alt.layer(*cells, title=title).properties(
        width="container", height=26 * frame["layer"].nunique()
    )
