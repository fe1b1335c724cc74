"""The answer as one bar chart: keys by weight that match a few keys chosen for the output."""

from collections.abc import Sequence

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import interval, whole
from value_aware_study.report.labels import model_label
from value_aware_study.report.look import Mark, bars, direction, toggled
from value_aware_study.report.measurements import matching_keys

__all__ = ["exhibit"]

SIZES = (1, 2, 4, 8, 16)
TITLED = 4
AWARE, OBLIVIOUS = "chosen for the output (OVA)", "chosen by weight (OVO)"
MARKS = {AWARE: Mark.of("blue"), OBLIVIOUS: Mark.of("vermillion")}


def exhibit(records: Sequence[Record]) -> Exhibit | None:
    """Of the first of these records in which matching keys were counted; None where in none."""
    for record in records:
        found = _rows(record)
        if len(found):
            return _exhibit(record, found)
    return None


def _rows(record: Record) -> pd.DataFrame:
    """A row a size: keys by weight that match, with the ends of their interval."""
    errors = [one.output_error for one in record.attention[:1]]
    matches = [match for error in errors for r in SIZES if (match := matching_keys(error, r))]
    columns = ("r", "keys", "low", "high", "median")
    rows = [{name: getattr(match, name) for name in columns} for match in matches]
    return pd.DataFrame(rows, columns=list(columns)).astype("Int64")


def _exhibit(record: Record, found: pd.DataFrame) -> Exhibit:
    errors = record.attention[0].output_error
    shown = found[found["r"] == TITLED]
    row = (shown if len(shown) else found.tail(1)).iloc[0]
    name = model_label(record) if record.scale else record.model  # ours, or a probed one
    display = pd.DataFrame(
        {
            AWARE: [whole(r) for r in found["r"]],
            OBLIVIOUS: [whole(keys) for keys in found["keys"]],
            "95% interval": list(map(_ends, found["low"], found["high"])),
            "median query": [whole(median) for median in found["median"]],
        }
    )
    return Exhibit(
        "hero",
        f"The same output with {row['r']} keys as with {row['keys']}, if they are chosen for it",
        f"Keys of {errors.keys:,} that a query needs for the same output error "
        f"({name}, all {errors.layers} layers pooled).",
        [captions.MATCH, captions.MATCH_OF_QUERIES, f"{captions.OPTIMAL} {captions.BEST_FOUND}"],
        [_panel(found)],
        Table(found.rename(columns={"keys": "keys_needed"}), display),
    )


def _ends(low: int, high: int) -> str:
    return interval(low, high, 0)


def _panel(found: pd.DataFrame) -> alt.LayerChart:
    aware = pd.DataFrame({"name": found["r"], "series": AWARE, "value": found["r"]})
    oblivious = found[["low", "high"]].assign(
        name=found["r"], series=OBLIVIOUS, value=found["keys"]
    )
    frame = pd.concat([aware, oblivious]).astype({"name": str, "value": float})
    frame[["low", "high"]] = frame[["low", "high"]].astype(float)
    title = direction("keys for the same output error", "lower")
    axis = alt.Axis(tickCount=5, grid=False, format=",d")
    return toggled(bars(frame, MARKS, alt.X("value:Q", title=title, axis=axis), "r"), 52)
