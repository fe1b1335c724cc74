"""Figures that the paper does not have: output error against loss, and OVO against OVA."""

from collections.abc import Sequence

import altair as alt
import pandas as pd

from value_aware_attention.reporting import style
from value_aware_attention.reporting.figures import (
    ERROR_TITLE,
    KEYS_TITLE,
    LOSS_TITLE,
    causal_losses,
    curves,
    exact_value,
)
from value_aware_attention.reporting.records import (
    KERNEL_LABELS,
    KERNELS,
    METHOD_LABELS,
    Record,
    series_label,
    settings,
)

# Settings with a smaller output error are exact for every purpose of figure 4, and not drawn.
SMALLEST_ERROR = 1e-3
OUTPUT_ERROR_TITLE = "relative squared output error, mean of layers (log scale)"
OUTPUT_ERROR_TICKS = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
INCREASE_TITLE = "loss minus exact loss (nats per token)"


def _approximate(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame[frame["relative_output_error"] >= SMALLEST_ERROR]
    frame = frame[frame["approximation"] != "exact"]
    return frame.assign(series=[series_label(row) for row in frame.to_dict("records")])


def _points(frame: pd.DataFrame, title: str, y: alt.Y) -> alt.Chart:
    scale = alt.Scale(type="log", nice=False, padding=12)
    axis = alt.Axis(format="~g", values=OUTPUT_ERROR_TICKS, grid=False, labelOverlap="greedy")
    points = alt.Chart(frame, width=350, height=style.HEIGHT, title=title).mark_point(
        filled=True, size=62, opacity=0.8
    )
    field = "relative_output_error:Q"
    return points.encode(x=alt.X(field, title=OUTPUT_ERROR_TITLE, scale=scale, axis=axis), y=y)


def _masked_panel(records: Sequence[Record]) -> list[style.Panel]:
    every = settings(records)
    exact = exact_value(every, "masked_long")
    frame = _approximate(every[every["model"] == "masked_long"])
    if frame.empty:
        return []
    y = style.value_axis(ERROR_TITLE, [exact, *frame["value"]])
    least = float(frame["relative_output_error"].min())
    line = style.dashed_line(exact, f"exact, {exact or 0:.1f}%", least, y)
    frame = frame[["series", "relative_output_error", "value"]]
    points = _points(frame, "(a) long masked model", y.of("value"))
    encodings = style.series("series", style.method_marks(frame["series"]), columns=2)
    return [alt.layer(*line, points.encode(**encodings))]


def _causal_panel(records: Sequence[Record]) -> list[style.Panel]:
    losses = causal_losses(records)
    exact = losses[losses["approximation"] == "exact"].set_index("kernel")["loss"]
    frame = _approximate(losses)
    frame = frame[frame["kernel"].isin(exact.index)]
    if frame.empty:
        return []
    frame = frame.assign(increase=frame["loss"] - frame["kernel"].map(exact))
    y = style.value_axis(INCREASE_TITLE, [0.0, *frame["increase"]])
    frame = frame[["series", "kernel_label", "relative_output_error", "increase"]]
    points = _points(frame, "(b) causal models", y.of("increase"))
    colour = style.series("series", style.method_marks(frame["series"]), columns=1)["color"]
    shape = style.series("kernel_label", style.KERNEL_MARKS, columns=1)["shape"]
    line = style.dashed_line(0.0, "exact", float(frame["relative_output_error"].min()), y)
    return [alt.layer(*line, points.encode(color=colour, shape=shape))]


def figure_4(records: Sequence[Record]) -> style.Chart:
    """End metric of every setting against its relative output error ||o - o~||^2 / ||o||^2."""
    panels = [*_masked_panel(records), *_causal_panel(records)]
    if not panels:
        return style.empty("No output error was recorded.")
    return alt.hconcat(*panels).resolve_scale(color="independent", shape="independent")


def _kernel_panel(frame: pd.DataFrame, kernel: str, y: style.ValueAxis) -> style.Panel:
    counts = frame["r"].dropna().astype(float).tolist()
    of_kernel = frame[frame["kernel"] == kernel]
    exact = of_kernel[of_kernel["approximation"] == "exact"]["loss"].tolist()
    optimal = of_kernel[of_kernel["approximation"] != "exact"]
    marks = style.method_marks(frame[frame["approximation"] != "exact"]["series"])
    layers = [
        *style.head_line(int(of_kernel["head_dim"].iloc[0]), counts, y),
        *style.dashed_line(exact[0] if exact else None, "exact", min(counts), y),
        *curves(
            optimal,
            style.count_axis("r", KEYS_TITLE, counts),
            y,
            style.series("series", marks),
            ("loss", "loss_low", "loss_high"),
        ),
    ]
    return alt.layer(*layers, title=KERNEL_LABELS[kernel], width=250)


def figure_5(records: Sequence[Record]) -> style.Chart:
    """Loss of OVO-r and OVA-r against r, one panel a kernel; dashed: exact attention."""
    frame = causal_losses(records)
    names = ("exact", "optimal_v_oblivious", "optimal_v_aware")
    frame = frame[frame["approximation"].isin(names)]
    frame = frame.assign(series=frame["approximation"].map(METHOD_LABELS))
    kernels = [k for k in KERNELS if len(frame[(frame["kernel"] == k) & frame["r"].notna()])]
    if not kernels:
        return style.empty("No optimal approximation of a causal model was evaluated.")
    frame = frame[frame["kernel"].isin(kernels)]
    losses = [*frame["loss_low"], *frame["loss_high"]]
    titles = [LOSS_TITLE, *[None] * (len(kernels) - 1)]
    axes = [style.value_axis(title, losses) for title in titles]
    panels = [_kernel_panel(frame, k, y) for k, y in zip(kernels, axes, strict=True)]
    return alt.hconcat(*panels)
