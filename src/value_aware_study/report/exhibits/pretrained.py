"""Pretrained models with few keys in every layer, next to the best rules that ignore the input.

A record is one model on one text at one length; a row of the frame is one of its cells.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import altair as alt
import numpy as np
import pandas as pd

from value_aware_attention.named_models import named_models, origin
from value_aware_attention.records.estimate import in_unit, number, ratio_of_sums, short
from value_aware_attention.records.headline import exact_ratio
from value_aware_attention.records.matching import SLOT
from value_aware_attention.records.record import (
    AWARE,
    OBLIVIOUS,
    WITH_MEAN,
    Cell,
    Record,
)
from value_aware_study.report import captions, charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import DIRECTION_COLUMNS, FLOOR, Results, Row

FOUR = 4
"""Keys in every layer, where rules are compared at one number of them"""
MEAN_KEY, EXACT_MASS = {"mass": "mean_key"}, {"mass": "exact"}
FIGURE_ROWS: dict[str, tuple[str, Row]] = {
    "chosen for the output (OVA)": (AWARE, {"r": FOUR}),
    "for the output, the mean one of them": (WITH_MEAN, {"r": FOUR, "mean": True}),
    "3 by weight + mean slot, mass of the mean key": (SLOT, {"r": FOUR, **MEAN_KEY}),
    "3 by weight + mean slot, exact mass": (SLOT, {"r": FOUR, **EXACT_MASS}),
    "chosen by weight (OVO)": (OBLIVIOUS, {"r": FOUR}),
    "first 4 tokens + window of 12 (16 keys)": ("sliding_window", {"r": 16, "sinks": 4}),
    "mean of all values, no key": (SLOT, {"r": 1, **MEAN_KEY}),
    "attention switched off": ("zero_output", {}),
}
"""Rules compared with `FOUR` keys, and floors, with their settings"""
SLOT_ROWS: list[tuple[str, Row]] = [(SLOT, {"r": FOUR, **mass}) for mass in (MEAN_KEY, EXACT_MASS)]
CORRECTIONS = {
    "OVO's keys, best weights": ("oblivious_keys_optimal_weights", {"r": FOUR}),
    "OVA's keys, attention's weights": ("value_aware_keys_attention_weights", {"r": FOUR}),
    "OVO, not renormalised": ("unrenormalised_keys", {"r": FOUR}),
    **{name: rule for name, rule in FIGURE_ROWS.items() if rule in SLOT_ROWS},
}
"""Rules between the two optimal choices"""
MEAN_ALONE, NO_OUTPUT = [*FIGURE_ROWS.values()][-2:]
CURVES: dict[str, tuple[str, Row, look.Mark]] = {
    words.ORACLES[AWARE]: (AWARE, {}, look.Mark.of("blue", "square")),
    "output, the mean a candidate": (WITH_MEAN, {"mean": True}, look.Mark.of("sky", "square")),
    "by weight + mean slot": (SLOT, MEAN_KEY, look.Mark.of("olive", "diamond")),
    "by weight + mean slot, exact mass": (SLOT, EXACT_MASS, look.Mark.of("olive", "cross")),
    words.ORACLES[OBLIVIOUS]: (OBLIVIOUS, {}, look.Mark.of("vermillion")),
    "first 4 + window": ("sliding_window", {"sinks": 4}, look.Mark.of("green", "triangle-up")),
}
CURVE_MARKS = {name: mark for name, (*_, mark) in CURVES.items()}
HEADINGS = {
    "name": "model and text",
    "series": "keys",
    "interval": "95% interval",
    "kl": "KL, nats",
}
SCORED = (
    "Every layer and head is replaced. Of a decoder's windows the second half is scored, the first "
    "gives context; nothing stands before a window."
)


PAPERS_TEXT = "WikiText-103 test"
TEXT_NOTE = (
    "Pretrained decoders read the paper's text, WikiText-103; the second half of a window is "
    "scored. Their other texts are in the section on pretrained models."
)


def text_name(record: Record) -> str:
    """Names a text by the first words of its description: "WikiText-103 test"."""
    return re.split(r",| of | \(", record.text.description)[0]


def label(record: Record) -> str:
    """Names a record: "SmolLM2-135M-Instruct, novels, 512 tokens"."""
    return ", ".join(
        filter(None, [
            record.model, text_name(record), f"{record.length:,} tokens",
            "BOS first" * record.text.begins_with_bos,
        ])
    )  # fmt: skip


def origins(records: Sequence[Record]) -> str:
    """Describes the weights of the models for which the library has a card."""
    models = {record.model for record in records}
    return " ".join(origin(card) for card in named_models().values() if card["model"] in models)


def beside(results: Results) -> Results:
    """Adds the decoders on the paper's text, a model per length, with settings of r and mean."""
    decoders = [
        replace(
            record,
            model=f"{record.model}, {record.length:,} tokens",
            scale="",
            cells=tuple(
                cell
                for cell in record.cells
                if {name for name, value in cell.parameters.items() if value} <= {"r", "mean"}
            ),
        )
        for record in results.pretrained
        if record.metric == "perplexity" and text_name(record) == PAPERS_TEXT
    ]
    return replace(results, records=[*results.records, *decoders])


def find(record: Record, rule: tuple[str, Row]) -> Cell | None:
    """Finds the cell of a setting; None if it was not measured."""
    cells = (cell for cell in record.cells if (cell.approximation, cell.parameters) == rule)
    return next(cells, None)


def row_of(record: Record, cell: Cell) -> Row:
    """Tabulates a cell: a perplexity and its paired interval over exact attention's."""
    told = exact_ratio(record, cell) if record.metric == "perplexity" else cell
    error, kl = cell.error, cell.predictions.get("kl")
    return {
        "model": record.model, "text": text_name(record), "length": record.length,
        "method": cell.approximation,
        "setting": ", ".join(f"{key} = {value}" for key, value in cell.parameters.items()),
        "metric": record.metric,
        "value": told.value, "low": told.low, "high": told.high,
        "kl": kl and kl.value, "kl_low": kl and kl.low, "kl_high": kl and kl.high,
        "same_top_token": kl and cell.predictions["same_top_token"].value,
        "output_error": error and error.relative,
        **{name: error and getattr(error, name) for name in DIRECTION_COLUMNS},
    }  # fmt: skip


def decoders(records: Sequence[Record]) -> list[Record]:
    """Selects a record of each decoder: the shortest, on the paper's text if there is one."""
    causal = [record for record in records if record.metric == "perplexity"]
    by_model = words.grouped((record.model, record) for record in causal)
    return [
        min(several, key=lambda r: (text_name(r) != PAPERS_TEXT, r.length))
        for several in by_model.values()
    ]


def few_keys(records: Sequence[Record]) -> Exhibit | None:
    """Tabulates the loss with four keys in every layer: optimal choices, slots, floors."""
    shortest = [
        record
        for record in records
        if record.length == min(r.length for r in records if r.model == record.model)
    ]
    rows = [
        {"name": rule, "series": text_name(record), **row_of(record, cell)}
        for record in shortest
        for rule, setting in FIGURE_ROWS.items()
        if (cell := find(record, setting))
    ]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    exact = (
        f"{label(r)}: {in_unit(r.cells[0].value, r.metric)}, {r.text.units} windows"
        for r in shortest
    )
    written = [
        words.times(row["value"]) if row["metric"] == "perplexity" else number(row["value"], 3)
        for row in rows
    ]
    return Exhibit(
        "few_keys",
        finding(shortest),
        f"Attention to {FOUR} keys a query in every layer: perplexity over exact attention's, for "
        "an encoder the cosine of its states to exact ones.",
        [
            f"{captions.BEST_FOUND} {SCORED} A slot holds the mean of the values left out; "
            "its mass comes from the mean of their keys, or is all that is missing. Intervals are "
            f"paired, over windows. Exact attention: {'; '.join(exact)}.",
            *searched(shortest),
        ],
        table=Table(
            data,
            {
                "model and text": data["model"] + ", " + data["text"],
                "keys": data["name"],
                "over exact, or cosine": written,
                "95% interval": words.intervals(data, 2),
            },
            grouped=True,
        ),
        listed=f"{FOUR} keys in every layer",
    )


def searched(records: Sequence[Record]) -> list[str]:
    """Reports how far the search for value-aware keys is from the best; [] if not measured."""
    worst: dict[int, float] = {}
    for gap in (gap for record in records for gap in record.search_gaps):
        worst[gap.r] = max(gap.excess, worst.get(gap.r, 0.0))
    if not worst:
        return []
    told = " and ".join(f"{100 * excess:.1f}% at r = {r}" for r, excess in worst.items())
    return [
        "The search leaves at most this much more squared output error than the best search, which "
        f"tries all pairs at r = 2: {told}."
    ]


def finding(records: Sequence[Record]) -> str:
    """Writes the finding on all decoders and their texts, as a title."""
    decoders = [record for record in records if record.metric == "perplexity"]
    names = list(dict.fromkeys(record.model for record in decoders))
    ratios = []
    rules: list[tuple[str, Row]] = [(AWARE, {"r": FOUR}), SLOT_ROWS[0], (OBLIVIOUS, {"r": FOUR})]
    for rule in rules:
        cells = [(record, find(record, rule)) for record in decoders]
        values = [row_of(record, cell)["value"] for record, cell in cells if cell]
        ends = (
            dict.fromkeys(words.times(end) for end in (min(values), max(values))) if values else {}
        )
        ratios.append(" to ".join(ends))
    if not all(ratios):
        return f"{FOUR} keys in every layer of a pretrained model"
    aware, slot, oblivious = ratios
    named = names[0] if len(names) == 1 else f"{len(names)} decoders"
    return (
        f"{named} with {FOUR} keys in every layer: perplexity {aware} of exact "
        f"attention's with keys chosen for the output, {oblivious} by weight, {slot} by weight "
        f"with a slot for the rest"
    )


def curve_rows(record: Record) -> Iterator[Row]:
    """Tabulates the cells of each rule with a curve, at every number of keys."""
    for series, (name, others, _) in CURVES.items():
        for cell in record.cells:
            rest = {key: x for key, x in cell.parameters.items() if key != "r"}
            if cell.approximation == name and rest == others:
                row = {"name": label(record), "series": series, "count": cell.parameters["r"]}
                yield row | row_of(record, cell)


def predictions(records: Sequence[Record]) -> Exhibit | None:
    """Shows KL from the exact prediction against the number of keys, for all texts and lengths."""
    rows = [row for record in records for row in curve_rows(record) if row["kl"] is not None]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    choices = data["name"].unique().tolist()
    return Exhibit(
        "predictions",
        "What a decoder predicts with r keys in every layer",
        "KL of the exact model's prediction from the approximate one, a token: lower is better.",
        [f"{SCORED} {origins(records)} Bars: 95% intervals; below {FLOOR:g} a KL is drawn there."],
        [_curve_panel(data[data["name"] == name], name) for name in choices],
        Table(
            data,
            data[["name", "series"]]
            .assign(
                r=data["count"].astype(str),
                kl=data["kl"].map(short),
                interval=words.intervals(data, 3, short, ("kl_low", "kl_high")),
                **{"same top token": [f"{share:.1%}" for share in data["same_top_token"]]},
            )
            .rename(columns=HEADINGS),
            grouped=True,
        ),
        choices=choices,
        listed="Predictions",
    )


def _curve_panel(data: pd.DataFrame, title: str) -> look.Panel:
    kl = data[["kl", "kl_low", "kl_high"]].clip(lower=FLOOR).to_numpy().T
    drawn = data[["series", "count"]].assign(value=kl[0], low=kl[1], high=kl[2])
    x = charts.count_axis("keys or slots kept for each query, r", drawn["count"].tolist())
    y = charts.powers(alt.Y, "value", "KL from exact, nats", drawn["value"].tolist())
    return charts.figure(charts.curves(drawn, CURVE_MARKS, x, y), title)


def every_setting(records: Sequence[Record]) -> Exhibit:
    """Tabulates all cells of all records."""
    data = pd.DataFrame(
        {"weights": weights, **row_of(replace(other, text=record.text), cell)}
        for record in records
        for weights, others in (("trained", [record]), ("random", record.controls))
        for other in others
        for cell in other.cells
    )
    written = {name: data[name].map(short) for name in data.columns[7:]}
    return Exhibit(
        "pretrained_cells",
        "Every cell of the pretrained models",
        "Perplexity over exact attention's (a cosine as it is), with its paired 95% interval. "
        "Random weights: the same network before training, on the first windows, by seed.",
        table=Table(
            data,
            data.astype(str)
            .assign(
                method=data["method"].map(words.method_label),
                setting=data["setting"].map(words.plain_text),
                **written,
            )
            .rename(columns=words.plain_text),
        ),
        folded=True,
        listed="Every cell, pretrained",
    )


def gap_closed(records: Sequence[Record]) -> Exhibit | None:
    """Tabulates the share of the loss gap between the optimal choices that cheap rules close."""
    rows = [row for record in records for row in _shares(record)]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    return Exhibit(
        "gap_closed",
        f"How much of OVA's gain cheap rules recover, with {FOUR} keys",
        "The share of the difference in loss between keys by weight (0%) and keys for the output "
        "(100%) that another rule closes, paired over windows; below 0 it loses more than OVO.",
        [SCORED],
        table=Table(
            data,
            data[["model", "rule"]]
            .assign(
                **{"share of the gap closed, %": [number(x, 0) for x in data["value"]]},
                interval=words.intervals(data, 0),
            )
            .rename(columns=HEADINGS),
            grouped=True,
        ),
        listed="Cheap rules",
    )


def _shares(record: Record) -> Iterator[Row]:
    ends = [find(record, (name, {"r": FOUR})) for name in (OBLIVIOUS, AWARE)]
    for name, rule in CORRECTIONS.items():
        cells = [*ends, find(record, rule)]
        if all(cells):
            worst, best, between = (np.array(cell.unit_totals) for cell in cells if cell)
            share = ratio_of_sums(worst - between, worst - best)
            value, *interval = (100 * float(end) for end in share)
            low, high = sorted(interval)
            yield {"model": label(record), "rule": name, "value": value, "low": low, "high": high}
