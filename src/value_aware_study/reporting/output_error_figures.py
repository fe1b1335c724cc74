"""Output error against the keys kept, and how many keys by weight match value-aware ones."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_study.reporting import style
from value_aware_study.reporting.figures import KEYS_TITLE
from value_aware_study.reporting.measurements import (
    AWARE,
    OBLIVIOUS,
    Measured,
    OutputError,
    Rows,
    error_rows,
    keys_needed,
    sizes_to_compare,
    with_output_error,
)
from value_aware_study.reporting.records import method_label, series_label

NOT_MEASURED = "The output error of every size was not measured."

# Smaller relative errors, zero included, are drawn here: below it is mostly rounding.
FLOOR = 1e-6
BOUND = "sampled from α, expected (Maurey's bound)"
OPTIMAL = (OBLIVIOUS, AWARE)
ERRORS_TITLE = "relative squared output error (log scale)"
POINTS_PER_DOUBLING = 8
# Powers of ten as numbers down to 0.01, with an exponent below.
POWERS = "format(datum.value, datum.value < 0.005 ? '.0e' : '~g')"
# Least distance of two labels of one size, as a factor on the logarithmic axis.
LABEL_GAP = 1.24
COLUMNS = 3
WIDTH, HEIGHT = 245, 250


def curve_labels() -> dict[str, str]:
    """The measured methods, and the name of each one's curve."""
    optimal = (OBLIVIOUS, AWARE, "oblivious_keys_optimal_weights")
    labels = {name: method_label(name) for name in (*optimal, "value_aware_keys_attention_weights")}
    for norm in (2, 1):
        setting = {"approximation": "norm_weighted_keys", "norm": norm}
        labels[f"norm_weighted_keys_{norm}"] = series_label(setting)
    labels["leave_one_out_keys"] = method_label("leave_one_out_keys")
    return labels | {"maurey_bound": BOUND}


def _thinned(rows: Rows) -> Rows:
    """Rows of sizes about evenly spaced on a logarithmic axis, the last one kept."""
    last = rows[-1]["r"]
    steps = range(math.ceil(POINTS_PER_DOUBLING * math.log2(last)) + 1)
    wanted = {round(2 ** (step / POINTS_PER_DOUBLING)) for step in steps} | {last}
    return [row for row in rows if row["r"] in wanted]


def _curves(output_error: OutputError) -> Iterator[dict[str, Any]]:
    """One row a point: pooled curves of all methods, and each layer's of the optimal ones."""
    layers = len(output_error["squared_norm"])
    for method, series in curve_labels().items():
        if method not in output_error["methods"]:
            continue
        for layer in (None, *(range(layers) if method in OPTIMAL else ())):
            for row in _thinned(error_rows(output_error, method, layer)):
                drawn = max(row["error"], FLOOR)
                of_layer = "pooled" if layer is None else str(layer)
                yield {"series": series, "layer": of_layer, "r": row["r"], "error": drawn}


def _marks() -> dict[str, style.Mark]:
    labels = curve_labels().values()
    known = {**style.method_marks(labels), BOUND: style.Mark("#3D3D3D", "stroke")}
    return {series: known[series] for series in labels}


def _error_axis(highest: float, title: str | None) -> alt.Y:
    powers = range(round(math.log10(FLOOR)), math.ceil(math.log10(highest)) + 1)
    scale = alt.Scale(type="log", domain=[FLOOR / 1.5, highest * 1.3], nice=False)
    axis = alt.Axis(values=[10.0**power for power in powers], labelExpr=POWERS)
    return alt.Y("error:Q", title=title, scale=scale, axis=axis)


def _error_panel(item: Measured, output_error: OutputError, y: alt.Y) -> style.Panel:
    frame = pd.DataFrame(_curves(output_error))
    encodings = style.series("series", _marks(), columns=3)
    optimal = frame["series"].isin([curve_labels()[method] for method in OPTIMAL])
    pooled, bound = frame["layer"] == "pooled", frame["series"] == BOUND
    x = style.count_axis("r", KEYS_TITLE, [1, item.keys])

    def lines(rows: pd.DataFrame, **mark: Any) -> alt.Chart:
        base = alt.Chart(rows, width=WIDTH, height=HEIGHT).mark_line(**mark)
        return base.encode(x=x, y=y, color=encodings["color"], detail="layer:N")

    points = alt.Chart(frame[pooled & ~optimal & ~bound]).mark_point(filled=True, size=26)
    return alt.layer(
        lines(frame[~pooled], strokeWidth=0.8, opacity=0.4),
        lines(frame[pooled & bound], strokeWidth=1.4, strokeDash=[5, 4]),
        lines(frame[pooled & ~optimal & ~bound], strokeWidth=1.1),
        points.encode(x=x, y=y, color=encodings["color"], shape=encodings["shape"]),
        lines(frame[pooled & optimal], strokeWidth=2.4),
        title=item.label,
    )


def output_error_figure(measured: Sequence[Measured]) -> style.Chart:
    """Relative output error against r, pooled over layers (thick) and per layer (thin)."""
    items = with_output_error(measured)
    if not items:
        return style.empty(NOT_MEASURED)
    highest = max(row["error"] for _, errors in items for row in _curves(errors))
    panels = [
        _error_panel(item, errors, _error_axis(highest, None if place % COLUMNS else ERRORS_TITLE))
        for place, (item, errors) in enumerate(items)
    ]
    return alt.concat(*panels, columns=COLUMNS)


def _needed_rows(items: Sequence[tuple[Measured, OutputError]]) -> Rows:
    rows = [
        {"series": item.label, "r": r, "needed": found["keys"], "text": f"{found['keys']:,}"}
        | {"low": found["low"], "high": found["high"]}
        for item, errors in items
        for r in sizes_to_compare(errors)
        if (found := keys_needed(errors, r)) is not None
    ]
    return _with_label_places(rows)


def _with_label_places(rows: Rows) -> Rows:
    """Each row with `label_at`: its own value, or lower where another label would be too near."""
    placed: Rows = []
    above: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: -row["needed"]):
        highest = above.get(row["r"], math.inf) / LABEL_GAP
        above[row["r"]] = min(float(row["needed"]), highest)
        placed.append(row | {"label_at": above[row["r"]]})
    return placed


def _needed_layers(frame: pd.DataFrame, marks: Mapping[str, style.Mark]) -> list[alt.Chart]:
    title = "r, value-aware keys per query (log scale)"
    encodings = style.series("series", marks, columns=3)
    highest = float(frame[["needed", "high"]].max().max())
    x = style.count_axis("r", title, frame["r"].astype(float).tolist())
    scale = alt.Scale(type="log", base=2, domain=[0.8, highest * 1.5], nice=False)
    axis = alt.Axis(values=style.powers_of_two([1, highest]), format="d")
    title = "keys chosen by weight (log scale)"
    y = alt.Y("needed:Q", title=title, scale=scale, axis=axis)
    base = alt.Chart(frame).encode(x=x, y=y, color=encodings["color"])
    labels = base.encode(text="text:N", y=alt.Y("label_at:Q", title=title))
    bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.4, opacity=0.7)
    text: Any = {"dx": 9, "align": "left", "baseline": "middle", "fontSize": 12}
    return [
        bars.encode(y=alt.Y("low:Q", title=title), y2="high:Q"),
        base.mark_line(strokeWidth=style.PLAIN.line),
        base.mark_point(filled=True, size=style.PLAIN.point, opacity=1).encode(
            shape=encodings["shape"]
        ),
        labels.mark_text(**text, stroke="white", strokeWidth=3.5),
        labels.mark_text(**text),
    ]


def _diagonal(last: int) -> alt.Chart:
    frame = pd.DataFrame({"r": [1, last], "needed": [1, last]})
    line = alt.Chart(frame).mark_line(strokeDash=[6, 4], strokeWidth=1.2, color=style.EXACT)
    return line.encode(x="r:Q", y="needed:Q")


def keys_needed_figure(measured: Sequence[Measured]) -> style.Chart:
    """Keys chosen by weight with at most the error of r value-aware keys; dashed: as many."""
    items = with_output_error(measured)
    frame = pd.DataFrame(_needed_rows(items))
    if frame.empty:
        return style.empty(NOT_MEASURED)
    marks = {item.label: item.mark for item, _ in items}
    layers = [_diagonal(int(frame["r"].max())), *_needed_layers(frame, marks)]
    return alt.layer(*layers, width=620, height=400)
