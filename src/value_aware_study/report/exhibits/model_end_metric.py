"""What a model's end metric is with every layer's attention replaced, against the keys kept."""

from typing import Any, Literal

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.report import captions
from value_aware_study.report.curves import count_axis, curves, figure, level, upright
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import interval, number
from value_aware_study.report.look import Mark, Panel, direction
from value_aware_study.report.marks import method_marks
from value_aware_study.report.oracles import MARKS, full_name

__all__ = ["exhibit"]

Better = Literal["lower", "higher"]
METRICS: dict[str, tuple[str, Better, int]] = {
    "error": ("hidden tokens predicted wrongly, %", "lower", 1),
    "perplexity": ("perplexity", "lower", 2),
    "cosine": ("cosine to the exact hidden states", "higher", 4),
}
"""Name of a metric, its better direction, and its digits."""
COLUMNS = ("value", "low", "high", "difference", "difference_low", "difference_high", "count")


def exhibit(record: Record, name: str, setting: str) -> Exhibit:
    """One curve a method, with its intervals; dashed: exact attention."""
    title, better, digits = METRICS[record.metric]
    exact = record.cells[0]
    rows = [
        {"approximation": cell.approximation, "r": cell.parameters.get("r")}
        | {column: getattr(cell, column) for column in COLUMNS}
        for cell in record.cells
    ]
    data = pd.DataFrame(rows).astype({"r": "Int64"})
    return Exhibit(
        name,
        "The end metric against the keys kept",
        f"Every layer's attention replaced: {direction(title, better)}.",
        [
            f"{captions.OPTIMAL} {captions.BEST_FOUND}",
            f"Exact attention: {number(exact.value, digits)}, over {exact.count:,} tokens. Bars: "
            "paired 95% intervals around it, over windows.",
            setting,
        ],
        [_panel(record, data)],
        Table(data, pd.DataFrame([_text(row, digits) for row in rows])),
    )


def _panel(record: Record, data: pd.DataFrame) -> Panel:
    title, better, _ = METRICS[record.metric]
    exact, drawn = float(data["value"][0]), data.iloc[1:].drop(columns="count")
    drawn = drawn.rename(columns={"r": "count"})
    drawn = drawn.assign(series=drawn["approximation"].map(full_name))
    drawn = drawn.astype(dict.fromkeys(("count", "low", "high"), float))
    ends = pd.concat([drawn["low"], drawn["value"], drawn["high"], pd.Series(exact)])
    room = 0.08 * (ends.max() - ends.min())
    scale = alt.Scale(domain=[ends.min() - room, ends.max() + room], nice=False, zero=False)
    y = alt.Y("value:Q", title=direction(title, better), scale=scale, axis=alt.Axis(tickCount=6))
    sizes, keys = drawn["count"].tolist(), record.head_dim + 1
    x = count_axis("keys kept for each query, r", sizes)
    layers = level(exact, "exact")
    if min(sizes) <= keys <= max(sizes):
        layers += upright(keys, f"d + 1 = {keys}")
    if keys - 1 in sizes:  # their marks would lie on one another
        drawn = drawn[drawn["count"] != keys]
    return figure([*layers, *curves(drawn, _marks(drawn), x, y)])


def _marks(drawn: pd.DataFrame) -> dict[str, Mark]:
    """The oracles first, then the others as they look everywhere."""
    others = method_marks(drawn)
    return {name: MARKS.get(name) or Mark(*others[name]) for name in dict.fromkeys(drawn["series"])}


def _text(row: dict[str, Any], digits: int) -> dict[str, str]:
    return {
        "method": full_name(row["approximation"]),
        "r, keys": "all" if row["r"] is None else f"{row['r']:,}",
        "value": number(row["value"], digits),
        "95% interval": interval(row["low"], row["high"], digits),
    }
