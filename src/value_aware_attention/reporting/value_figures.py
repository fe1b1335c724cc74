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

# Below this an output is exact for every purpose of a figure.
SMALLEST_ERROR = 1e-6
OUTPUT_ERROR_TITLE = "relative squared output error, mean of layers (log scale)"


def _with_output_error(frame: pd.DataFrame) -> pd.DataFrame:
    """Settings other than exact, their output error raised to what the axis can show."""
    frame = frame[(frame["approximation"] != "exact") & frame["relative_output_error"].notna()]
    frame = frame.assign(output_error=frame["relative_output_error"].clip(lower=SMALLEST_ERROR))
    return frame.assign(series=[series_label(row) for row in frame.to_dict("records")])


def _output_error_axis() -> alt.X:
    axis = alt.Axis(format="~e", tickCount=6, grid=False)
    return alt.X(
        "output_error:Q",
        title=OUTPUT_ERROR_TITLE,
        scale=alt.Scale(type="log", nice=False, padding=10),
        axis=axis,
    )


def _masked_scatter(records: Sequence[Record]) -> list[alt.LayerChart]:
    frame = settings(records)
    exact = exact_value(frame, "masked_long")
    frame = _with_output_error(frame[frame["model"] == "masked_long"])
    if frame.empty:
        return []
    y = style.ValueAxis(ERROR_TITLE, alt.Scale(zero=False))
    colours = style.method_colours(frame["series"])
    points = alt.Chart(frame, width=330, height=style.HEIGHT).mark_point(
        filled=True, size=70, opacity=0.85
    )
    points = points.encode(x=_output_error_axis(), y=y.of("value"), color=style.colour("series", colours))
    least = float(frame["output_error"].min())
    line = style.dashed_line(exact, f"exact {exact or 0:.1f}%", least, y)
    return [alt.layer(*line, points, title="(a) long masked model")]


def _causal_scatter(records: Sequence[Record]) -> list[alt.LayerChart]:
    losses = causal_losses(records)
    exact = losses[losses["approximation"] == "exact"].set_index("kernel")["loss"]
    frame = _with_output_error(losses)
    frame = frame[frame["kernel"].isin(exact.index)]
    if frame.empty:
        return []
    frame = frame.assign(increase=frame["loss"] - frame["kernel"].map(exact))
    points = alt.Chart(frame, width=330, height=style.HEIGHT).mark_point(
        filled=True, size=70, opacity=0.85
    )
    points = points.encode(
        x=_output_error_axis(),
        y=alt.Y("increase:Q", title="increase of the loss over exact (nats per token)"),
        color=style.colour("series", style.method_colours(frame["series"]), title="method"),
        shape=style.shape("kernel_label", style.KERNEL_SHAPES),
    )
    return [alt.layer(points, title="(b) causal models")]


def figure_4(records: Sequence[Record]) -> style.Chart:
    """End metric of every setting against its relative output error ||o - o~||^2 / ||o||^2."""
    panels = [*_masked_scatter(records), *_causal_scatter(records)]
    if not panels:
        return style.empty("No output error was recorded.")
    return alt.hconcat(*panels).resolve_scale(color="independent", shape="independent")


def _kernel_panel(frame: pd.DataFrame, kernel: str, domain: list[float]) -> alt.LayerChart:
    of_kernel = frame[frame["kernel"] == kernel]
    exact = of_kernel[of_kernel["approximation"] == "exact"]["loss"]
    optimal = of_kernel[of_kernel["approximation"] != "exact"]
    x = style.count_axis("r", KEYS_TITLE, frame["r"].dropna().astype(float).tolist())
    y = style.ValueAxis(LOSS_TITLE, alt.Scale(domain=domain, nice=False))
    least = float(frame["r"].min())
    line = style.dashed_line(float(exact.iloc[0]) if len(exact) else None, "exact", least, y)
    colours = style.method_colours(frame["series"])
    layers = curves(optimal, x, y, colours, 250, fields=("loss", "loss_low", "loss_high"))
    return alt.layer(*line, *layers, title=KERNEL_LABELS[kernel])


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
    low, high = float(frame["loss_low"].min()), float(frame["loss_high"].max())
    margin = 0.04 * (high - low)
    panels = [_kernel_panel(frame, kernel, [low - 2 * margin, high + margin]) for kernel in kernels]
    return alt.hconcat(*panels)
