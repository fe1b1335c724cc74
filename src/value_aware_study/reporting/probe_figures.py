"""Figures of a probe: end metric, and the keys that layers and heads need."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import KeysNeeded, Record
from value_aware_study.reporting import captions, style
from value_aware_study.reporting.figures import KEYS_TITLE, curves
from value_aware_study.reporting.labels import method_label
from value_aware_study.reporting.measurements import OPTIMAL
from value_aware_study.reporting.output_error_figures import FLOOR
from value_aware_study.reporting.table import Figure

METRIC_TITLES = {
    "error": "hidden tokens predicted wrongly (%)",
    "perplexity": "perplexity",
    "cosine": "cosine to the exact hidden states",
}
HEAT_SIZE = 4
HEAT_SHARE = 0.05
LABELLED_HEADS = 16  # up to so many, the cells of a heat map carry their numbers
INTERVALS = "Intervals: 95%, over windows."


def probe_figures(record: Record, setting: str) -> list[Figure]:
    """All of them, with captions that end with `setting`."""
    size = heat_size(record)
    causal = f" {CAUSAL}" if record.attention[0].output_error.causal else ""
    drawn = (
        (
            "end_metric",
            "End metric against the keys kept",
            f"Every layer's attention replaced. {captions.OPTIMAL} {INTERVALS}",
            end_metric_figure(record),
        ),
        (
            "keys_needed",
            "Keys that each layer needs",
            "The fewest keys with which the relative output error of the layer is at most 1%, 5% "
            f"and 10%. {INTERVALS} {captions.BEST_FOUND}{causal}",
            keys_needed_figure(record),
        ),
        (
            "heat_map",
            f"Output error of each layer and head with {size} keys",
            f"Relative squared output error. One colour scale for both. {captions.BEST_FOUND}",
            heat_map(record),
        ),
        (
            "keys_by_head",
            f"Keys that each head needs for an output error of {HEAT_SHARE:.0%}",
            f"The fewest keys. One colour scale for both. {captions.BEST_FOUND}{causal}",
            keys_by_head(record),
        ),
    )
    return [Figure(name, title, f"{text} {setting}", chart) for name, title, text, chart in drawn]


CAUSAL = (
    "A causal query sees its past alone: rows at all positions count alike, and one that sees no "
    "more keys than are kept is exact with either method."
)


def heat_size(record: Record) -> int:
    """The size of the heat map: 4, or the measured one nearest to it."""
    return min(sizes_of(record), key=lambda size: (abs(size - HEAT_SIZE), size))


def sizes_of(record: Record) -> list[int]:
    """The numbers of keys that the end metric was measured with."""
    return sorted({cell.parameters["r"] for cell in record.cells[1:]})


def layers_of(record: Record) -> list[KeysNeeded]:
    """The keys that each layer needs, and all of them, heads pooled."""
    return [row for row in record.attention[0].output_error.keys_needed if row.head is None]


def shares_of(record: Record) -> list[float]:
    """The relative output errors that keys were counted for."""
    return sorted({row.share for row in layers_of(record)})


def end_metric_figure(record: Record) -> style.Chart:
    """Value of every method at every size with intervals; dashed: exact attention."""
    exact, *cells = record.cells
    rows = [
        {"series": method_label(cell.approximation), "approximation": cell.approximation}
        | {"value": cell.value, "low": cell.low, "high": cell.high}
        | {"r": cell.parameters["r"], "features": None}
        for cell in cells
    ]
    frame = pd.DataFrame(rows)
    frame[["low", "high"]] = frame[["low", "high"]].astype(float)
    values = [exact.value, *frame["low"], *frame["high"], *frame["value"]]
    # room for the name of the line at d + 1 above the line of exact attention
    values.append(exact.value + 0.08 * (exact.value - frame["value"].min()))
    y = style.value_axis(METRIC_TITLES[record.metric], values)
    sizes = [float(size) for size in sizes_of(record)]
    encodings = style.series("series", style.method_marks(frame), columns=4)
    marks = style.head_line(record.head_dim, sizes, y)
    marks += style.dashed_line(exact.value, "exact", min(sizes), y)
    marks += curves(frame, style.count_axis("r", KEYS_TITLE, sizes), y, encodings)
    return alt.layer(*marks, width=540)


def _optimal_encodings() -> dict[str, Any]:
    optimal = {"series": map(method_label, OPTIMAL), "approximation": OPTIMAL}
    return style.series("series", style.method_marks(pd.DataFrame(optimal)))


def keys_needed_figure(record: Record) -> style.Chart:
    """Keys needed in each layer, by weight and value-aware, one panel for each error."""
    errors, rows = record.attention[0].output_error, layers_of(record)
    layers = ["all", *(str(layer) for layer in range(errors.layers))]
    frame = pd.DataFrame(map(vars, rows)).assign(
        series=[method_label(row.method) for row in rows],
        place=["all" if row.layer is None else str(row.layer) for row in rows],
    )
    scale = [1.0, float(errors.keys)]
    panels = [
        _needed_panel(of_share, f"{share:.0%} error", layers, scale, None if place else "layer")
        for place, (share, of_share) in enumerate(frame.groupby("share"))
    ]
    return alt.hconcat(*panels)


def _needed_panel(
    frame: pd.DataFrame, name: str, layers: Sequence[str], ends: Sequence[float], title: str | None
) -> style.Panel:
    encodings = _optimal_encodings()
    y = alt.Y("place:N", title=title, sort=list(layers), axis=alt.Axis(grid=True))
    domain = {"base": 2, "domain": [0.8, ends[1] * 1.3]}
    ticks = {"values": style.powers_of_two(ends)[::2], "format": "d", "grid": False}
    x, low = (
        style.log_axis(alt.X, field, "keys needed (log scale)", domain, **ticks)
        for field in ("keys", "low")
    )
    used = frame[["series", "place", "keys", "low", "high"]]
    base = alt.Chart(used, width=190, height=alt.Step(20))
    points = base.mark_point(filled=True, size=58, opacity=1).encode(x=x, y=y, **encodings)
    known = alt.Chart(used[used["low"].notna()]).mark_rule(strokeWidth=1.4, opacity=0.7)
    bars = known.encode(x=low, x2="high:Q", y=y, color=encodings["color"])
    return alt.layer(bars, points, title=name)


def heat_map(record: Record) -> style.Chart:
    """Relative output error of every layer and head at one size, by weight and value-aware."""
    rows = [
        _cell(at.method, at.layer, at.head, max(at.error, FLOOR), f"{at.error:.2g}")
        for at in record.attention[0].output_error.errors
        if at.r == heat_size(record) and at.head is not None
    ]
    return _heat_maps(rows, "relative output error", ".0e")


def keys_by_head(record: Record) -> style.Chart:
    """Keys that every head needs for 5% error, by weight and value-aware."""
    rows = [
        _cell(row.method, row.layer, row.head, row.keys, f"{row.keys:,}")
        for row in record.attention[0].output_error.keys_needed
        if row.head is not None and row.share == HEAT_SHARE
    ]
    return _heat_maps(rows, "keys needed", ",d")


def _cell(method: str, layer: int | None, head: int, value: float, text: str) -> dict[str, Any]:
    place = {"series": method_label(method), "layer": layer, "head": head}
    return place | {"value": value, "text": text}


def _heat_maps(rows: Sequence[Mapping[str, Any]], title: str, number: str) -> style.Chart:
    """One panel for each of the optimal methods, with one logarithmic colour scale."""
    frame = pd.DataFrame(rows)
    low, high = frame["value"].min(), frame["value"].max()
    scale = alt.Scale(type="log", scheme="viridis", domain=[low, max(high, low * 1.01)])
    legend = alt.Legend(title=title, format=number, gradientLength=160)
    colour = alt.Color("value:Q", scale=scale, legend=legend)
    middle = math.sqrt(low * high)
    panels = [
        _heat_panel(frame[frame["series"] == method_label(method)], colour, middle)
        for method in OPTIMAL
    ]
    return alt.hconcat(*panels)


def _heat_panel(frame: pd.DataFrame, colour: alt.Color, middle: float) -> style.Panel:
    labelled = frame["head"].max() < LABELLED_HEADS
    step = 40 if labelled else 14
    base = alt.Chart(frame, width=alt.Step(step), height=alt.Step(24 if labelled else 14)).encode(
        x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("layer:O", title="layer", axis=alt.Axis(labelOverlap=True)),
    )
    marks = [base.mark_rect().encode(color=colour)]
    if labelled:
        dark = alt.condition(f"datum.value < {middle}", alt.value("white"), alt.value("black"))
        marks.append(base.mark_text(fontSize=10).encode(text="text:N", color=dark))
    return alt.layer(*marks, title=str(frame["series"].iloc[0]))
