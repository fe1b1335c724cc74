"""Relative output error against r, pooled over layers (thick) and in each layer (thin)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import OutputError
from value_aware_study.report import captions
from value_aware_study.report.curves import count_axis, figure, powers, powers_of_two
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.figure_1 import KEYS
from value_aware_study.report.formatting import DASH, missing
from value_aware_study.report.labels import series_label
from value_aware_study.report.look import OPACITY, Mark, Panel, direction, reference
from value_aware_study.report.marks import method_marks
from value_aware_study.report.measurements import (
    AWARE,
    FLOOR,
    OBLIVIOUS,
    OPTIMAL,
    Measured,
    Rows,
    error_rows,
    measured_on,
)

__all__ = ["BOUND", "ERRORS", "curve_labels", "exhibit", "intervals"]

BOUND = "sampled from α, expected (Maurey's bound)"
BOUND_MARK = Mark.of("deep", "stroke")
ERRORS = direction("relative squared output error", "lower")
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
POINTS_PER_DOUBLING = 8
POOLED = "all"


def exhibit(measured: Sequence[Measured], name: str, begins: str = "") -> Exhibit | None:
    """A panel for each of these; `name` and what its title `begins` with are the page's."""
    if not measured:
        return None
    frames = {item.label: pd.DataFrame(_curves(item.output_error)) for item in measured}
    drawn = pd.concat(frame.assign(model=label) for label, frame in frames.items())
    notes = [
        f"{captions.OUTPUT_ERROR} On the exact model's own queries, keys and values. Thick: all "
        "layers pooled, with intervals where they are known; thin: OVO and OVA in each layer. "
        f"Errors under {FLOOR:g}, zero included, are drawn there.",
        f"{captions.OPTIMAL} {captions.BEST_FOUND}",
    ]
    if any("maurey_bound" in item.output_error.methods for item in measured):
        notes.append(
            f"{captions.BASELINES} Dashed: the expected error of the mean of r values drawn from "
            "α, Var/r (Maurey), which the optimum is never above."
        )
    return Exhibit(
        name,
        f"{begins}Output error against the keys kept",
        "How far r keys are from exact attention's output, chosen by weight (OVO), for the output "
        "(OVA), or by other scores.",
        [*notes, measured_on(measured)],
        [_panel(item, frames[item.label]) for item in measured],
        _table(drawn),
        choices=[item.label for item in measured],
    )


def curve_labels() -> dict[str, str]:
    """The measured methods, and the name of each one's curve."""
    labels = {name: series_label({"approximation": name, **more}) for name, more in CURVES.items()}
    return labels | {"maurey_bound": BOUND}


def intervals(output_error: OutputError) -> dict[tuple[str, int], tuple[float, float]]:
    """The ends of the pooled error of every curve and size whose interval is known."""
    labels = curve_labels()
    return {
        (labels[at.method], at.r): (max(at.low, FLOOR), max(at.high, FLOOR))
        for at in output_error.errors
        if at.layer is None and at.head is None and at.low is not None and at.high is not None
    }


def _thinned(rows: Rows) -> Rows:
    """Rows of sizes about evenly spaced on a logarithmic axis, the last one kept."""
    last = rows[-1]["r"]
    steps = range(math.ceil(POINTS_PER_DOUBLING * math.log2(last)) + 1)
    wanted = {round(2 ** (step / POINTS_PER_DOUBLING)) for step in steps} | {last}
    return [row for row in rows if row["r"] in wanted]


def _curves(output_error: OutputError) -> Iterator[dict[str, Any]]:
    """One row a point: pooled curves of all methods, and each layer's of the optimal ones."""
    known = intervals(output_error)
    for method, series in curve_labels().items():
        if method not in output_error.methods:
            continue
        for layer in (None, *(range(output_error.layers) if method in OPTIMAL else ())):
            pooled = layer is None
            for row in _thinned(error_rows(output_error, method, layer)):
                low, high = known.get((series, row["r"]), (None, None)) if pooled else (None, None)
                yield {
                    "series": series,
                    "layer": POOLED if pooled else str(layer),
                    "r": row["r"],
                    "error": max(row["error"], FLOOR),
                    "low": low,
                    "high": high,
                }


def _panel(item: Measured, frame: pd.DataFrame) -> Panel:
    marks = method_marks(frame.assign(approximation="")) | {BOUND: BOUND_MARK}
    marks = {name: marks[name] for name in curve_labels().values() if name in set(frame["series"])}
    keys, head = item.output_error.keys, item.output_error.head_dim + 1
    x = count_axis(KEYS, [1, keys])
    x.shorthand = "r:Q"
    y = powers(alt.Y, "error", ERRORS, frame["error"].tolist())
    pooled, bound = frame["layer"] == POOLED, frame["series"] == BOUND
    optimal = frame["series"].isin([curve_labels()[method] for method in OPTIMAL])
    layers = [
        _lines(frame[~pooled], marks, x, y, strokeWidth=0.7, strokeOpacity=0.5),
        _lines(frame[pooled & bound], marks, x, y, strokeWidth=1.4, strokeDash=[5, 4]),
        _lines(frame[pooled & ~optimal & ~bound], marks, x, y, strokeWidth=1.1),
        _lines(frame[pooled & optimal], marks, x, y, strokeWidth=2.4),
        *_points(frame[pooled & ~bound], marks, x, y),
    ]
    marked = reference(head, f"d + 1 = {head}") if head <= keys else []
    return figure([*marked, *layers], item.label)


def _lines(
    rows: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X, y: alt.Y, **mark: Any
) -> alt.Chart:
    colours = alt.Scale(domain=list(marks), range=[mark.colour for mark in marks.values()])
    legend = alt.Legend(orient="bottom", columns=2)
    return (
        alt.Chart(rows[["series", "layer", "r", "error"]])
        .mark_line(**mark)
        .encode(
            x=x,
            y=y,
            color=alt.Color("series:N", scale=colours, legend=legend),
            detail="layer:N",
            opacity=OPACITY,
        )
    )


def _points(rows: pd.DataFrame, marks: Mapping[str, Mark], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Pooled errors at the powers of two, and their intervals where they are known."""
    rows = rows[rows["r"].isin(powers_of_two([1, rows["r"].max()]))]
    known = rows["low"].notna()
    ends = ("error", "low", "high") if known.any() else ("error",)
    shapes = alt.Scale(domain=list(marks), range=[mark.shape for mark in marks.values()])
    base = alt.Chart(rows[["series", "r", *ends]]).encode(
        x=x,
        y=y,
        color=alt.Color("series:N"),
        opacity=OPACITY,
        tooltip=["series:N", "r:Q", *(alt.Tooltip(f"{end}:Q", format=".4~g") for end in ends)],
    )
    points = base.mark_point(filled=True, size=44).encode(shape=alt.Shape("series:N", scale=shapes))
    if not known.any():
        return [points]
    low = y.copy()
    low.shorthand = "low:Q"
    return [base.mark_rule(strokeWidth=1.4).encode(y=low, y2="high:Q"), points]


def _table(drawn: pd.DataFrame) -> Table:
    """The errors at the powers of two."""
    shown = drawn["r"].isin(powers_of_two([1, drawn["r"].max()]))
    columns = ["model", "layer", "series", "r", "error", "low", "high"]
    data = drawn.loc[shown, columns].reset_index(drop=True)
    display = data[["model", "layer", "series", "r"]].astype(str)
    display = display.rename(columns={"series": "method"})
    for name in ("error", "low", "high"):
        display[name] = [DASH if missing(value) else f"{value:.3g}" for value in data[name]]
    return Table(data, display)
