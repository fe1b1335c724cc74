"""Keys by weight beside the few keys for the output that they match, as pairs of bars."""

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit
from value_aware_study.report.exhibits.matching_keys import CONSERVATIVE, counts, table
from value_aware_study.report.look import Panel, bars, direction, toggled
from value_aware_study.report.measurements import (
    AWARE,
    OBLIVIOUS,
    Measured,
    of_kernels,
    sentence,
)
from value_aware_study.report.oracles import MARKS, NAMES

__all__ = ["exhibit", "panel"]

LARGEST = 16
"""Value-aware keys; more are in the table."""


def exhibit(record: Record, name: str, setting: str) -> Exhibit | None:
    """A pair of bars for each number of value-aware keys, for each kernel; None without any."""
    kernels = [one for one in of_kernels(record) if one.output_error.matching_keys]
    if not kernels:
        return None
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
        [panel(one, titled=len(kernels) > 1) for one in kernels],
        table(counts(kernels), "kernel"),
    )


def panel(measured: Measured, *, titled: bool = False) -> Panel:
    """A pair of bars for each number of value-aware keys up to 16."""
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
    axis = alt.Axis(grid=False, tickCount=5, format=",d")
    x = alt.X("value:Q", title=title, scale=room, axis=axis)
    chart = toggled(bars(frame, MARKS, x, None), 46)
    return chart.properties(title=measured.label) if titled else chart
