"""Figures 1 to 3 of the paper, and 4 and 5: output error against loss, and OVO against OVA."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from value_aware_study.reporting import style
from value_aware_study.reporting.labels import KERNEL_LABELS
from value_aware_study.reporting.measurements import OPTIMAL
from value_aware_study.reporting.results import KERNELS, Results

METRIC_TITLES = {
    "masked": "masked tokens predicted wrongly (%)",
    "causal": "evaluation loss (nats per token)",
}
KEYS_TITLE = "r, keys per query (log scale)"
# The curves of the paper's Figure 1.
FIGURE_1 = ("optimal_v_oblivious", "optimal_v_aware", "sliding_window", "lsh", "orf")
FEATURES_TITLE = "random features (log scale)"
# Settings with a smaller output error are exact for every purpose of figure 4, and not drawn.
SMALLEST_ERROR = 1e-3
OUTPUT_ERROR_TITLE = "relative squared output error (log scale)"
OUTPUT_ERROR_TICKS = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
BASELINES = (
    *("oblivious_keys_optimal_weights", "value_aware_keys_attention_weights"),
    *("norm_weighted_keys", "leave_one_out_keys", "sampled_keys"),
)
METRIC = ["value", "low", "high"]
INCREASE_TITLE = "loss minus exact loss (nats per token)"


def save(chart: Any, path: Path) -> None:
    """Write a chart as PNG at twice its size; the same chart always gives the same bytes."""
    style.styled(chart).save(str(path), format="png", scale_factor=2)


def curves(
    frame: pd.DataFrame,
    x: alt.X,
    y: style.ValueAxis,
    encodings: Mapping[str, Any],
    look: style.Look = style.PLAIN,
) -> list[alt.Chart]:
    """Error bars, lines and points of every series of a frame, as layers.

    Rows without an interval get no bar. A series of fewer than three points is not joined: what
    lies between them was not measured.
    """
    frame = frame[["series", "r", "features", "value", "low", "high"]]
    frame = frame.assign(points=frame.groupby("series")["series"].transform("size"))
    base = alt.Chart(frame, height=style.HEIGHT).encode(x=x, color=encodings["color"])
    bars = base.mark_rule(strokeWidth=0.8 * look.line, opacity=0.7 * look.opacity).encode(
        y=y.of("low"), y2="high:Q"
    )
    lines = base.mark_line(strokeWidth=look.line, opacity=look.opacity).encode(y=y.of("value"))
    lines = lines.transform_filter("datum.points >= 3")
    points = base.mark_point(filled=True, size=look.point, opacity=look.opacity)
    return [bars, lines, points.encode(y=y.of("value"), shape=encodings["shape"])]


def figure_1(results: Results) -> style.Chart:
    """Masked-LM error of the long model against r (sparse methods) and features (ORF)."""
    frame = results.settings[results.settings["model"] == "masked_long"]
    exact = results.find("masked_long", "exact").get("value")
    approximate = frame[frame["approximation"].isin(FIGURE_1)]
    if approximate.empty:
        return style.empty("No approximation of the long masked model was evaluated.")
    head_dim = int(approximate["head_dim"].iloc[0])
    y = style.value_axis(
        METRIC_TITLES["masked"], [exact, *approximate["low"], *approximate["high"]]
    )
    line = f"exact, {exact or 0:.1f}%"
    panels = []
    for field, title, name, width in (
        ("r", KEYS_TITLE, "(a) sparse methods", 430),
        ("features", FEATURES_TITLE, "(b) random features", 260),
    ):
        rows = approximate[approximate[field].notna()]
        if len(rows):
            counts = rows[field].astype(float).tolist()
            marks = style.head_line(head_dim, counts, y) if field == "r" else []
            marks += style.dashed_line(exact, line, min(counts), y)
            encodings = style.series("series", style.method_marks(rows))
            marks += curves(rows, style.count_axis(field, title, counts), y, encodings)
            panels.append(alt.layer(*marks, title=name, width=width))
    return alt.hconcat(*panels).resolve_scale(color="independent", shape="independent")


def figure_2(results: Results) -> style.Chart:
    """Loss of OVO-r against r up to all keys for each kernel; dashed: exact attention."""
    frame = results.nats[results.nats["task"] == "causal"]
    frame = frame[frame["kernel"].isin(KERNELS)].assign(series=frame["kernel_label"])
    exact = frame[frame["approximation"] == "exact"]
    oblivious = frame[frame["approximation"] == "optimal_v_oblivious"]
    if oblivious.empty:
        return style.empty("No optimal value-oblivious setting of a causal model was evaluated.")
    present = {*exact["kernel_label"], *oblivious["kernel_label"]}
    marks = {name: mark for name, mark in style.KERNEL_MARKS.items() if name in present}
    encodings = style.series("series", marks)
    losses = [*exact["value"], *oblivious["low"], *oblivious["high"]]
    y = style.value_axis(METRIC_TITLES["causal"], losses)
    x = style.count_axis("r", KEYS_TITLE, oblivious["r"].astype(float).tolist())
    rules = alt.Chart(exact[["series", "approximation", "value"]]).mark_rule(
        strokeDash=[6, 4], strokeWidth=1.4
    )
    dashed = rules.encode(y=y.of("value"), color=encodings["color"])
    lines = curves(oblivious, x, y, encodings)
    lowest = float(exact["value"].min()) if len(exact) else None
    name = style.line_name(lowest, "dashed: exact attention", float(oblivious["r"].min()), y)
    return alt.layer(dashed, *name, *lines, width=540)


def _curve(metrics: Mapping[str, Any], metric: str, name: str) -> pd.DataFrame:
    points = [point for point in metrics.get("curve", []) if point.get(metric) is not None]
    rows = [{"series": name, "step": point["step"], "y": point[metric]} for point in points]
    return pd.DataFrame(rows, columns=["series", "step", "y"])


def _learning_panel(
    frame: pd.DataFrame, title: str, y_title: str, marks: Mapping[str, style.Mark]
) -> style.Panel:
    present = {name: mark for name, mark in marks.items() if name in set(frame["series"])}
    encodings = style.series("series", present)
    y = style.value_axis(y_title, frame["y"])
    axis = alt.Axis(grid=False, tickCount=5, format=",d")
    scale = alt.Scale(domainMin=0, nice=False)
    base = alt.Chart(frame, width=340, height=style.HEIGHT).encode(
        x=alt.X("step:Q", title="optimizer steps", axis=axis, scale=scale),
        y=y.of("y"),
        color=encodings["color"],
    )
    points = base.mark_point(filled=True, size=34, opacity=1).encode(shape=encodings["shape"])
    return alt.layer(base.mark_line(strokeWidth=1.8), points, title=title)


def figure_3(results: Results) -> style.Chart:
    """Evaluation with exact attention during training: both masked models, and the causal ones."""
    masked_marks, masked, causal = {}, [], []
    for short, mark in (("short", style.SHORT), ("long", style.LONG)):
        found = results.models(f"masked_{short}")
        name = f"{short}, {found[0].length} tokens" if found else short
        masked_marks[name] = mark
        masked.append(_curve(results.training.get(f"masked_{short}", {}), "error", name))
    for kernel in KERNELS:
        metrics = results.training.get(f"causal_{kernel}", {})
        causal.append(_curve(metrics, "loss", KERNEL_LABELS[kernel]))
    panels = [
        _learning_panel(frame, title, y_title, marks)
        for frames, title, y_title, marks in (
            (masked, "(a) masked language models", METRIC_TITLES["masked"], masked_marks),
            (causal, "(b) causal language models", METRIC_TITLES["causal"], style.KERNEL_MARKS),
        )
        if len(frame := pd.concat(frames))
    ]
    if not panels:
        return style.empty("No learning curve was recorded.")
    return alt.hconcat(*panels).resolve_scale(color="independent", shape="independent")


def _approximate(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame[frame["relative_output_error"] >= SMALLEST_ERROR]
    return frame[frame["approximation"] != "exact"]


def _points(frame: pd.DataFrame, title: str, y: alt.Y) -> alt.Chart:
    ticks = {"format": "~g", "values": OUTPUT_ERROR_TICKS, "labelOverlap": "greedy"}
    field, ends = "relative_output_error", {"padding": 12}
    x = style.log_axis(alt.X, field, OUTPUT_ERROR_TITLE, ends, **ticks, grid=False)
    points = alt.Chart(frame, width=350, height=style.HEIGHT, title=title).mark_point(
        filled=True, size=62, opacity=0.8
    )
    return points.encode(x=x, y=y)


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
