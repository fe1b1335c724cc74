"""Figures 1 to 3 of the paper from our records, and two more about what the values add."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.reporting import style
from value_aware_attention.reporting.records import (
    KERNEL_LABELS,
    KERNELS,
    Record,
    find,
    series_label,
    settings,
)

ERROR_TITLE = "masked tokens predicted wrongly (%)"
LOSS_TITLE = "evaluation loss (nats per token)"
KEYS_TITLE = "r, keys per query (log scale)"


def save(chart: Any, path: Path) -> None:
    """Write a chart as PNG at twice its size; the same chart always gives the same bytes."""
    style.styled(chart).save(str(path), format="png", scale_factor=2)


def exact_value(frame: pd.DataFrame, model: str) -> float | None:
    exact = find(frame, model, "exact", {})
    return float(exact["value"]) if exact else None


def curves(
    frame: pd.DataFrame,
    x: alt.X,
    y: style.ValueAxis,
    colours: Mapping[str, str],
    width: int,
    fields: tuple[str, str, str] = ("value", "low", "high"),
) -> list[alt.Chart]:
    """Error bars, lines and points of every series of a frame, as layers."""
    value, low, high = fields
    base = alt.Chart(frame, width=width, height=style.HEIGHT).encode(
        x=x, color=style.colour("series", colours)
    )
    marks = base.mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=45, filled=True))
    return [style.error_bars(base, low, high, y), marks.encode(y=y.of(value))]


def _masked_panel(
    frame: pd.DataFrame, field: str, title: str, name: str, exact: float | None, width: int
) -> alt.LayerChart:
    counts = frame[field].astype(float).tolist()
    x = style.count_axis(field, title, counts)
    y = style.ValueAxis(ERROR_TITLE, alt.Scale(zero=False, padding=8))
    line = style.dashed_line(exact, f"exact {exact or 0:.1f}%", min(counts, default=1), y)
    colours = style.method_colours(frame["series"])
    return alt.layer(*line, *curves(frame, x, y, colours, width), title=name)


def figure_1(records: Sequence[Record]) -> style.Chart:
    """Masked-LM error of the long model against r (sparse methods) and features (ORF)."""
    frame = settings(records)
    frame = frame[frame["model"] == "masked_long"].copy()
    exact = exact_value(frame, "masked_long")
    frame["series"] = [series_label(row) for row in frame.to_dict("records")]
    sparse = frame[frame["r"].notna()].dropna(subset="value")
    dense = frame[frame["features"].notna()].dropna(subset="value")
    panels = []
    if len(sparse):
        panels.append(_masked_panel(sparse, "r", KEYS_TITLE, "(a) sparse", exact, 430))
    if len(dense):
        title = "random features (log scale)"
        panels.append(_masked_panel(dense, "features", title, "(b) random features", exact, 230))
    if not panels:
        return style.empty("No approximation of the long masked model was evaluated.")
    return alt.hconcat(*panels).resolve_scale(color="independent", y="shared")


def causal_losses(records: Sequence[Record]) -> pd.DataFrame:
    """Settings of the causal models in nats: loss, loss_low, loss_high, and the kernel's label."""
    frame = settings(records)
    frame = frame[(frame["task"] == "causal") & frame["kernel"].isin(KERNELS)].copy()
    for source, name in (("value", "loss"), ("low", "loss_low"), ("high", "loss_high")):
        frame[name] = [math.log(value) for value in frame[source].astype(float)]
    frame["kernel_label"] = frame["kernel"].map(KERNEL_LABELS)
    return frame


def figure_2(records: Sequence[Record]) -> style.Chart:
    """Loss of OVO-r against r up to all keys for each kernel; dashed: exact attention."""
    frame = causal_losses(records)
    frame = frame[frame["approximation"].isin(["optimal_v_oblivious", "exact"])]
    curves = frame[frame["approximation"] == "optimal_v_oblivious"]
    if curves.empty:
        return style.empty("No optimal value-oblivious setting of a causal model was evaluated.")
    colours = {k: v for k, v in style.KERNEL_COLOURS.items() if k in set(frame["kernel_label"])}
    x = style.count_axis("r", KEYS_TITLE, curves["r"].astype(float).tolist())
    y = style.ValueAxis(LOSS_TITLE, alt.Scale(zero=False))
    colour = style.colour("kernel_label", colours, title="kernel")
    base = alt.Chart(curves, width=520, height=style.HEIGHT).encode(x=x, color=colour)
    marks = base.mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=45)).encode(y=y.of("loss"))
    dashes = alt.Chart(frame[frame["approximation"] == "exact"]).mark_rule(strokeDash=[6, 4])
    exact = dashes.encode(y=y.of("loss"), color=colour)
    return alt.layer(exact, style.error_bars(base, "loss_low", "loss_high", y), marks)


def _curve_rows(
    training: Mapping[str, Mapping[str, Any]], models: Mapping[str, str], metric: str
) -> list[dict[str, Any]]:
    return [
        {"series": label, "step": point["step"], "y": point[metric]}
        for model, label in models.items()
        for point in training.get(model, {}).get("curve", [])
        if point.get(metric) is not None
    ]


def _learning_panel(
    rows: Sequence[Mapping[str, Any]], name: str, y_title: str, colours: Mapping[str, str]
) -> alt.LayerChart:
    frame = pd.DataFrame(rows)
    kept = {label: value for label, value in colours.items() if label in set(frame["series"])}
    base = alt.Chart(frame, width=330, height=style.HEIGHT).encode(
        x=alt.X("step:Q", title="optimizer steps", axis=alt.Axis(grid=False, format="~s")),
        y=alt.Y("y:Q", title=y_title, scale=alt.Scale(zero=False)),
        color=style.colour("series", kept),
    )
    line = base.mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=25))
    return alt.layer(line, title=name)


def figure_3(training: Mapping[str, Mapping[str, Any]]) -> style.Chart:
    """Learning curves with exact attention: both masked models, and the causal ones."""
    masked = _curve_rows(training, {"masked_short": "short", "masked_long": "long"}, "error")
    causal_models = {f"causal_{kernel}": KERNEL_LABELS[kernel] for kernel in KERNELS}
    causal = _curve_rows(training, causal_models, "loss")
    panels = []
    if masked:
        name = "(a) masked language models"
        panels.append(_learning_panel(masked, name, ERROR_TITLE, style.MODEL_COLOURS))
    if causal:
        name = "(b) causal language models"
        panels.append(_learning_panel(causal, name, LOSS_TITLE, style.KERNEL_COLOURS))
    if not panels:
        return style.empty("No learning curve was recorded.")
    return alt.hconcat(*panels).resolve_scale(color="independent")
