"""Exhibits of one model: its end metric, the keys that it needs, and a text token by token."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd

from value_aware_attention.records.estimate import NO_COUNT, counted, interval, number, short, whole
from value_aware_attention.records.headline import (
    FIVE_PERCENT,
    by_layer,
    exact_ratio,
    factor,
    shown_size,
)
from value_aware_attention.records.matching import SLOT, end_matches
from value_aware_attention.records.record import AWARE, OBLIVIOUS, KeysNeeded, Record
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report import captions, charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import DIRECTION_COLUMNS, MEASURES, Results, Row

METRIC_TITLES: dict[str, tuple[str, Literal["lower", "higher"], int]] = {
    "error": ("hidden tokens predicted wrongly, %", "lower", 1),
    "perplexity": ("perplexity", "lower", 2),
    "cosine": ("cosine to the exact hidden states", "higher", 4),
}
"""Title of a metric, its better direction, and its digits"""
MATCHING = {OBLIVIOUS: "keys by weight that match", SLOT: "with the mean slot"}
END_MATCH = (
    "Keys by weight that match: how many of the largest weights lose as little of this metric as r "
    "value-aware keys, in all layers at once; between measured sizes the loss is taken as linear "
    "in log r. Interval: the jackknife over windows, from r to the largest size. With the mean "
    "slot the last of them is the mean of all values left out."
)
MEAN_IS_ONE = (
    "OVA with the mean may use the mean of all values that the query sees as one of its r. The "
    "weight of the mean is a bar above the text; no token shows a part of it."
)
ALL_LAYERS = "all layers"


def end_metric(record: Record, name: str, setting: str) -> Exhibit:
    """Shows one curve per method, with intervals; dashed: exact attention."""
    title, better, digits = METRIC_TITLES[record.metric]
    exact = record.cells[0]
    rows = [
        {"approximation": cell.approximation, "r": cell.parameters.get("r")}
        | {name: getattr(cell, name) for name in (*MEASURES[1:], "count")}
        | {"output_error": cell.error and cell.error.relative}
        | {name: cell.error and getattr(cell.error, name) for name in DIRECTION_COLUMNS}
        | {
            f"over_exact_{end}": ratio
            for end, ratio in vars(exact_ratio(record, cell)).items()
            if record.metric == "perplexity"
        }
        for cell in record.cells
    ]
    matches = {
        by: [
            end_matches(record, cell.parameters["r"], by=by)
            if cell.approximation == AWARE
            else None
            for cell in record.cells
        ]
        for by in MATCHING
    }
    columns = {
        f"matching_{by}_{end}": [getattr(match, end, None) for match in of]
        for by, of in matches.items()
        for end in ("value", *charts.END_COLUMNS)
    }
    data = pd.DataFrame(rows).astype({"r": "Int64"}).assign(**columns)
    texts = {MATCHING[by]: [str(match or "") for match in of] for by, of in matches.items()}
    return Exhibit(
        name,
        "The end metric against the keys kept",
        f"Every layer's attention replaced: {charts.direction(title, better)}.",
        [
            f"{captions.OPTIMAL} {captions.BEST_FOUND}",
            f"Exact attention: {number(exact.value, digits)}, over {exact.count:,} tokens. Bars: "
            "paired 95% intervals around it, over windows.",
            f"Output error, cosine and length are of the attention's outputs. {captions.DIRECTION}",
            END_MATCH,
            setting,
        ],
        [_metric_panel(record, data)],
        Table(data, pd.DataFrame([_metric_text(row, digits) for row in rows]).assign(**texts)),
    )


def _metric_panel(record: Record, data: pd.DataFrame) -> look.Panel:
    exact, drawn = float(data["value"][0]), data.iloc[1:].drop(columns="count")
    drawn = drawn.rename(columns={"r": "count"})
    drawn = drawn.assign(series=drawn["approximation"].map(words.full_name))
    drawn = drawn.astype(dict.fromkeys(("count", "low", "high"), float))
    y = _metric_axis(record, np.array([exact, *drawn[["value", *charts.END_COLUMNS]].stack()]))
    floors, drawn = drawn[drawn["count"].isna()], drawn.dropna(subset="count")
    sizes, keys = drawn["count"].tolist(), record.head_dim + 1
    x = charts.count_axis("keys kept for each query, r", sizes)
    layers = charts.level(exact, "exact")
    for value, name in zip(floors["value"], floors["series"], strict=True):
        layers += charts.level(value, name)
    if min(sizes) <= keys <= max(sizes):
        layers += charts.upright(keys)
    if keys - 1 in sizes:  # their marks would overlap
        drawn = drawn[drawn["count"] != keys]
    unit = "% wrong" if record.metric == "error" else ""
    drawn = drawn.assign(
        said=words.sentences(
            drawn,
            f"{{series}}, r = {{count:,.0f}}{'' if unit else f', {record.metric}'}",
            unit,
            digits=4,
        )
    )
    marks = look.oracle_marks(drawn)
    marks = {name: marks[name] for name in dict.fromkeys(drawn["series"])}
    return charts.figure([*layers, *charts.curves(drawn, marks, x, y)])


def _metric_axis(record: Record, numbers: np.ndarray) -> alt.Y:
    """Builds the axis of an end metric; for a perplexity it is logarithmic, to show factors."""
    title, better, _ = METRIC_TITLES[record.metric]
    is_log = record.metric == "perplexity"
    ends = np.nanquantile(np.log(numbers) if is_log else numbers, [0, 1])
    ends += 0.08 * np.ptp(ends) * np.array([-1, 1])
    scale: dict[str, Any] = {"type": "log"} if is_log else {"zero": False}
    scale["domain"] = (np.exp(ends) if is_log else ends).tolist()
    axis = alt.Axis(tickCount=6)
    if is_log and np.ptp(ends) > np.log(100):
        steps = [
            step * 10.0**power for power in range(int(ends[1] / np.log(10)) + 1) for step in (1, 3)
        ]
        axis = alt.Axis(values=steps, format=",", labelOverlap="greedy")
    return alt.Y(
        "value:Q",
        title=charts.direction(title, better),
        scale=alt.Scale(**scale, nice=False),
        axis=axis,
    )


def _metric_text(row: Row, digits: int) -> dict[str, str]:
    """Writes a row of the table; a perplexity's interval is that of its ratio to exact."""
    text = (
        {
            "over exact": factor(row["over_exact_value"], 2),
            "95% interval": interval(row["over_exact_low"], row["over_exact_high"], 2, factor),
        }
        if "over_exact_value" in row
        else {"95% interval": interval(row["low"], row["high"], digits)}
    )
    return {
        "method": words.full_name(row["approximation"]),
        "r, keys": f"{row['r']:,}"
        if row["r"]
        else "all"
        if row["approximation"] == "exact"
        else "–",
        "value": number(row["value"], digits),
        **text,
        "output error": short(row["output_error"]),
        "cosine": number(row["cosine"], 3),
        "length": number(row["relative_length"], 2),
    }


def keys_of_layers(record: Record, name: str, setting: str) -> Exhibit:
    """Shows one panel per share of error, one row per layer."""
    errors = record.attention[0].output_error
    names = {None: ALL_LAYERS} | {layer: f"layer {layer}" for layer in range(errors.layers)}
    layers = {
        name: [row for row in errors.keys_needed if row.head is None and row.layer == layer]
        for layer, name in names.items()
    }
    shares = sorted({needed.share for needed in layers[ALL_LAYERS]})
    data = pd.DataFrame(
        {"layer": layer}
        | {
            f"{needed.method}_{needed.share:g}_{name}": getattr(needed, name)
            for needed in counts
            for name in ("keys", "low", "high")
        }
        for layer, counts in layers.items()
    )
    columns = [column for column in data if column.endswith(("keys", "low", "high"))]
    return Exhibit(
        name,
        "Keys that each layer needs",
        "The fewest keys whose relative squared output error, over the layer's heads, is at most "
        "the share in the panel's title.",
        [
            *filter(None, [by_layer(record)]),
            f"Bars: 95% intervals, over windows. {captions.BEST_FOUND}",
            setting,
        ],
        [_layers_panel(layers, share, errors.keys) for share in shares],
        Table(
            data.astype(dict.fromkeys(columns, "Int64")),
            [
                {"layer": layer}
                | {
                    f"{needed.share:.0%} error, {words.ORACLES[needed.method]}": counted(
                        needed.keys, needed.low, needed.high
                    )
                    for needed in counts
                }
                for layer, counts in layers.items()
            ],
        ),
    )


def _layers_panel(
    layers: Mapping[str, Sequence[KeysNeeded]], share: float, keys: int
) -> look.Panel:
    frame = pd.DataFrame(
        {"name": layer, "series": words.ORACLES[needed.method], "value": needed.keys}
        | {"low": needed.low, "high": needed.high}
        for layer, counts in layers.items()
        for needed in counts
        if needed.share == share
    )
    x = charts.count_axis(charts.direction("keys needed", "lower"), [1, keys], "value")
    frame["said"] = words.sentences(frame, "{name}, {series}", " keys", digits=0, text=number)
    return charts.toggled(
        charts.dots(frame, look.ORACLE_MARKS, x, order=list(layers)), title=f"{share:.0%} error"
    )


def error_by_head(record: Record, name: str, setting: str) -> Exhibit:
    size = shown_size(record)
    return _heat_maps(
        name,
        f"Output error of each head with {size} keys",
        f"Relative squared output error with {size} keys, in percent: lower is better, and above "
        "100 an output of zero is nearer.",
        setting,
        [
            {"method": at.method, "layer": at.layer, "head": at.head}
            | {
                name: None if share is None else 100 * share
                for name, share in {"value": at.error, "low": at.low, "high": at.high}.items()
            }
            for at in record.attention[0].output_error.errors
            if at.r == size and at.head is not None
        ],
        two_digits,
        "%",
    )


def keys_by_head(record: Record, name: str, setting: str) -> Exhibit:
    return _heat_maps(
        name,
        f"Keys that each head needs for an output error of {FIVE_PERCENT:.0%}",
        f"The fewest of {record.length:,} keys; lower is better.",
        setting,
        [
            {"method": row.method, "layer": row.layer, "head": row.head}
            | {"value": row.keys, "low": row.low, "high": row.high}
            for row in record.attention[0].output_error.keys_needed
            if row.head is not None and row.share == FIVE_PERCENT
        ],
        whole,
        " keys",
    )


def two_digits(value: float) -> str:
    """Writes a percentage to two significant digits: "35", "3.5", "0.35", "<.01"."""
    return "<.01" if value < 0.01 else f"{float(f'{value:.2g}'):g}"


def _heat_maps(
    name: str,
    title: str,
    caption: str,
    setting: str,
    rows: Sequence[Row],
    text: Callable[[float], str],
    unit: str,
) -> Exhibit:
    frame = pd.DataFrame(rows)
    texts = [NO_COUNT if words.missing(value) else text(value) for value in frame["value"]]
    frame = frame.astype({"value": float}).assign(text=texts)
    return Exhibit(
        name,
        title,
        caption,
        [
            "Both panels have one logarithmic scale of colours, from the first percentile on; the "
            "brighter, the more.",
            captions.BEST_FOUND,
            setting,
        ],
        [
            charts.heat_map(
                frame[frame["method"] == method], words.ORACLES[method], frame["value"], unit
            )
            for method in (OBLIVIOUS, AWARE)
        ],
        Table(
            frame.drop(columns="text"),
            frame[["layer", "head"]]
            .astype(str)
            .assign(
                method=frame["method"].map(words.ORACLES),
                value=texts,
                **{"95% interval": words.intervals(frame, 2)},
            ),
        ),
    )


def head_budgets(record: Record, name: str, setting: str) -> Exhibit | None:
    """Tabulates the end metric with the number of keys that each head needs, in all heads."""
    title, better, digits = METRIC_TITLES[record.metric]
    rows = [
        {"approximation": cell.approximation, **cell.parameters}
        | {name: getattr(cell, name) for name in (*MEASURES[1:], "count")}
        for cell in record.budgets
    ]
    if not rows:
        return None
    return Exhibit(
        name,
        "The end metric with a budget for each head",
        f"Every head keeps the keys that it needs for an output error, all heads at once; "
        f"{charts.direction(title, better)}. Exact attention: "
        f"{number(record.cells[0].value, digits)}.",
        [
            "A window has the budgets of OVO. Alike: every head has the mean of these, rounded up.",
            setting,
        ],
        table=Table(
            rows,
            [
                {
                    "error in each head": f"{row['share']:.0%}",
                    "keys a head": number(row["keys"]),
                    "attention": words.full_name(row["approximation"])
                    + {"own": "", "equal": ", all heads alike"}[row["each"]],
                    "value": number(row["value"], digits),
                    "95% interval": interval(row["low"], row["high"], digits),
                }
                for row in rows
            ],
        ),
    )


def explorer(
    explored: Exploration | None, labels: Mapping[str, str], is_first: bool = False
) -> Exhibit | None:
    """Shows the models with a label, in the order of the labels; None if none was explored.

    `is_first`: they are the first of several trainings.
    """
    if not (selected := explored and explored.labelled(labels)) or not selected.models:
        return None
    first, r = selected.models[0], median_low(selected.sizes)
    errors = first.median_errors(selected.sizes.index(r))
    medians = [
        f"{number(100 * error, 0 if error >= 0.1 else 1)}% for keys {name}"
        for error, name in zip(errors, selected.methods, strict=False)  # older: without the last
    ]
    of_means = (
        kept.mean for model in selected.models for kept in model.heads[0].queries[0].kept[0]
    )
    return Exhibit(
        "explorer",
        "Token by token: which keys each choice keeps",
        "Pick a word to see what its query attends to, the r keys that each choice keeps, and the "
        f"error of its output. With {r} keys the median error in {first.label} is "
        f"{', '.join(medians[:-1])} and {medians[-1]}."
        f"{' Models trained here are from the first training.' if is_first else ''}",
        [
            "A model reads this text alone. Under every token is its weight in hundredths; a "
            f"token without one is not kept, or not seen. {captions.OPTIMAL} {captions.BEST_FOUND}",
            *[MEAN_IS_ONE] * any(mean is not None for mean in of_means),
            "The hardest tokens are, for each head, the query with the largest difference between "
            "the error by weight and the error for the output. An error above 100%, which is that "
            "of an output of zeros, counts as 100%. The page opens on the first of them, which is "
            "not a typical query: the median over all queries is shown next to it.",
            "The address of the page names what is shown, and can be copied.",
        ],
        exploration=selected,
    )


def models(results: Results, machines: Sequence[tuple[str, str]] = ()) -> Exhibit:
    """Shows one row per model: its sizes, its text, and its metric with exact attention.

    `machines` pair the measurements of other sections with their machine.
    """
    records = results.causal_first
    data = pd.DataFrame(
        {name: getattr(record, name) for name in ("model", "kernel", "length", "head_dim")}
        | {"measured_on": captions.measured_on(record), "metric": record.metric}
        for record in records
    )
    settings = pd.DataFrame(results.find(name, "exact") for name in data["model"])
    single = ["value", *words.of_trainings(settings)]
    data[single] = settings[single]
    written = [[number(value) for value in row] for row in data[single].to_numpy()]
    beside = [f" ({', '.join(others)})" if others else "" for _, *others in written]
    exact = [
        f"{metric} {numbers[0]}{' %' if metric == 'error' else ''}{others}"
        for metric, numbers, others in zip(data["metric"], written, beside, strict=True)
    ]
    display = data.drop(columns=["metric", *single]).assign(**{"exact attention": exact})
    display = display.assign(model=data["model"].map(words.plain_text)).rename(
        columns=words.plain_text
    )
    runs = words.grouped(
        (on, measured)
        for measured, on in [*captions.machines([*records, *results.replicates]), *machines]
    )
    devices = {t["trained_on"] for t in results.training.values() if "trained_on" in t}
    read = {on: "; ".join(dict.fromkeys(measured)) for on, measured in runs.items()}
    return Exhibit(
        "models",
        "Models, text and machine",
        " ".join(f"{texts}; {on.partition('; ')[0]}." for on, texts in read.items())
        + captions.seeds(results),
        [
            "Language models are trained with exact attention, then evaluated with the attention "
            "of every layer replaced by an approximation. Numbers called the paper's are those "
            "printed in Value-aware Approximate Attention (Gupta and Berant, 2021); they belong to "
            "larger models trained on other text.",
            *(f"{texts}; {on}" for on, texts in read.items()),
            *(f"Trained on: {device}." for device in sorted(devices)),
            "Every number and picture on this page is written by the report stage of the pipeline "
            "from the records of the evaluation. make repro makes all of them but for the "
            "pretrained decoder (make decoder), caches (make caches), the survey (make survey) and "
            "probed models (python -m pipelines.probe).",
        ],
        table=Table(data, display.astype(str)),
    )
