"""How many keys each layer of a model needs for an output error of 1%, 5% and 10%."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from value_aware_attention.measurement.record import KeysNeeded, Record
from value_aware_study.report import captions
from value_aware_study.report.curves import count_axis
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.look import Panel, direction, dots, toggled
from value_aware_study.report.measurements import with_ends
from value_aware_study.report.oracles import MARKS, NAMES

__all__ = ["exhibit"]

ALL = "all layers"


def exhibit(record: Record, name: str, setting: str) -> Exhibit:
    """One panel for each share of error, one row a layer."""
    errors = record.attention[0].output_error
    needed = [row for row in errors.keys_needed if row.head is None]
    places = [ALL, *(f"layer {layer}" for layer in range(errors.layers))]
    shares = sorted({row.share for row in needed})
    data = pd.DataFrame([_numbers(needed, place) for place in places])
    counts = ("keys", "low", "high")
    data = data.astype({column: "Int64" for column in data if column.endswith(counts)})
    return Exhibit(
        name,
        "Keys that each layer needs",
        "The fewest keys whose relative squared output error, over the layer's heads, is at most "
        "that.",
        [f"Bars: 95% intervals, over windows. {captions.BEST_FOUND}", setting],
        [_panel(needed, share, places, errors.keys) for share in shares],
        Table(data, pd.DataFrame([_text(needed, place) for place in places])),
    )


def _panel(needed: Sequence[KeysNeeded], share: float, places: Sequence[str], keys: int) -> Panel:
    rows = [
        {"name": _place(row), "series": NAMES[row.method], "value": row.keys}
        | {"low": row.low, "high": row.high}
        for row in needed
        if row.share == share
    ]
    x = count_axis(direction("keys needed", "lower"), [1, keys])
    x.shorthand = "value:Q"
    layers = dots(pd.DataFrame(rows), MARKS, x, order=places)
    return toggled(layers).properties(title=f"{share:.0%} error")


def _place(row: KeysNeeded) -> str:
    return ALL if row.layer is None else f"layer {row.layer}"


def _numbers(needed: Sequence[KeysNeeded], place: str) -> dict[str, Any]:
    """The counts of a layer: by share and method, with the ends of their intervals."""
    of_place = [row for row in needed if _place(row) == place]
    return {"layer": place} | {
        f"{row.method}_{row.share:g}_{name}": getattr(row, name)
        for row in of_place
        for name in ("keys", "low", "high")
    }


def _text(needed: Sequence[KeysNeeded], place: str) -> dict[str, str]:
    of_place = [row for row in needed if _place(row) == place]
    return {"layer": place} | {
        f"{row.share:.0%} error, {NAMES[row.method]}": with_ends(row) for row in of_place
    }
