"""Time and memory of a layer with every method, the survey's Figures 9 and 10."""

from collections.abc import Mapping, Sequence

import altair as alt
import pandas as pd

from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import interval, number
from value_aware_study.report.look import Mark, Panel, direction, dots, ramp, toggled
from value_aware_study.report.survey_records import DENSE, HOW, TRAINING, Measurements

__all__ = ["exhibit"]

LONG_FROM = 512
ROW = 21
PANELS = (
    ("peak_mib", "peak_mib", "peak_mib", "peak memory, MiB"),
    ("milliseconds", "low", "high", "time, ms"),
)
"""Columns of a value and the ends of its interval, and what it is called."""


def exhibit(measured: Measurements) -> list[Exhibit]:
    """Forward + backward at long and at short lengths, each where there are measurements."""
    rows = measured.frame
    rows = rows[(rows["pass"] == TRAINING) & rows["milliseconds"].notna()]
    ranges = (
        ("long", "Figure 9", rows[rows["length"] >= LONG_FROM]),
        ("short", "Figure 10", rows[rows["length"] < LONG_FROM]),
    )
    return [_exhibit(measured, name, figure, found) for name, figure, found in ranges if len(found)]


def _exhibit(measured: Measurements, name: str, figure: str, rows: pd.DataFrame) -> Exhibit:
    lengths = sorted(set(rows["length"]))
    rows = rows.sort_values(["length", "milliseconds"])
    longest = rows[rows["length"] == lengths[-1]]["label"]
    order = list(dict.fromkeys([*longest, *rows["label"]]))
    drawn = rows.rename(columns={"label": "name"}).assign(
        series=[f"L = {length:,}" for length in rows["length"]]
    )
    marks = ramp([f"L = {length:,}" for length in lengths])
    dashed = "Dashed: dense attention at each L, the tokens; a mark to its right costs more."
    return Exhibit(
        f"time_memory_{name}",
        f"Memory and time for {name} sequences",
        f"Forward + backward of one layer, fastest at {lengths[-1]:,} tokens first (the survey's "
        f"{figure}).",
        [f"{dashed} {HOW}", measured.setting],
        [_panel(drawn, marks, order, *panel) for panel in PANELS],
        _table(rows),
    )


def _panel(
    drawn: pd.DataFrame,
    marks: Mapping[str, Mark],
    order: Sequence[str],
    field: str,
    low: str,
    high: str,
    title: str,
) -> Panel:
    columns = {"value": drawn[field], "low": drawn[low], "high": drawn[high]}
    values = drawn[["name", "series", "method"]].assign(**columns)
    title = direction(title, "lower")
    scale = alt.Scale(type="log", padding=8, nice=False)
    axis = alt.Axis(values=_ticks(values), format="~g", labelOverlap="greedy", labelSeparation=6)
    x = alt.X("value:Q", title=title, scale=scale, axis=axis)
    lines = _dense(values, marks)
    return toggled([*lines, *dots(values, marks, x, order=order)], ROW)


def _ticks(values: pd.DataFrame) -> list[float]:
    low, high = values["low"].min(), values["high"].max()
    steps = (digit * 10.0**power for power in range(-3, 8) for digit in (1, 2, 5))
    return [step for step in steps if low <= step <= high]


def _dense(values: pd.DataFrame, marks: Mapping[str, Mark]) -> list[alt.Chart]:
    """A dashed line at dense attention's value for every length, the last one named."""
    dense = values[values["method"] == DENSE[0]]
    colours = alt.Scale(domain=list(marks), range=[mark.colour for mark in marks.values()])
    base = alt.Chart(dense[["name", "series", "value"]]).encode(
        x="value:Q", color=alt.Color("series:N", scale=colours)
    )
    named = alt.Chart(dense.tail(1)[["name", "value"]]).mark_text(
        align="right", baseline="bottom", dx=2, dy=-4, text="dense attention"
    )
    return [base.mark_rule(strokeDash=[5, 4]), named.encode(x="value:Q", y=alt.value(0))]


def _table(rows: pd.DataFrame) -> Table:
    """One row a length and method: median time with its quartiles, and peak memory."""
    data = rows[["length", "method", "label", "milliseconds", "low", "high", "peak_mib"]]
    display = pd.DataFrame(
        {
            "tokens": [f"{length:,}" for length in rows["length"]],
            "method": rows["label"],
            "time, ms": [number(value) for value in rows["milliseconds"]],
            "quartiles": [interval(*ends) for ends in zip(rows["low"], rows["high"], strict=True)],
            "peak memory, MiB": [number(value) for value in rows["peak_mib"]],
        }
    )
    return Table(data, display)
