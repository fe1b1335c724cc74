"""How many keys chosen by weight a model needs for what a few chosen for the output reach."""

from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.look import Panel, bars, direction, toggled
from value_aware_study.report.oracles import MARKS, NAMES
from value_aware_study.reporting import captions
from value_aware_study.reporting.measurements import (
    AWARE,
    OBLIVIOUS,
    Measured,
    error_rows,
    of_kernels,
    sentence,
)
from value_aware_study.reporting.table import interval, whole

__all__ = ["exhibit"]

COUNTS = ("low", "high", "median", "lower_quartile", "upper_quartile")
LARGEST = 16
"""Value-aware keys; more are in the table."""
CONSERVATIVE = "As OVA's error is an upper bound on the optimal one, the counts are conservative."


def exhibit(record: Record, name: str, setting: str) -> Exhibit:
    """A pair of bars for each number of value-aware keys, a panel for each kernel."""
    kernels = of_kernels(record)
    rows = [row for measured in kernels for row in _rows(measured)]
    data = pd.DataFrame(rows).astype(dict.fromkeys(("keys_needed", *COUNTS), "Int64"))
    found = [f"{one.label}: {sentence(one.output_error)}." for one in kernels]
    return Exhibit(
        name,
        "The same output with fewer keys",
        "Keys chosen by weight that come as close to the exact output as r chosen for it.",
        [
            f"{captions.MATCH} {captions.MATCH_OF_QUERIES}",
            f"{captions.BEST_FOUND} {CONSERVATIVE}",
            *found,
            setting,
        ],
        [_panel(one, titled=len(kernels) > 1) for one in kernels],
        Table(data, pd.DataFrame(map(_text, rows))),
    )


def _panel(measured: Measured, *, titled: bool) -> Panel:
    errors = measured.output_error
    pairs = [
        {"name": f"r = {match.r}", "series": NAMES[method], "value": keys, "low": low, "high": high}
        for match in errors.matching_keys
        if match.layer is None and match.r <= LARGEST
        for method, keys, low, high in (
            (AWARE, match.r, None, None),
            (OBLIVIOUS, match.keys, match.low, match.high),
        )
    ]
    frame = pd.DataFrame(pairs)
    title = direction(f"keys of {errors.keys:,} for the same error", "lower")
    room = alt.Scale(domain=[0, 1.12 * float(frame["value"].max())], nice=False)
    x = alt.X("value:Q", title=title, scale=room, axis=alt.Axis(grid=False))
    chart = toggled(bars(frame, MARKS, x, None), 46)
    return chart.properties(title=measured.label) if titled else chart


def _rows(measured: Measured) -> list[dict[str, Any]]:
    """One row for every size pooled, then for every size in each layer."""
    errors, rows = measured.output_error, []
    for match in errors.matching_keys:
        error = {row["r"]: row["error"] for row in error_rows(errors, AWARE, match.layer)}
        row: dict[str, Any] = {
            "model": measured.label,
            "layer": "all" if match.layer is None else match.layer,
        }
        row |= {"r": match.r, "keys_needed": match.keys, "keys": errors.keys}
        row |= {"share": match.keys / errors.keys, "value_aware_error": error[match.r]}
        rows.append(row | {name: getattr(match, name) for name in COUNTS})
    return rows


def _text(row: dict[str, Any]) -> dict[str, str]:
    return {
        "kernel": row["model"],
        "layer": str(row["layer"]),
        "r, value-aware keys": str(row["r"]),
        "keys by weight": whole(row["keys_needed"]),
        "95% interval": interval(row["low"], row["high"], 0),
        "share of all keys": f"{100 * row['share']:.0f}% of {row['keys']:,}",
        "median query": whole(row["median"]),
        "quartiles": interval(row["lower_quartile"], row["upper_quartile"], 0),
    }
