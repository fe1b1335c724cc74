"""Skewness of a model's attention weights against what choosing keys by the output gains."""

from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import number
from value_aware_study.report.gap import OWN, SIZE, gap_findings, gap_rows
from value_aware_study.report.look import Mark, Panel, ramp
from value_aware_study.report.measurements import FLOOR, of_kernels

__all__ = ["exhibit"]

READ = (
    "Section 3 argues that the flatter the attention weights, the more the values decide which "
    "keys matter: for a polynomial kernel of degree 0 all weights are equal, and with the degree "
    "they become skewed. One mark is one layer: its own kernel, and polynomials put in its place "
    "on the same queries, keys and values (post hoc; a line joins the degrees of a layer). "
    "Effective keys: exp of the weights' entropy, as a share of all keys. Errors under "
    f"{FLOOR:g} count as that."
)


def exhibit(record: Record, name: str, setting: str) -> Exhibit | None:
    """One mark a layer and kernel; None where it was not measured."""
    measured = of_kernels(record)
    data = gap_rows(measured)
    if data.empty:
        return None
    display = pd.DataFrame(
        {
            "layer": data["layer"].astype(str),
            "kernel": data["series"],
            "effective keys, %": [number(share, 2) for share in data["share"]],
            "OVO error / OVA error": [number(gap, 2) for gap in data["gap"]],
        }
    )
    return Exhibit(
        name,
        "Skewness of the attention and what choosing by the output gains",
        f"How many times OVO's error is OVA's with {SIZE} keys, the flatter the weights are.",
        [READ, f"{gap_findings(measured)} {captions.BEST_FOUND}", setting],
        [_panel(data)],
        Table(data, display),
    )


def _panel(data: pd.DataFrame) -> Panel:
    own = data["own"].astype(bool)
    marks = ramp(sorted(data[~own]["series"].unique()))
    marks |= {OWN: Mark.of("vermillion", "cross")}
    names = list(marks)
    colours = alt.Scale(domain=names, range=[mark.colour for mark in marks.values()])
    shapes = alt.Scale(domain=names, range=[mark.shape for mark in marks.values()])
    flatter = "effective keys, % of all keys (flatter to the right)"
    x = alt.X("share:Q", title=flatter, **_log_scale(data["share"]))
    y = alt.Y("gap:Q", title="OVO error / OVA error", **_log_scale(data["gap"]))
    frame = data[["layer", "degree", "series", "share", "gap"]]
    lines = alt.Chart(frame[~own]).mark_line(color="var(--muted)", strokeWidth=1, opacity=0.5)
    marked = alt.Chart(frame).mark_point(filled=True, size=70, opacity=1)
    marked = marked.encode(
        x=x,
        y=y,
        color=alt.Color("series:N", scale=colours, legend=alt.Legend(orient="bottom")),
        shape=alt.Shape("series:N", scale=shapes),
        tooltip=[
            "layer:O",
            "series:N",
            *(alt.Tooltip(f"{n}:Q", format=".3~g") for n in ("share", "gap")),
        ],
    )
    joined = lines.encode(x=x, y=y, detail="layer:N", order="degree:Q")
    return alt.layer(joined, marked).properties(width="container", height=340)


def _log_scale(values: pd.Series) -> dict[str, Any]:
    """The scale and axis of a logarithmic channel, labelled at 1, 2 and 5 times powers of ten."""
    ticks = [digit * 10.0**power for power in range(-2, 7) for digit in (1, 2, 5)]
    domain = [values.min() / 1.3, values.max() * 1.3]
    return {
        "scale": alt.Scale(type="log", domain=domain, nice=False),
        "axis": alt.Axis(values=ticks, format="~g", labelOverlap="greedy"),
    }
