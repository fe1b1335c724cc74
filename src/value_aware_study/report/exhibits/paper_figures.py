"""The paper's Figures 1 to 3, with our numbers beside the published ones."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt
import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.charts import (
    change_axis,
    count_axis,
    curves,
    direction,
    extent,
    figure,
    level,
    upright,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.look import (
    KERNEL_MARKS,
    LONG,
    SHORT,
    Mark,
    Panel,
    kernel_mark,
    method_marks,
)
from value_aware_study.report.published import TABLE_1, TABLE_2, TABLE_2_COLUMNS
from value_aware_study.report.results import KERNELS, RANGE, Results, known
from value_aware_study.report.words import (
    KERNEL_LABELS,
    intervals,
    number,
    sentences,
    series_label,
    signed,
    whole,
)

NATS = direction("nats per token above exact", "lower")
POINTS = direction("points of error above exact", "lower")
METHODS = ("optimal_v_oblivious", "optimal_v_aware", "sliding_window", "lsh", "orf")
"""The curves of the paper's Figure 1."""
KEYS = "r, keys per query (log scale)"
FEATURES = "random features (log scale)"
SCALE = (
    "Differences from exact attention, ours from ours and the paper's (Table 1, hollow) from the "
    "paper's; the axis is even up to one point and logarithmic beyond. LSH of more than one round "
    "sees more keys than r."
)
CURVES = {"error": "masked tokens predicted wrongly, %", "loss": "evaluation loss, nats per token"}
PALE = " (pale bars)"
PUBLISHED = "paper, "
"""Begins the sentence of a hollow mark"""
COLUMNS = ["series", "metric", "count", "value"]


def loss_axis(task: str, values: Iterable[Any]) -> alt.Y:
    """Builds the axis of changes from exact attention's, linear to 0.1 nats or 1 point."""
    title, around = (NATS, 0.1) if task == "causal" else (POINTS, 1.0)
    return change_axis(title, values, around)


def told_changes(frame: pd.DataFrame, task: str, whose: str = "", of: str = "r") -> pd.DataFrame:
    """Adds the sentences of changes from exact attention: "OVA, r = 4: +0.15 nats"."""
    at = "{count:,.0f} features" if of == "features" else "r = {count:,.0f}"
    unit = " nats" if task == "causal" else " points"
    return frame.assign(said=sentences(frame, f"{whose}{{series}}, {at}", unit, "+"))


def change_table(ours: pd.DataFrame, theirs: pd.DataFrame) -> Table:
    """Tabulates all that is drawn, ours first; the paper's values have no interval."""
    over_seeds = known(ours, RANGE)
    numbers = ["r", "features", "value", "low", "high", *over_seeds]
    columns = ["model", "series", *numbers]
    parts = zip(("ours", "paper"), (ours, theirs), strict=True)
    data = pd.concat(
        [
            part.reindex(columns=columns).astype(dict.fromkeys(numbers, float)).assign(whose=whose)
            for whose, part in parts
        ],
        ignore_index=True,
    )
    of_seeds = {"range over seeds": intervals(data, 2, signed, over_seeds)} if over_seeds else {}
    display = pd.DataFrame(
        {
            "whose": data["whose"],
            "model": data["model"].fillna(""),
            "method": data["series"].fillna(""),
            "r or features": [number(n, 0) for n in data["r"].fillna(data["features"])],
            "change from exact": [signed(value, 2) for value in data["value"]],
            "95% interval": intervals(data, 2, signed),
            **of_seeds,
        }
    )
    return Table(data, display)


def figure_1(results: Results) -> Exhibit | None:
    """Shows every setting with its interval, and the paper's; None where none was evaluated."""
    frame = results.changes[results.changes["model"] == "masked_long"]
    ours = frame[frame["approximation"].isin(METHODS)]
    if ours.empty:
        return None
    theirs = published_errors()
    marks = method_marks(pd.concat([ours, theirs]))
    panels = [
        _figure_1_panel(ours[ours[of].notna()], theirs[theirs[of].notna()], marks, of, *titles)
        for of, *titles in (("r", KEYS, "sparse methods"), ("features", FEATURES, "ORF"))
        if ours[of].notna().any()
    ]
    return Exhibit(
        "figure_1",
        "Figure 1. Masked-LM error of the long model under approximate attention",
        "What each method adds to exact attention's error, by keys or features; hollow: the paper."
        f"{captions.seeds(results, PALE, ['masked'])}",
        [
            SCALE,
            "OVO: chosen by weight; OVA: chosen for the output; ORF as written in the paper's A.1 "
            f"and with Performer's scaling. {captions.BEST_FOUND}",
            f"{captions.INTERVAL} {captions.SEEDS} {captions.NOT_JOINED}",
        ],
        panels,
        change_table(ours, theirs),
    )


def published_errors() -> pd.DataFrame:
    """Computes Table 1's changes from the paper's exact error, in points."""
    exact = TABLE_1[0].error
    rows = [
        {"approximation": cell.approximation, **cell.parameters, "value": cell.error - exact}
        for cell in TABLE_1[1:]
    ]
    named = [row | {"series": series_label(row)} for row in rows]
    return pd.DataFrame(named).astype({"r": float, "features": float})


def _figure_1_panel(
    ours: pd.DataFrame,
    theirs: pd.DataFrame,
    marks: Mapping[str, Mark],
    of: str,
    title: str,
    name: str,
) -> Panel:
    """Draws the changes against r, or against the features (`of`)."""
    drawn, hollow = (
        told_changes(part.assign(count=part[of].astype(float)), "masked", whose, of)
        for part, whose in ((ours, ""), (theirs, PUBLISHED))
    )
    x = count_axis(title, [*drawn["count"], *hollow["count"]])
    y = loss_axis("masked", extent(ours, theirs))
    marked = upright(int(ours["head_dim"].iloc[0]) + 1) if of == "r" else []
    lines = curves(drawn, marks, x, y, published=hollow)
    return figure([*level(0.0), *marked, *lines], name)


def figure_2(results: Results) -> Exhibit | None:
    """Shows the change of each kernel's loss, and the paper's; None where none was evaluated."""
    frame = results.changes
    ours = frame[(frame["task"] == "causal") & frame["kernel"].isin(KERNELS)]
    ours = ours[ours["approximation"] == "optimal_v_oblivious"]
    if ours.empty:
        return None
    ours = ours.assign(series=ours["kernel_label"], count=ours["r"].astype(float))
    ours = ours.drop_duplicates(["series", "count"])
    theirs = published_losses("optimal_v_oblivious")
    theirs = theirs.assign(series=theirs["kernel"].map(KERNEL_LABELS), count=theirs["r"])
    y = loss_axis("causal", extent(ours, theirs))
    x = count_axis(KEYS, ours["count"].tolist())
    ours, theirs = told_changes(ours, "causal"), told_changes(theirs, "causal", PUBLISHED)
    layers = [*level(0.0), *curves(ours, KERNEL_MARKS, x, y, published=theirs)]
    return Exhibit(
        "figure_2",
        "Figure 2. Loss of keys chosen by weight, for each kernel",
        "What the r largest weights add to each model's loss; hollow: the paper."
        f"{captions.seeds(results, PALE, ['causal'])}",
        [
            "Top r keys by attention weight, up to all keys. Differences of the loss from exact "
            "attention, ours from ours and the paper's (Table 2, hollow) from the paper's; the "
            "axis is even up to 0.1 nats and logarithmic beyond. The paper's order of loss is "
            "polynomial, elu, exponential; whether ours is the same is among the claims.",
            captions.INTERVAL,
            *captions.not_evaluated(results, [f"causal_{kernel}" for kernel in KERNELS]),
        ],
        [figure(layers)],
        change_table(ours, theirs),
    )


def published_losses(approximation: str | None = None) -> pd.DataFrame:
    """Computes Table 2's changes from the paper's exact loss, in nats, of one or all methods."""
    rows = [
        {"kernel": kernel, "approximation": name, "r": float(r)}
        | {"value": math.log(perplexity / row[0])}
        for kernel, row in TABLE_2.items()
        for (_, name, r), perplexity in zip(TABLE_2_COLUMNS, row, strict=True)
        if r is not None and approximation in (None, name)
    ]
    return pd.DataFrame(rows)


def figure_3(results: Results) -> Exhibit | None:
    """Shows learning curves, masked models and causal ones apart; None where none was kept."""
    lengths = {record.model: f", {record.length} tokens" for record in results.records}
    curves_of = [
        (f"masked_{name}", "error_percent", f"{name}{lengths.get(f'masked_{name}', '')}", mark)
        for name, mark in (("short", SHORT), ("long", LONG))
    ]
    curves_of += [
        (f"causal_{kernel}", "loss", KERNEL_LABELS[kernel], kernel_mark(kernel))
        for kernel in KERNELS
    ]
    data = pd.concat(
        [_curve(results.training.get(model, {}), *drawn) for model, *drawn, _ in curves_of]
    ).replace({"metric": {"error_percent": "error"}})
    marks = {name: mark for _, _, name, mark in curves_of}
    panels = [
        _figure_3_panel(data[data["metric"] == metric], metric, marks)
        for metric in CURVES
        if metric in set(data["metric"])
    ]
    if not panels:
        return None
    return Exhibit(
        "figure_3",
        "Figure 3. Learning curves with exact attention",
        "The metric of every model while it was trained.",
        [
            "The long masked model starts from the trained short one, with new positions; a step "
            "of one model need not see as many tokens as a step of another."
        ],
        panels,
        _figure_3_table(data),
    )


def _curve(metrics: Mapping[str, Any], metric: str, name: str) -> pd.DataFrame:
    points = [point for point in metrics.get("curve", []) if point.get(metric) is not None]
    rows = [{"series": name, "count": p["step"], "value": p[metric]} for p in points]
    return pd.DataFrame([row | {"metric": metric} for row in rows], columns=COLUMNS)


def _figure_3_panel(frame: pd.DataFrame, metric: str, marks: Mapping[str, Mark]) -> Panel:
    unit = "% wrong" if metric == "error" else " nats per token"
    frame = frame.assign(said=sentences(frame, "{series}, step {count:,.0f}", unit))
    axis = alt.Axis(grid=False, tickCount=5, format=",d")
    x = alt.X("count:Q", title="optimizer steps", axis=axis, scale=alt.Scale(domainMin=0))
    scale = alt.Scale(zero=False)
    y = alt.Y("value:Q", title=direction(CURVES[metric], "lower"), scale=scale)
    return figure(curves(frame, marks, x, y))


def _figure_3_table(data: pd.DataFrame) -> Table:
    display = pd.DataFrame(
        {
            "model": data["series"],
            "metric": data["metric"],
            "optimizer step": [whole(step) for step in data["count"]],
            "value": [number(value, 2) for value in data["value"]],
        }
    )
    return Table(data.rename(columns={"count": "step"}), display)
