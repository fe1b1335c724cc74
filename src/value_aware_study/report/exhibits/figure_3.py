"""Evaluation with exact attention during training: Figure 3."""

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from value_aware_study.report.curves import curves, figure
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import number, whole
from value_aware_study.report.labels import KERNEL_LABELS
from value_aware_study.report.look import Mark, Panel, direction
from value_aware_study.report.marks import KERNEL_MARKS, LONG, SHORT
from value_aware_study.report.results import KERNELS, Results

__all__ = ["exhibit"]

TITLES = {"error": "masked tokens predicted wrongly, %", "loss": "evaluation loss, nats per token"}


def exhibit(results: Results) -> Exhibit | None:
    """A panel for the masked models and one for the causal ones; None where no curve was kept."""
    marks: dict[str, Mark] = {}
    masked, causal = [], []
    for short, mark in (("short", SHORT), ("long", LONG)):
        found = results.models(f"masked_{short}")
        name = f"{short}, {found[0].length} tokens" if found else short
        marks[name] = mark
        masked.append(_curve(results.training.get(f"masked_{short}", {}), "error", name))
    for kernel in KERNELS:
        metrics = results.training.get(f"causal_{kernel}", {})
        causal.append(_curve(metrics, "loss", KERNEL_LABELS[kernel]))
    frames = {"error": pd.concat(masked), "loss": pd.concat(causal)}
    panels = [
        _panel(frame, metric, marks | KERNEL_MARKS)
        for metric, frame in frames.items()
        if len(frame)
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
        _table(pd.concat(frames.values())),
    )


def _curve(metrics: Mapping[str, Any], metric: str, name: str) -> pd.DataFrame:
    points = [point for point in metrics.get("curve", []) if point.get(metric) is not None]
    rows = [{"series": name, "count": p["step"], "value": p[metric]} for p in points]
    return pd.DataFrame([row | {"metric": metric} for row in rows], columns=COLUMNS)


COLUMNS = ["series", "metric", "count", "value"]


def _panel(frame: pd.DataFrame, metric: str, marks: Mapping[str, Mark]) -> Panel:
    present = {name: mark for name, mark in marks.items() if name in set(frame["series"])}
    axis = alt.Axis(grid=False, tickCount=5, format=",d")
    x = alt.X("count:Q", title="optimizer steps", axis=axis, scale=alt.Scale(domainMin=0))
    scale = alt.Scale(zero=False)
    y = alt.Y("value:Q", title=direction(TITLES[metric], "lower"), scale=scale)
    return figure(curves(frame, present, x, y))


def _table(data: pd.DataFrame) -> Table:
    display = pd.DataFrame({"model": data["series"], "metric": data["metric"]})
    display["optimizer step"] = [whole(step) for step in data["count"]]
    display["value"] = [number(value, 2) for value in data["value"]]
    return Table(data.rename(columns={"count": "step"}), display)
