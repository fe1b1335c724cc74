"""How far every method is from the value-aware optimum, at equal budgets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.reporting import captions, style
from value_aware_attention.reporting.figure import Figure
from value_aware_attention.reporting.figures import ERROR_TITLE, LOSS_TITLE
from value_aware_attention.reporting.output_error_figures import FLOOR, POWERS
from value_aware_attention.reporting.records import (
    KERNEL_LABELS,
    METHOD_LABELS,
    Record,
    in_order,
    series_label,
    settings,
)
from value_aware_attention.reporting.table import DASH, Table, interval, number, times

__all__ = ["distance_figures", "distance_table", "findings"]

OVO, OVA = "optimal_v_oblivious", "optimal_v_aware"
# They look at the exact attention weights or outputs: what a practical method would predict.
ORACLES = (OVO, OVA, "sampled_keys")
BUDGET_TITLE = "multiply-adds a query, in keys attended to (log scale)"
OUTPUT_TITLE = "relative squared output error (log scale)"
WIDTH, HEIGHT = 380, 330
BUDGETS = (
    "Every method has the parameter that brings its multiply-adds a query closest to the budget; "
    "a method without such a setting, or that cannot run under this model's kernel or causal "
    "mask, is left out there. The search of the oracles (OVO, OVA), which look at "
    "the exact weights, is not counted. Random methods: means over the seeds, one seed a layer."
)


def label(record: Record) -> str:
    """The name of a model in titles."""
    if record["task"] == "causal":
        return f"causal, {KERNEL_LABELS.get(record['kernel'], record['kernel'])}"
    return f"masked, {record['length']} tokens"


def budget_settings(records: Sequence[Record]) -> pd.DataFrame:
    """One row a model, method and budget, seeds averaged: `cost`, `budget`, loss or error."""
    moved = [
        {**record, "cells": [_with_cost(cell) for cell in record["cells"]]} for record in records
    ]
    frame = settings(moved)
    frame = frame.reindex(columns=[*dict.fromkeys([*frame.columns, "budget", "cost"])])
    frame = frame[frame["cost"].notna()].copy()
    for source in ("value", "low", "high"):
        perplexity = frame["metric"] == "perplexity"
        values = frame[source].astype(float)
        logged = values.where(perplexity).map(math.log, na_action="ignore")
        frame[source] = logged.where(perplexity, values)
    frame["series"] = [_series(row) for row in frame.to_dict("records")]
    return frame


def _with_cost(cell: Record) -> dict[str, Any]:
    budget = {name: cell.get(name) for name in ("budget", "cost")}
    return {**cell, "parameters": {**cell["parameters"], **budget}}


def _series(row: Mapping[str, Any]) -> str:
    name = row["approximation"]
    return series_label(row) if name in ("orf",) else METHOD_LABELS.get(name, name)


def distance_figures(records: Sequence[Record]) -> list[Figure]:
    """One figure a model: output error and end metric against the budget."""
    frame = budget_settings(records)
    return [
        Figure(
            f"distance_{record['model']}",
            f"Distance to the optimum: {label(record)}",
            f"{BUDGETS} {captions.BEST_FOUND} {captions.INTERVAL} {findings(record)} "
            f"{captions.ours([record])}",
            _chart(frame[frame["model"] == record["model"]], record),
        )
        for record in in_order(records)
    ]


def _chart(frame: pd.DataFrame, record: Record) -> style.Chart:
    if frame.empty:
        return style.empty("No method was evaluated.")
    title = LOSS_TITLE if record["task"] == "causal" else ERROR_TITLE
    y = style.value_axis(title, [*frame["low"], *frame["high"]])
    exact = record["cells"][0]["value"]
    exact = math.log(exact) if record["task"] == "causal" else exact
    cost = frame["cost"].astype(float)
    line = style.dashed_line(exact, "exact attention", float(cost.min()), y)
    metric = _panel(frame, "value", y.of("value"), "(b) end metric")
    bars = (
        alt.Chart(_plain(frame))
        .mark_rule(strokeWidth=1.2, opacity=0.6)
        .encode(x=_x(frame), y=y.of("low"), y2="high:Q", color=_encodings(frame)["color"])
    )
    errors = frame.assign(error=frame["relative_output_error"].clip(lower=FLOOR))
    scale = alt.Scale(type="log", nice=False, padding=10)
    powers = [10.0**power for power in range(round(math.log10(FLOOR)), 4)]
    axis = alt.Axis(values=powers, labelExpr=POWERS)
    error = alt.Y("error:Q", title=OUTPUT_TITLE, scale=scale, axis=axis)
    panels = _panel(errors, "error", error, "(a) output error"), alt.layer(*line, bars, metric)
    return alt.hconcat(*panels)


def _panel(frame: pd.DataFrame, field: str, y: alt.Y, title: str) -> style.Panel:
    encodings = _encodings(frame)
    base = alt.Chart(_plain(frame, field), width=WIDTH, height=HEIGHT, title=title)
    base = base.encode(x=_x(frame), y=y, **encodings)
    lines = base.mark_line(strokeWidth=1.6).encode(shape=alt.Undefined)
    return alt.layer(lines, base.mark_point(filled=True, size=60))


def _plain(frame: pd.DataFrame, *fields: str) -> pd.DataFrame:
    return frame[[*{"series", "cost", "low", "high", *fields}]].astype({"cost": float})


def _x(frame: pd.DataFrame) -> alt.X:
    return style.count_axis("cost", BUDGET_TITLE, frame["cost"].astype(float).tolist())


def _encodings(frame: pd.DataFrame) -> dict[str, Any]:
    return style.series("series", style.method_marks(frame["series"]), columns=4)


def _ranked(frame: pd.DataFrame) -> pd.DataFrame:
    """The methods that do not look at the exact weights, from the smallest output error on."""
    practical = frame[~frame["approximation"].isin(ORACLES)]
    return practical.sort_values("relative_output_error", kind="stable")


def findings(record: Record) -> str:
    """What the figure shows, in sentences made from its numbers."""
    frame = budget_settings([record])
    sentences = []
    for budget, group in frame.groupby("budget"):
        errors = group.set_index("approximation")["relative_output_error"]
        ranked = _ranked(group)
        if ranked.empty or not {OVO, OVA} <= set(errors.index):
            continue
        best = ranked.iloc[0]
        compared = f"{best['relative_output_error']:.2g}, {_over(best, errors, OVA)} OVA's"
        sentences.append(
            f"At {int(budget)} keys the closest practical method is {best['series']}: output error "
            f"{compared} ({errors[OVA]:.2g}) and {_over(best, errors, OVO)} OVO's "
            f"({errors[OVO]:.2g})."
        )
    return " ".join(sentences)


def _over(row: pd.Series, errors: pd.Series, other: str) -> str:
    if errors[other] < FLOOR:
        return "far above"
    return f"{times(row['relative_output_error'] / errors[other])}"


def distance_table(records: Sequence[Record]) -> Table:
    """Every method at every budget: cost, output error, end metric and its interval."""
    frame = budget_settings(records)
    labels = {record["model"]: label(record) for record in records}
    columns = ["model", "approximation", "series", "budget", "cost", "relative_output_error"]
    data = frame[[*columns, "value", "low", "high", "seeds"]].reset_index(drop=True)
    shown = []
    for (model, budget), group in data.groupby(["model", "budget"], sort=False):
        for row in group.sort_values("relative_output_error", kind="stable").to_dict("records"):
            shown.append(
                {
                    "model": labels[model],
                    "budget, keys": number(budget, 0),
                    "method": row["series"],
                    "cost, keys": number(row["cost"]),
                    "output error": _short(row["relative_output_error"]),
                    "loss or error": number(row["value"], 2),
                    "interval": interval(row["low"], row["high"], 2),
                }
            )
    caption = (
        f"{BUDGETS} Loss in nats a token (causal) or masked tokens predicted wrongly in percent. "
        f"{captions.BEST_FOUND} {captions.INTERVAL} {captions.settings_of(records)}"
    )
    return Table("distance", "Every method at equal budgets", caption, data, pd.DataFrame(shown))


def _short(value: Any) -> str:
    return DASH if pd.isna(value) else f"{value:.2g}"
