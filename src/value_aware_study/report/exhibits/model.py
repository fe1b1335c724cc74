"""A probed model: its end metric against r, and the keys that its layers and heads need."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import altair as alt
import pandas as pd

from value_aware_attention.measurement.headline import SHARE, by_layer, shown_size
from value_aware_attention.measurement.record import KeysNeeded, Record
from value_aware_study.report import captions
from value_aware_study.report.charts import (
    count_axis,
    curves,
    direction,
    dots,
    figure,
    heat_map,
    level,
    toggled,
    upright,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.look import Panel
from value_aware_study.report.measured import (
    AWARE,
    OBLIVIOUS,
    ORACLE_MARKS,
    ORACLES,
    Rows,
    full_name,
    oracle_marks,
)
from value_aware_study.report.words import (
    NONE,
    counted,
    interval,
    intervals,
    missing,
    number,
    sentences,
    short,
    whole,
)

Better = Literal["lower", "higher"]
METRICS: dict[str, tuple[str, Better, int]] = {
    "error": ("hidden tokens predicted wrongly, %", "lower", 1),
    "perplexity": ("perplexity", "lower", 2),
    "cosine": ("cosine to the exact hidden states", "higher", 4),
}
"""Title of a metric, its better direction, and its digits."""
COLUMNS = ("value", "low", "high", "difference", "difference_low", "difference_high", "count")
ALL = "all layers"
ALIKE = {"own": "", "equal": ", all heads alike"}
SCALE = (
    "Both panels have one logarithmic scale of colours, from the first percentile on; the "
    "brighter, the more."
)


def end_metric(record: Record, name: str, setting: str) -> Exhibit:
    """Shows one curve a method, with its intervals; dashed: exact attention."""
    title, better, digits = METRICS[record.metric]
    exact = record.cells[0]
    rows = [
        {"approximation": cell.approximation, "r": cell.parameters.get("r")}
        | {column: getattr(cell, column) for column in COLUMNS}
        | {
            "output_error": cell.error and cell.error.relative,
            "cosine": cell.error and cell.error.cosine,
            "relative_length": cell.error and cell.error.relative_length,
        }
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
            f"Output error, cosine and length are of the attention's outputs. {captions.DIRECTION}",
            setting,
        ],
        [_metric_panel(record, data)],
        Table(data, pd.DataFrame([_metric_text(row, digits) for row in rows])),
    )


def _metric_panel(record: Record, data: pd.DataFrame) -> Panel:
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
        layers += upright(keys)
    if keys - 1 in sizes:  # their marks would lie on one another
        drawn = drawn[drawn["count"] != keys]
    unit = "% wrong" if record.metric == "error" else ""
    where = f"{{series}}, r = {{count:,.0f}}{'' if unit else f', {record.metric}'}"
    drawn = drawn.assign(said=sentences(drawn, where, unit, digits=4))
    marks = oracle_marks(drawn)
    marks = {name: marks[name] for name in dict.fromkeys(drawn["series"])}
    return figure([*layers, *curves(drawn, marks, x, y)])


def _metric_text(row: dict[str, Any], digits: int) -> dict[str, str]:
    return {
        "method": full_name(row["approximation"]),
        "r, keys": "all" if row["r"] is None else f"{row['r']:,}",
        "value": number(row["value"], digits),
        "95% interval": interval(row["low"], row["high"], digits),
        "output error": short(row["output_error"]),
        "cosine": number(row["cosine"], 3),
        "length": number(row["relative_length"], 2),
    }


def keys_of_layers(record: Record, name: str, setting: str) -> Exhibit:
    """Shows one panel for each share of error, one row a layer."""
    errors = record.attention[0].output_error
    layers: dict[str, list[KeysNeeded]] = {ALL: []}
    layers |= {f"layer {layer}": [] for layer in range(errors.layers)}
    for one in errors.keys_needed:
        if one.head is None:
            layers[ALL if one.layer is None else f"layer {one.layer}"].append(one)
    shares = sorted({one.share for one in layers[ALL]})
    data = pd.DataFrame([_layer_numbers(place, needed) for place, needed in layers.items()])
    counts = [column for column in data if column.endswith(("keys", "low", "high"))]
    return Exhibit(
        name,
        "Keys that each layer needs",
        "The fewest keys whose relative squared output error, over the layer's heads, is at most "
        "the share of a panel's title.",
        [
            *filter(None, [by_layer(record)]),
            f"Bars: 95% intervals, over windows. {captions.BEST_FOUND}",
            setting,
        ],
        [_layers_panel(layers, share, errors.keys) for share in shares],
        Table(
            data.astype(dict.fromkeys(counts, "Int64")),
            pd.DataFrame([_layer_text(place, needed) for place, needed in layers.items()]),
        ),
    )


def _layers_panel(layers: Mapping[str, Sequence[KeysNeeded]], share: float, keys: int) -> Panel:
    rows = [
        {"name": place, "series": ORACLES[one.method], "value": one.keys}
        | {"low": one.low, "high": one.high}
        for place, needed in layers.items()
        for one in needed
        if one.share == share
    ]
    x = count_axis(direction("keys needed", "lower"), [1, keys], "value")
    frame = pd.DataFrame(rows)
    frame["said"] = sentences(frame, "{name}, {series}", " keys", digits=0, text=number)
    drawn = dots(frame, ORACLE_MARKS, x, order=list(layers))
    return toggled(drawn, title=f"{share:.0%} error")


def _layer_numbers(place: str, needed: Sequence[KeysNeeded]) -> dict[str, Any]:
    """Returns the counts of a layer: by share and method, with the ends of their intervals."""
    return {"layer": place} | {
        f"{one.method}_{one.share:g}_{name}": getattr(one, name)
        for one in needed
        for name in ("keys", "low", "high")
    }


def _layer_text(place: str, needed: Sequence[KeysNeeded]) -> dict[str, str]:
    return {"layer": place} | {
        f"{one.share:.0%} error, {ORACLES[one.method]}": counted(one.keys, one.low, one.high)
        for one in needed
    }


def error_by_head(record: Record, name: str, setting: str) -> Exhibit:
    """Shows the relative output error of each head with few keys, in percent."""
    size = shown_size(record)
    rows: Rows = [
        {"method": at.method, "layer": at.layer, "head": at.head}
        | {"value": _percent(at.error), "low": _percent(at.low), "high": _percent(at.high)}
        for at in record.attention[0].output_error.errors
        if at.r == size and at.head is not None
    ]
    return _heat_maps(
        name,
        f"Output error of each head with {size} keys",
        f"Relative squared output error with {size} keys, in percent: lower is better, and above "
        "100 an output of zero is nearer.",
        setting,
        rows,
        two_digits,
        "%",
    )


def keys_by_head(record: Record, name: str, setting: str) -> Exhibit:
    """Shows the keys that each head needs for 5% error."""
    rows: Rows = [
        {"method": row.method, "layer": row.layer, "head": row.head}
        | {"value": row.keys, "low": row.low, "high": row.high}
        for row in record.attention[0].output_error.keys_needed
        if row.head is not None and row.share == SHARE
    ]
    return _heat_maps(
        name,
        f"Keys that each head needs for an output error of {SHARE:.0%}",
        f"The fewest of {record.length:,} keys; lower is better.",
        setting,
        rows,
        whole,
        " keys",
    )


def two_digits(value: float) -> str:
    """Writes a percentage to two significant digits: "35", "3.5", "0.35", "<.01"."""
    return "<.01" if value < 0.01 else f"{float(f'{value:.2g}'):g}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _heat_maps(
    name: str,
    title: str,
    caption: str,
    setting: str,
    rows: Rows,
    text: Callable[[float], str],
    unit: str,
) -> Exhibit:
    frame = pd.DataFrame(rows)
    shown = [NONE if missing(value) else text(value) for value in frame["value"]]
    frame = frame.astype({"value": float}).assign(text=shown)
    return Exhibit(
        name,
        title,
        caption,
        [SCALE, captions.BEST_FOUND, setting],
        [
            heat_map(frame[frame["method"] == one], ORACLES[one], frame["value"], unit)
            for one in (OBLIVIOUS, AWARE)
        ],
        _heads_table(frame),
    )


def _heads_table(frame: pd.DataFrame) -> Table:
    """Tabulates the values by layer, head and method."""
    display = (
        frame[["layer", "head"]]
        .astype(str)
        .assign(
            method=frame["method"].map(ORACLES),
            value=frame["text"],
            **{"95% interval": intervals(frame, 2)},
        )
    )
    return Table(frame.drop(columns="text"), display)


def head_budgets(record: Record, name: str, setting: str) -> Exhibit | None:
    """Tabulates the end metric with the keys that each head needs, in all heads together."""
    title, better, digits = METRICS[record.metric]
    rows = [
        {"approximation": cell.approximation, **cell.parameters}
        | {column: getattr(cell, column) for column in COLUMNS}
        for cell in record.budgets
    ]
    if not rows:
        return None
    display = [
        {
            "error in each head": f"{row['share']:.0%}",
            "keys a head": number(row["keys"]),
            "attention": f"{full_name(row['approximation'])}{ALIKE[row['each']]}",
            "value": number(row["value"], digits),
            "95% interval": interval(row["low"], row["high"], digits),
        }
        for row in rows
    ]
    exact = number(record.cells[0].value, digits)
    return Exhibit(
        name,
        "The end metric with a budget for each head",
        f"Every head keeps the keys that it needs for an output error, all heads at once; "
        f"{direction(title, better)}. Exact attention: {exact}.",
        [
            "A window has the budgets of OVO. Alike: every head has the mean of these, rounded up.",
            setting,
        ],
        table=Table(pd.DataFrame(rows), pd.DataFrame(display)),
    )
