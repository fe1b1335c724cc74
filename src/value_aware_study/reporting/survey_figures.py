"""The survey's Figures 9 and 10 from our record, and how cost grows from 2,048 tokens on."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_study.reporting import style
from value_aware_study.reporting.survey_records import DENSE, Measurements

__all__ = ["exponents", "time_and_memory"]

# Dark for long sequences, light for short ones; shapes for print.
MARKS = (
    style.Mark("#9DB9D6", "circle"),
    style.Mark("#4F81B3", "square"),
    style.Mark("#173A63", "triangle-up"),
    style.Mark("#D55E00", "diamond"),
    style.Mark("#000000", "cross"),
)
ROW, WIDTH = 19, 330


def time_and_memory(measured: Measurements, lengths: Sequence[int]) -> style.Chart:
    """One row a method: peak memory and time of forward + backward, one mark a length."""
    rows = measured.frame
    rows = rows[(rows["pass"] == "forward_backward") & rows["length"].isin(lengths)]
    rows = rows[rows["milliseconds"].notna()]
    if rows.empty:
        return style.empty("Nothing was measured at these lengths.")
    rows = rows.assign(tokens=[f"{length:,} tokens" for length in rows["length"]])
    names = [f"{length:,} tokens" for length in sorted(set(rows["length"]))]
    first = len(MARKS) - len(names) if len(names) > 3 else 0
    marks = dict(zip(names, MARKS[max(0, first) :], strict=False))
    longest = rows[rows["length"] == rows["length"].max()]
    order = longest.sort_values("milliseconds")["label"].tolist()
    panels = [
        _panel(rows, field, title, marks, order, labelled=place == 0)
        for place, (field, title) in enumerate(
            (("peak_mib", "peak memory (MiB, log scale)"), ("milliseconds", "time (ms, log scale)"))
        )
    ]
    return alt.hconcat(*panels)


def _panel(
    rows: pd.DataFrame,
    field: str,
    title: str,
    marks: dict[str, style.Mark],
    order: list[str],
    labelled: bool,
) -> style.Panel:
    fields = [field] if field == "peak_mib" else [field, "low", "high"]
    labels = alt.Axis(labels=labelled, ticks=False, grid=True, labelLimit=240)
    y = alt.Y("label:N", title=None, sort=order, axis=labels)
    ends = [rows[name].min() for name in fields] + [rows[name].max() for name in fields]
    scale = alt.Scale(type="log", domain=[0.9 * min(ends), 1.1 * max(ends)], nice=False)
    x = alt.X(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6))
    used = rows[["label", "tokens", "low", "high", field]]
    base = alt.Chart(used, width=WIDTH, height=alt.Step(ROW))
    encodings = style.series("tokens", marks)
    points = base.mark_point(filled=True, size=58, opacity=1).encode(x=x, y=y, **encodings)
    layers = [points]
    if field == "milliseconds":
        bars = base.mark_rule(strokeWidth=1.2, opacity=0.7)
        low = alt.X("low:Q", title=title, scale=scale)
        layers.insert(0, bars.encode(x=low, x2="high:Q", y=y, color=encodings["color"]))
    dense = _dense_lines(rows, field, title, scale)
    return alt.layer(*dense, *layers)


def _dense_lines(rows: pd.DataFrame, field: str, title: str, scale: alt.Scale) -> list[alt.Chart]:
    """Thin lines at dense attention's values: right of one is worse than dense."""
    eager = rows[rows["method"] == DENSE[0]]
    if eager.empty:
        return []
    lines = alt.Chart(eager[[field]]).mark_rule(color="#B5B5B5", strokeDash=[3, 3])
    return [lines.encode(x=alt.X(f"{field}:Q", title=title, scale=scale))]


def exponents(measured: Measurements) -> style.Chart:
    """The fitted exponent of the attention alone, time and memory, beside the published one."""
    kinds = {"milliseconds": "time, measured", "peak_mib": "memory, measured"}
    rows: list[dict[str, Any]] = [
        {"label": measured.label(m), "kind": kind, "exponent": value}
        for m in measured.record["methods"]
        for quantity, kind in kinds.items()
        if (value := measured.exponent("attention", m, quantity)) is not None
    ]
    if not rows:
        return style.empty("No method was measured at two lengths from 2,048 tokens on.")
    times = {row["label"]: row["exponent"] for row in rows if row["kind"] == "time, measured"}
    fitted = {row["label"] for row in rows}
    rows += [
        {"label": about["label"], "kind": "published", "exponent": about["exponent"]}
        for about in measured.record["methods"].values()
        if about["label"] in fitted
    ]
    marks = {
        "published": style.Mark("#9A9A9A", "diamond"),
        "time, measured": style.Mark("#0072B2", "circle"),
        "memory, measured": style.Mark("#D55E00", "triangle-up"),
    }
    order = sorted(fitted, key=lambda label: times.get(label, 0.0))
    x = alt.X("exponent:Q", title="p of cost ~ L^p, attention alone, forward", axis=alt.Axis())
    y = alt.Y("label:N", title=None, sort=order, axis=alt.Axis(ticks=False, labelLimit=240))
    chart = alt.Chart(pd.DataFrame(rows), width=420, height=alt.Step(ROW))
    points = chart.mark_point(filled=True, size=70, opacity=1, strokeWidth=2)
    return points.encode(x=x, y=y, **style.series("kind", marks))
