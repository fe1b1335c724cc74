"""How many keys chosen by weight match r value-aware keys: a figure and its table."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import OutputError
from value_aware_study.report import captions
from value_aware_study.report.curves import count_axis, curves, figure, powers_of_two
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import interval, missing, whole
from value_aware_study.report.look import Panel, direction
from value_aware_study.report.measurements import (
    AWARE,
    NONE,
    Measured,
    Rows,
    error_rows,
    measured_on,
)
from value_aware_study.report.replicates import RANGE, ranged, with_range

__all__ = ["CONSERVATIVE", "counts", "exhibit", "layers", "table"]

CONSERVATIVE = "As OVA's error is an upper bound on the optimal one, the counts are conservative."
COUNTS = ("low", "high", "median", "lower_quartile", "upper_quartile")
COLUMNS = ("model", "layer", "r", "keys_needed", *COUNTS, "keys", "share", "value_aware_error")


def exhibit(measured: Sequence[Measured], name: str, begins: str = "") -> Exhibit | None:
    """The counts pooled, drawn and listed; None where none was made."""
    data = counts(measured)
    pooled = data[data["layer"] == "all"].reset_index(drop=True)
    if pooled.empty:
        return None
    notes = [
        f"{captions.MATCH} Bars: that interval. {captions.MATCH_OF_QUERIES}",
        f"{captions.BEST_FOUND} {CONSERVATIVE} {measured_on(measured)}",
    ]
    return Exhibit(
        name,
        f"{begins}How many keys chosen by weight match r value-aware keys",
        "Keys by weight (OVO) with at most the output error of r keys chosen for the output (OVA).",
        notes,
        [_panel(pooled, {item.label: item.mark for item in measured})],
        table(pooled),
    )


def layers(measured: Sequence[Measured]) -> Exhibit | None:
    """The counts pooled and in each layer; None where none was made."""
    data = counts(measured)
    if data.empty:
        return None
    return Exhibit(
        "keys_needed",
        "Matching keys in every layer",
        "Keys by weight (OVO) that match r keys chosen for the output (OVA), layer by layer.",
        [captions.MATCH, captions.MATCH_OF_QUERIES],
        table=table(data),
        folded=True,
    )


def counts(measured: Sequence[Measured]) -> pd.DataFrame:
    """One row for every size pooled, then for every size in each layer.

    The range over the trainings of a model is beside its counts, where it was trained again.
    """
    rows = [
        row
        for item in measured
        for one in (item.attention, *item.replicates)
        for row in _rows(item.label, one.output_error)
    ]
    data = pd.DataFrame(rows, columns=list(COLUMNS))
    data = data.astype(dict.fromkeys(("keys_needed", *COUNTS), "Int64"))
    return with_range(data, ["model", "layer", "r"], "keys_needed")


def table(data: pd.DataFrame, named: str = "model") -> Table:
    """The counts as text too, the layer where there are several; `named`: what `model` names."""
    display = pd.DataFrame([_text(row) for row in data.to_dict("records")])
    display = display.rename(columns={"model": named})
    if data["layer"].nunique() > 1:
        display.insert(1, "layer", data["layer"].astype(str))
    return Table(data, display)


def _rows(label: str, errors: OutputError) -> Rows:
    rows = []
    for match in errors.matching_keys:
        error = {row["r"]: row["error"] for row in error_rows(errors, AWARE, match.layer)}
        row: dict[str, Any] = {
            "model": label,
            "layer": "all" if match.layer is None else match.layer,
        }
        row |= {"r": match.r, "keys_needed": match.keys, "keys": errors.keys}
        share = None if match.keys is None else match.keys / errors.keys
        row |= {"share": share, "value_aware_error": error[match.r]}
        rows.append(row | {name: getattr(match, name) for name in COUNTS})
    return rows


def _text(row: Mapping[str, Any]) -> dict[str, str]:
    lowest, highest = (row.get(name) for name in RANGE)
    over_seeds = {"range over seeds": interval(lowest, highest, 0)} if RANGE[0] in row else {}
    return {
        "model": row["model"],
        "r, value-aware keys": str(row["r"]),
        "keys by weight": NONE if missing(row["keys_needed"]) else whole(row["keys_needed"]),
        "95% interval": interval(row["low"], row["high"], 0),
        **over_seeds,
        "share of all keys": NONE
        if missing(row["share"])
        else f"{100 * row['share']:.0f}% of {row['keys']:,}",
        "median query": whole(row["median"]),
        "quartiles": interval(row["lower_quartile"], row["upper_quartile"], 0),
    }


def _panel(pooled: pd.DataFrame, marks: Mapping[str, Any]) -> Panel:
    names = {"model": "series", "r": "count", "keys_needed": "value"}
    frame = pooled.rename(columns=names)
    drawn = ["value", "low", "high", *ranged(frame)]
    frame = frame.astype(dict.fromkeys(drawn, float))
    highest = float(frame[drawn].max().max())
    x = count_axis("r, keys chosen for the output (log scale)", frame["count"].tolist())
    scale = alt.Scale(type="log", base=2, domain=[0.8, highest * 1.4], nice=False)
    axis = alt.Axis(values=powers_of_two([1, highest]), format="d", labelOverlap="parity")
    title = direction("keys chosen by weight", "lower")
    y = alt.Y("value:Q", title=title, scale=scale, axis=axis)
    last = int(frame["count"].max())
    return figure([*_equal(last), *curves(frame, marks, x, y)], height=380)


def _equal(last: int) -> list[alt.Chart]:
    """A dashed line of as many keys by weight as value-aware ones, with its name under it."""
    base = alt.Chart(pd.DataFrame({"count": [1, last], "value": [1, last]}))
    line = base.mark_line(strokeDash=[6, 4], strokeWidth=1.2, color="var(--muted)")
    middle = 2 ** (last.bit_length() // 2)
    place = alt.Chart(
        pd.DataFrame({"count": [middle], "value": [middle], "name": ["equal number"]})
    )
    name = place.mark_text(align="left", baseline="top", dx=8, dy=6)
    ends = {"x": "count:Q", "y": "value:Q"}
    return [line.encode(**ends), name.encode(**ends, text="name:N")]
