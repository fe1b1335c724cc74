"""Figures that the paper does not have: output error against loss, and OVO against OVA."""

from collections.abc import Mapping

import altair as alt
import pandas as pd

from value_aware_study.reporting import style
from value_aware_study.reporting.figures import (
    KEYS_TITLE,
    METRIC_TITLES,
    curves,
)
from value_aware_study.reporting.labels import KERNEL_LABELS
from value_aware_study.reporting.results import KERNELS, Results

# Settings with a smaller output error are exact for every purpose of figure 4, and not drawn.
SMALLEST_ERROR = 1e-3
OUTPUT_ERROR_TITLE = "relative squared output error (log scale)"
OUTPUT_ERROR_TICKS = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
OPTIMAL = ("optimal_v_oblivious", "optimal_v_aware")
BASELINES = (
    *("oblivious_keys_optimal_weights", "value_aware_keys_attention_weights"),
    *("norm_weighted_keys", "leave_one_out_keys", "sampled_keys"),
)
METRIC = ["value", "low", "high"]
INCREASE_TITLE = "loss minus exact loss (nats per token)"


def _approximate(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame[frame["relative_output_error"] >= SMALLEST_ERROR]
    return frame[frame["approximation"] != "exact"]


def _points(frame: pd.DataFrame, title: str, y: alt.Y) -> alt.Chart:
    scale = alt.Scale(type="log", nice=False, padding=12)
    axis = alt.Axis(format="~g", values=OUTPUT_ERROR_TICKS, grid=False, labelOverlap="greedy")
    points = alt.Chart(frame, width=350, height=style.HEIGHT, title=title).mark_point(
        filled=True, size=62, opacity=0.8
    )
    field = "relative_output_error:Q"
    return points.encode(x=alt.X(field, title=OUTPUT_ERROR_TITLE, scale=scale, axis=axis), y=y)


def _masked_panel(results: Results) -> list[style.Panel]:
    every = results.settings
    exact = results.find("masked_long", "exact").get("value")
    frame = _approximate(every[every["model"] == "masked_long"])
    if frame.empty:
        return []
    y = style.value_axis(METRIC_TITLES["masked"], [exact, *frame["value"]])
    least = float(frame["relative_output_error"].min())
    line = style.dashed_line(exact, f"exact, {exact or 0:.1f}%", least, y)
    encodings = style.series("series", style.method_marks(frame), columns=2)
    frame = frame[["series", "relative_output_error", "value"]]
    points = _points(frame, "(a) long masked model", y.of("value"))
    return [alt.layer(*line, points.encode(**encodings))]


def _causal_panel(results: Results) -> list[style.Panel]:
    losses = results.nats[results.nats["task"] == "causal"]
    exact = losses[losses["approximation"] == "exact"].set_index("kernel")["value"]
    frame = _approximate(losses)
    frame = frame[frame["kernel"].isin(KERNELS) & frame["kernel"].isin(exact.index)]
    if frame.empty:
        return []
    frame = frame.assign(increase=frame["value"] - frame["kernel"].map(exact))
    y = style.value_axis(INCREASE_TITLE, [0.0, *frame["increase"]])
    colour = style.series("series", style.method_marks(frame), columns=1)["color"]
    frame = frame[["series", "kernel_label", "relative_output_error", "increase"]]
    points = _points(frame, "(b) causal models", y.of("increase"))
    shape = style.series("kernel_label", style.KERNEL_MARKS, columns=1)["shape"]
    line = style.dashed_line(0.0, "exact", float(frame["relative_output_error"].min()), y)
    return [alt.layer(*line, points.encode(color=colour, shape=shape))]


def figure_4(results: Results) -> style.Chart:
    """End metric of every setting against its output error, sum ||o - o~||^2 / sum ||o||^2."""
    panels = [*_masked_panel(results), *_causal_panel(results)]
    if not panels:
        return style.empty("No output error was recorded.")
    return alt.hconcat(*panels).resolve_scale(color="independent", shape="independent")


def _metric_panel(
    name: str, frame: pd.DataFrame, marks: Mapping[str, style.Mark], y: style.ValueAxis
) -> style.Panel:
    """One model's metric against r."""
    counts = frame["r"].dropna().astype(float).tolist()
    exact = frame[frame["approximation"] == "exact"]["value"].tolist()
    x, encodings = style.count_axis("r", KEYS_TITLE, counts), style.series("series", marks)
    layers = [
        *style.head_line(int(frame["head_dim"].iloc[0]), counts, y),
        *style.dashed_line(exact[0] if exact else None, "exact", min(counts), y),
    ]
    for methods, look in ((BASELINES, style.MUTED), (OPTIMAL, style.PLAIN)):
        rows = frame[frame["approximation"].isin(methods)]
        if len(rows):
            layers += curves(rows, x, y, encodings, look)
    return alt.layer(*layers, title=name, width=350)


def _models(results: Results) -> dict[str, pd.DataFrame]:
    """Settings of the causal models and of the long masked one, where they have a curve.

    Of exact attention, the optimal approximations and what explains their gap.
    """
    frame = results.nats
    frame = frame[frame["approximation"].isin(["exact", *OPTIMAL, *BASELINES])]
    causal = frame[frame["task"] == "causal"]
    models = {KERNEL_LABELS[kernel]: causal[causal["kernel"] == kernel] for kernel in KERNELS}
    models["long masked model"] = frame[frame["model"] == "masked_long"]
    return {name: model for name, model in models.items() if model["r"].notna().any()}


def figure_5(results: Results) -> style.Chart:
    """End metric against r of OVO, OVA and the baselines, one panel a model; dashed: exact."""
    models = _models(results)
    if not models:
        return style.empty("No optimal approximation was evaluated.")
    every = pd.concat(models.values())
    marks = style.method_marks(every[every["r"].notna()])
    axes = {
        task: style.value_axis(METRIC_TITLES[task], of_task[METRIC].to_numpy().ravel().tolist())
        for task, of_task in every.groupby("task")
    }
    panels = (
        _metric_panel(name, model, marks, axes[model["task"].iloc[0]])
        for name, model in models.items()
    )
    return alt.concat(*panels, columns=2)
