"""Output error against the keys kept, and how many keys by weight match value-aware ones."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import OutputError
from value_aware_study.reporting import style
from value_aware_study.reporting.figures import KEYS_TITLE
from value_aware_study.reporting.labels import series_label
from value_aware_study.reporting.measurements import (
    AWARE,
    OBLIVIOUS,
    OPTIMAL,
    Measured,
    Rows,
    error_rows,
)

NOT_MEASURED = "The output error of every size was not measured."

# Smaller relative errors, zero included, are drawn here: below it is mostly rounding.
FLOOR = 1e-6
BOUND = "sampled from α, expected (Maurey's bound)"
CURVES: Mapping[str, Mapping[str, Any]] = {
    OBLIVIOUS: {},
    AWARE: {},
    "oblivious_keys_optimal_weights": {},
    "value_aware_keys_attention_weights": {},
    "norm_weighted_keys_2": {"approximation": "norm_weighted_keys", "norm": 2},
    "norm_weighted_keys_1": {"approximation": "norm_weighted_keys", "norm": 1},
    "leave_one_out_keys": {},
}
"""Method as the record has it -> what else tells its curve."""
ERRORS_TITLE = "relative squared output error (log scale)"
POINTS_PER_DOUBLING = 8
# Powers of ten as numbers down to 0.01, with an exponent below.
POWERS = "format(datum.value, datum.value < 0.005 ? '.0e' : '~g')"
# Least distance of two labels of one size, as a factor on the logarithmic axis.
LABEL_GAP = 1.24
COLUMNS = 3
WIDTH, HEIGHT = 245, 250
ALONE = 540
"""Of a panel that has no other beside it."""
LARGEST_POWER = 3
"""Of ten, on an axis of errors whose highest is not given."""


def curve_labels() -> dict[str, str]:
    """The measured methods, and the name of each one's curve."""
    labels = {name: series_label({"approximation": name, **more}) for name, more in CURVES.items()}
    return labels | {"maurey_bound": BOUND}


def _thinned(rows: Rows) -> Rows:
    """Rows of sizes about evenly spaced on a logarithmic axis, the last one kept."""
    last = rows[-1]["r"]
    steps = range(math.ceil(POINTS_PER_DOUBLING * math.log2(last)) + 1)
    wanted = {round(2 ** (step / POINTS_PER_DOUBLING)) for step in steps} | {last}
    return [row for row in rows if row["r"] in wanted]


def _curves(output_error: OutputError) -> Iterator[dict[str, Any]]:
    """One row a point: pooled curves of all methods, and each layer's of the optimal ones."""
    for method, series in curve_labels().items():
        if method not in output_error.methods:
            continue
        for layer in (None, *(range(output_error.layers) if method in OPTIMAL else ())):
            for row in _thinned(error_rows(output_error, method, layer)):
                drawn = max(row["error"], FLOOR)
                of_layer = "pooled" if layer is None else str(layer)
                yield {"series": series, "layer": of_layer, "r": row["r"], "error": drawn}


def intervals(output_error: OutputError) -> Rows:
    """The ends of the pooled error of every method and size whose interval is known."""
    labels = curve_labels()
    return [
        {"series": labels[at.method], "layer": "pooled", "r": at.r}
        | {"error": max(at.low, FLOOR), "high": max(at.high, FLOOR)}
        for at in output_error.errors
        if at.layer is None and at.head is None and at.low is not None and at.high is not None
    ]


def _encodings(drawn: pd.DataFrame) -> dict[str, Any]:
    labels = [label for label in curve_labels().values() if label in set(drawn["series"])]
    known = style.method_marks(pd.DataFrame({"series": labels, "approximation": ""}))
    known[BOUND] = style.Mark("#3D3D3D", "stroke")
    return style.series("series", {series: known[series] for series in labels}, columns=3)


def error_axis(field: str, title: str | None = ERRORS_TITLE, highest: float | None = None) -> alt.Y:
    """A logarithmic axis of relative errors, from the floor to the highest where it is given."""
    last = LARGEST_POWER if highest is None else math.ceil(math.log10(highest))
    ends = {"padding": 10} if highest is None else {"domain": [FLOOR / 1.5, highest * 1.3]}
    powers = [10.0**power for power in range(round(math.log10(FLOOR)), last + 1)]
    return style.log_axis(alt.Y, field, title, ends, values=powers, labelExpr=POWERS)


def _error_panel(
    item: Measured, frame: pd.DataFrame, encodings: Mapping[str, Any], y: alt.Y, width: int
) -> style.Panel:
    optimal = frame["series"].isin([curve_labels()[method] for method in OPTIMAL])
    pooled, bound = frame["layer"] == "pooled", frame["series"] == BOUND
    x = style.count_axis("r", KEYS_TITLE, [1, item.output_error.keys])

    def lines(rows: pd.DataFrame, **mark: Any) -> alt.Chart:
        base = alt.Chart(rows, width=width, height=HEIGHT).mark_line(**mark)
        return base.encode(x=x, y=y, color=encodings["color"], detail="layer:N")

    points = alt.Chart(frame[pooled & ~optimal & ~bound]).mark_point(filled=True, size=26)
    layers = [
        lines(frame[~pooled], strokeWidth=0.8, opacity=0.4),
        lines(frame[pooled & bound], strokeWidth=1.4, strokeDash=[5, 4]),
        lines(frame[pooled & ~optimal & ~bound], strokeWidth=1.1),
        points.encode(x=x, y=y, color=encodings["color"], shape=encodings["shape"]),
        lines(frame[pooled & optimal], strokeWidth=2.4),
    ]
    if known := intervals(item.output_error):
        bars = alt.Chart(pd.DataFrame(known)).mark_rule(strokeWidth=1.4)
        layers.append(bars.encode(x=x, y=y, y2="high:Q", color=encodings["color"]))
    return alt.layer(*layers, title=item.label)


def output_error_figure(measured: Sequence[Measured]) -> style.Chart:
    """Relative output error against r, pooled over layers (thick) and per layer (thin)."""
    if not measured:
        return style.empty(NOT_MEASURED)
    frames = [pd.DataFrame(_curves(item.output_error)) for item in measured]
    drawn = pd.concat(frames)
    encodings, highest = _encodings(drawn), drawn["error"].max()
    width = WIDTH if len(measured) > 1 else ALONE
    panels = []
    for place, (item, frame) in enumerate(zip(measured, frames, strict=True)):
        y = error_axis("error", None if place % COLUMNS else ERRORS_TITLE, highest)
        panels.append(_error_panel(item, frame, encodings, y, width))
    return alt.concat(*panels, columns=COLUMNS)


def _matching_rows(measured: Sequence[Measured]) -> Rows:
    rows = [
        {"series": item.label, "r": match.r, "needed": match.keys, "text": f"{match.keys:,}"}
        | {"low": match.low, "high": match.high}
        for item in measured
        for match in item.output_error.matching_keys
        if match.layer is None
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


def _matching_layers(frame: pd.DataFrame, marks: Mapping[str, style.Mark]) -> list[alt.Chart]:
    title = "r, value-aware keys per query (log scale)"
    encodings = style.series("series", marks, columns=3)
    highest = float(frame[["needed", "high"]].max().max())
    x = style.count_axis("r", title, frame["r"].astype(float).tolist())
    title, ends = "keys chosen by weight (log scale)", {"base": 2, "domain": [0.8, highest * 1.5]}
    powers = style.powers_of_two([1, highest])
    y = style.log_axis(alt.Y, "needed", title, ends, values=powers, format="d")
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


def matching_keys_figure(measured: Sequence[Measured]) -> style.Chart:
    """Keys chosen by weight with at most the error of r value-aware keys; dashed: as many."""
    frame = pd.DataFrame(_matching_rows(measured))
    if frame.empty:
        return style.empty(NOT_MEASURED)
    marks = {item.label: item.mark for item in measured}
    layers = [_diagonal(int(frame["r"].max())), *_matching_layers(frame, marks)]
    return alt.layer(*layers, width=620, height=400)
