"""Skewness of the attention weights against what choosing for the output gains (section 3)."""

from collections.abc import Mapping, Sequence

import altair as alt
import numpy as np
import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.curves import figure
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import number, times
from value_aware_study.report.gap import SIZE, gap_findings, gap_rows
from value_aware_study.report.look import OPACITY, Mark, Panel
from value_aware_study.report.measurements import FLOOR, Measured

__all__ = ["exhibit"]

TICKS = [step * 10.0**power for power in range(-1, 7) for step in (1, 2, 5)]
SHORT = "replace(replace(datum.label, 'degree ', ''), ' kernel', '')"
EXPLAINED = (
    "Section 3 argues that the flatter the attention weights, the more the values decide which "
    "keys matter: for a polynomial kernel of degree 0 all weights are equal, and with the degree "
    "they become skewed. A small point is one layer, with polynomials put in its kernel's place "
    "on the same queries, keys and values (post hoc) and with its own kernel; a large one, joined "
    "by a line, is the geometric mean of a model's layers. Effective keys, in the table: exp of "
    "the weights' entropy, as a share of all keys (a causal query sees fewer)."
)


def exhibit(measured: Sequence[Measured]) -> Exhibit | None:
    """One panel with the degree as x, every model a series; None where nothing was measured."""
    frame = gap_rows(measured)
    if frame.empty:
        return None
    rows = sorted({gap.rows for item in measured if (gap := item.attention.skewness_gap)})
    on = f"{' or '.join(f'{count:,}' for count in rows)} queries a layer."
    display = frame[["model", "layer", "series"]].astype(str)
    display["effective keys, % of all"] = [number(share, 2) for share in frame["share"]]
    display[f"OVO error / OVA error, r = {SIZE}"] = [times(gap) for gap in frame["gap"]]
    return Exhibit(
        "figure_8",
        "Figure 8. Skewness of the attention and what choosing for the output gains",
        f"The error of {SIZE} keys chosen by weight over that of {SIZE} chosen for the output, by "
        "the degree of the kernel.",
        [
            EXPLAINED,
            f"Errors under {FLOOR:g} count as {FLOOR:g}. {captions.BEST_FOUND} "
            f"{gap_findings(measured)} {on}",
        ],
        [_panel(frame, {item.label: item.mark for item in measured})],
        Table(frame, display),
        folded=True,
    )


def _panel(frame: pd.DataFrame, marks: Mapping[str, Mark]) -> Panel:
    marks = {name: mark for name, mark in marks.items() if name in set(frame["model"])}
    frame = frame.rename(columns={"model": "series", "series": "kernel"})
    means = frame.assign(log=np.log(frame["gap"])).groupby(["series", "kernel"], sort=False)
    mean = np.exp(means["log"].mean()).rename("gap").reset_index()
    named = alt.Axis(labelAngle=0, labelExpr=SHORT)
    order = sorted(frame["kernel"].unique())
    x = alt.X("kernel:N", title="degree, or the model's own kernel", sort=order, axis=named)
    title = f"OVO error / OVA error, r = {SIZE}"
    ends = [frame["gap"].min() / 1.2, frame["gap"].max() * 1.2]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(values=TICKS, format="~r")
    y = alt.Y("gap:Q", title=title, scale=scale, axis=axis)
    colours = alt.Scale(domain=list(marks), range=[mark.colour for mark in marks.values()])
    shapes = alt.Scale(domain=list(marks), range=[mark.shape for mark in marks.values()])

    def of(rows: pd.DataFrame) -> alt.Chart:
        legend = alt.Legend(orient="bottom", columns=2)
        return alt.Chart(rows[["series", "kernel", "gap"]]).encode(
            x=x,
            y=y,
            color=alt.Color("series:N", scale=colours, legend=legend),
            opacity=OPACITY,
            tooltip=["series:N", "kernel:N", alt.Tooltip("gap:Q", format=".4~g")],
        )

    shape = alt.Shape("series:N", scale=shapes)
    degrees = mean[mean["kernel"].str.startswith("degree")]
    layers = [
        of(frame).mark_point(filled=True, size=18, fillOpacity=0.5).encode(shape=shape),
        of(degrees).mark_line(strokeWidth=1.6),
        of(mean).mark_point(filled=True, size=90).encode(shape=shape),
    ]
    return figure(layers)
