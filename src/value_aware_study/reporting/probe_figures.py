"""Figures of a probe: end metric, output error, and the keys that layers and heads need."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.layer_errors import SHARES
from value_aware_study.reporting import captions, style
from value_aware_study.reporting.figure import Figure
from value_aware_study.reporting.figures import KEYS_TITLE, curves
from value_aware_study.reporting.measurements import AWARE, OBLIVIOUS, error_rows
from value_aware_study.reporting.output_error_figures import ERRORS_TITLE, FLOOR, POWERS
from value_aware_study.reporting.records import method_label
from value_aware_study.reporting.table import setting_value

Record = Mapping[str, Any]

METRIC_TITLES = {
    "error": "hidden tokens predicted wrongly (%)",
    "perplexity": "perplexity",
    "cosine": "cosine to the exact hidden states",
}
HEAT_SIZE = 4
HEAT_SHARE = 0.05
LABELLED_HEADS = 16  # up to so many, the cells of a heat map carry their numbers
OPTIMAL = (OBLIVIOUS, AWARE)
INTERVALS = "Intervals: 95%, over windows."


def probe_figures(record: Record, setting: str) -> list[Figure]:
    """All of them, with captions that end with `setting`."""
    size = heat_size(record)
    causal = f" {CAUSAL}" if record["causal"] else ""
    drawn = (
        (
            "end_metric",
            "End metric against the keys kept",
            f"Every layer's attention replaced. {captions.OPTIMAL} {INTERVALS}",
            end_metric_figure(record),
        ),
        (
            "output_error",
            "Output error against the keys kept",
            "Sum of |o − õ|² over the sum of |o|², in all layers on the exact model's queries, "
            f"keys and values. Thick: all layers pooled; thin: each layer. {captions.OPTIMAL} "
            f"{captions.BEST_FOUND} {INTERVALS} Errors under {setting_value(FLOOR)} are drawn at "
            f"it.{causal}",
            output_error_figure(record),
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
    return min(record["sizes"], key=lambda size: (abs(size - HEAT_SIZE), size))


def end_metric_figure(record: Record) -> style.Chart:
    """Value of every method at every size with intervals; dashed: exact attention."""
    exact, *cells = record["cells"]
    rows = [
        {"series": method_label(c["approximation"]), "features": None}
        | {name: c[name] for name in ("value", "low", "high")}
        | {"r": c["parameters"]["r"]}
        for c in cells
    ]
    frame = pd.DataFrame(rows)
    frame[["low", "high"]] = frame[["low", "high"]].astype(float)
    values = [exact["value"], *frame["low"], *frame["high"], *frame["value"]]
    # room for the name of the line at d + 1 above the line of exact attention
    values.append(exact["value"] + 0.08 * (exact["value"] - frame["value"].min()))
    y = style.value_axis(METRIC_TITLES[record["metric"]], values)
    sizes = [float(size) for size in record["sizes"]]
    encodings = style.series("series", style.method_marks(frame["series"]), columns=4)
    marks = style.head_line(record["head_dim"], sizes, y)
    marks += style.dashed_line(exact["value"], "exact", min(sizes), y)
    marks += curves(frame, style.count_axis("r", KEYS_TITLE, sizes), y, encodings)
    return alt.layer(*marks, width=540)


def _optimal_encodings() -> dict[str, Any]:
    labels = [method_label(method) for method in OPTIMAL]
    return style.series("series", style.method_marks(labels))


def _curve_rows(record: Record) -> pd.DataFrame:
    """Pooled curves and each layer's, at about evenly spaced sizes on the logarithmic axis."""
    rows = []
    for method in OPTIMAL:
        for layer in (None, *range(record["layers"])):
            for row in error_rows(record["output_error"], method, layer):
                drawn = max(row["error"], FLOOR)
                place = "pooled" if layer is None else str(layer)
                rows.append({"series": method_label(method), "layer": place, "r": row["r"]})
                rows[-1]["error"] = drawn
    largest = record["output_error"]["keys"]
    steps = {round(2 ** (step / 8)) for step in range(8 * largest.bit_length())}
    frame = pd.DataFrame(rows)
    return frame[frame["r"].isin(steps | {largest, record["head_dim"] + 1})]


def _interval_rows(record: Record) -> pd.DataFrame:
    rows = [
        {"series": method_label(method), "r": size}
        | {"error": max(low, FLOOR), "high": max(high, FLOOR)}
        for method in OPTIMAL
        for size, low, high in zip(
            record["sizes"], record["pooled"][method]["low"], record["pooled"][method]["high"],
            strict=True,
        )
        if low is not None
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["series", "r", "error", "high"])


def output_error_figure(record: Record) -> style.Chart:
    """Relative output error against r: pooled (thick, with intervals) and in each layer (thin)."""
    frame, encodings = _curve_rows(record), _optimal_encodings()
    y = _error_axis(frame["error"].max())
    x = style.count_axis("r", KEYS_TITLE, [1, record["output_error"]["keys"]])
    pooled = frame["layer"] == "pooled"

    def lines(rows: pd.DataFrame, **mark: Any) -> alt.Chart:
        base = alt.Chart(rows, width=540, height=style.HEIGHT).mark_line(**mark)
        return base.encode(x=x, y=y, color=encodings["color"], detail="layer:N")

    bars = alt.Chart(_interval_rows(record)).mark_rule(strokeWidth=1.4)
    return alt.layer(
        lines(frame[~pooled], strokeWidth=0.8, opacity=0.4),
        lines(frame[pooled], strokeWidth=2.4),
        bars.encode(x=x, y=y, y2="high:Q", color=encodings["color"]),
    )


def _error_axis(highest: float) -> alt.Y:
    powers = range(round(math.log10(FLOOR)), math.ceil(math.log10(highest)) + 1)
    scale = alt.Scale(type="log", domain=[FLOOR / 1.5, highest * 1.5], nice=False)
    axis = alt.Axis(values=[10.0**power for power in powers], labelExpr=POWERS)
    return alt.Y("error:Q", title=ERRORS_TITLE, scale=scale, axis=axis)


def keys_needed_figure(record: Record) -> style.Chart:
    """Keys needed in each layer, by weight and value-aware, one panel for each error."""
    rows = [row for row in record["keys_needed"] if row["head"] is None]
    layers = ["all", *(str(layer) for layer in range(record["layers"]))]
    frame = pd.DataFrame(rows).assign(
        series=[method_label(row["method"]) for row in rows],
        place=["all" if row["layer"] is None else str(row["layer"]) for row in rows],
    )
    scale = [1.0, float(record["output_error"]["keys"])]
    panels = [_needed_panel(frame[frame["share"] == s], s, layers, scale) for s in SHARES]
    return alt.hconcat(*panels)


def _needed_panel(
    frame: pd.DataFrame, share: float, layers: Sequence[str], ends: Sequence[float]
) -> style.Panel:
    encodings = _optimal_encodings()
    title = "layer" if share == SHARES[0] else None
    y = alt.Y("place:N", title=title, sort=list(layers), axis=alt.Axis(grid=True))
    domain = alt.Scale(type="log", base=2, domain=[0.8, ends[1] * 1.3], nice=False)
    axis = alt.Axis(values=style.powers_of_two(ends)[::2], format="d", grid=False)
    x = alt.X("keys:Q", title="keys needed (log scale)", scale=domain, axis=axis)
    used = frame[["series", "place", "keys", "low", "high"]]
    base = alt.Chart(used, width=190, height=alt.Step(20))
    points = base.mark_point(filled=True, size=58, opacity=1).encode(x=x, y=y, **encodings)
    known = alt.Chart(used[used["low"].notna()]).mark_rule(strokeWidth=1.4, opacity=0.7)
    low = alt.X("low:Q", title="keys needed (log scale)", scale=domain, axis=axis)
    bars = known.encode(x=low, x2="high:Q", y=y, color=encodings["color"])
    return alt.layer(bars, points, title=f"{share:.0%} error")


def heat_map(record: Record) -> style.Chart:
    """Relative output error of every layer and head at one size, by weight and value-aware."""
    at = record["sizes"].index(heat_size(record))
    rows = [
        _cell(method, layer, head, max(errors[at], FLOOR), f"{errors[at]:.2g}")
        for method in OPTIMAL
        for layer, heads in enumerate(record["by_head"][method]["error"])
        for head, errors in enumerate(heads)
    ]
    return _heat_maps(rows, "relative output error", ".0e")


def keys_by_head(record: Record) -> style.Chart:
    """Keys that every head needs for 5% error, by weight and value-aware."""
    rows = [
        _cell(row["method"], row["layer"], row["head"], row["keys"], f"{row['keys']:,}")
        for row in record["keys_needed"]
        if row["head"] is not None and row["share"] == HEAT_SHARE
    ]
    return _heat_maps(rows, "keys needed", ",d")


def _cell(method: str, layer: int, head: int, value: float, text: str) -> dict[str, Any]:
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
