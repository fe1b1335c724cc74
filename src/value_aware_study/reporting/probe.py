"""The record, tables, figures and page of a probe: what a user's own model needs."""

from pathlib import Path

import pandas as pd

from value_aware_attention.measurement.record import Cell, OutputError, Record
from value_aware_attention.probe.lines import headline
from value_aware_study.report import captions
from value_aware_study.report.formatting import Table, interval, number
from value_aware_study.report.labels import method_label
from value_aware_study.report.measurements import OPTIMAL, of_kernels, sentence, with_ends
from value_aware_study.reporting.document import Part, Text, write_page
from value_aware_study.reporting.measured_report import matching_table, measured_figures
from value_aware_study.reporting.probe_figures import (
    CAUSAL,
    INTERVALS,
    layers_of,
    probe_figures,
    shares_of,
    sizes_of,
)

__all__ = ["write_probe"]

# What the shared figures are called here; the last one only where it was measured.
NAMES = {"output_error": ("output_error", ""), "matching_keys": ("matching", "")}
SKEWNESS_GAP = {"skewness_gap": ("skewness_gap", "")}
DIGITS = {"perplexity": 2, "error": 1, "cosine": 4}
POST_HOC = (
    "The model was trained with another kernel than the one measured (post hoc): exact attention "
    "here is exact attention with that kernel, and the end metric is that of a model that never "
    "met it."
)


def write_probe(record: Record, folder: Path | str) -> None:
    """Write record.json, tables (.csv, .md), heads.csv, figures (.png) and index.html.

    They appear in `folder` only once all of them are written. The same record gives the same bytes.
    """
    setting, measured = _setting(record), of_kernels(record)
    causal = f"{CAUSAL} " if measured[0].output_error.causal else ""
    gaps = SKEWNESS_GAP if any(one.skewness_gap for one in record.attention) else {}
    drawn = {
        figure.name: figure
        for figure in [
            *probe_figures(record, setting),
            *measured_figures(measured, NAMES | gaps, f"{causal}{setting}"),
        ]
    }
    parts: list[Part] = [
        _introduction(record, setting),
        _end_metric(record, setting),
        drawn["end_metric"],
        _needed(record, setting),
        drawn["keys_needed"],
        drawn["output_error"],
        drawn["heat_map"],
        drawn["keys_by_head"],
        matching_table("matching_keys", measured, setting),
        drawn["matching"],
        *(drawn[name] for name in gaps),
        Text("Every head", html=HEADS),
    ]
    heads = _heads(record.attention[0].output_error)
    files = {
        "record.json": record.to_json(),
        "heads.csv": heads.to_csv(index=False, float_format="%.8g"),
    }
    write_page(folder, f"{record.model}: how many keys its attention needs", parts, files)


HEADS = (
    "<p><a href='heads.csv'>heads.csv</a> has one line for each layer, head, method and size; "
    "<a href='record.json'>record.json</a> has everything.</p>"
)


def _setting(record: Record) -> str:
    text, own = record.text, record.attention[0].output_error
    rows = own.rows // (own.heads * own.units)
    parts = [
        f"{record.model} ({record.architecture}, {own.layers} layers of {own.heads} heads of "
        f"{own.head_dim} dimensions), {record.kernel} kernel",
        f"{text.units} of {text.available_units} windows of {record.length} tokens, "
        f"{text.share_read:.0%} of the text's {text.tokens:,} tokens",
        f"{rows} queries of each head and window; OVA's search: {own.search}",
        f"hardware: {record.run_on.hardware}; {captions.versions(record.run_on.versions)}",
    ]
    return "; ".join(parts) + "."


def _introduction(record: Record, setting: str) -> Text:
    own, *others = of_kernels(record)
    notes = [setting, captions.OPTIMAL, captions.BEST_FOUND]
    notes += [CAUSAL] if own.output_error.causal else []
    notes += [POST_HOC] if own.attention.post_hoc else []
    notes += [f"Head size + 1 = {record.head_dim + 1} value-aware keys are exact (Carathéodory)."]
    found = [f"{one.label}: {sentence(one.output_error)}." for one in others]
    return Text(strong=headline(record), paragraphs=[" ".join(notes), *found])


def _end_metric(record: Record, setting: str) -> Table:
    """The end metric of every method at every size."""
    exact, *cells = record.cells
    digits, sizes = DIGITS[record.metric], sizes_of(record)
    names = ("value", "low", "high", "difference", "difference_low", "difference_high", "count")
    rows = [
        {"approximation": cell.approximation, "r": cell.parameters.get("r")}
        | {name: getattr(cell, name) for name in names}
        for cell in record.cells
    ]
    data = pd.DataFrame(rows)
    data["r"] = data["r"].astype("Int64")
    display = pd.DataFrame({"r, keys": [f"{size:,}" for size in sizes]})
    for method in dict.fromkeys(cell.approximation for cell in cells):
        of_method = {c.parameters["r"]: c for c in cells if c.approximation == method}
        display[method_label(method)] = [_value(of_method[r], digits) for r in sizes]
    metric = {"error": "Error on hidden tokens (%)", "perplexity": "Perplexity"}
    title = metric.get(record.metric, "Cosine to the exact hidden states")
    caption = (
        f"Exact attention: {number(exact.value, digits)}, over {exact.count:,} tokens. In "
        f"brackets the paired interval around it. {INTERVALS} {setting}"
    )
    return Table("end_metric_table", title, caption, data, display)


def _value(cell: Cell, digits: int) -> str:
    return f"{number(cell.value, digits)} ({interval(cell.low, cell.high, digits)})"


def _needed(record: Record, setting: str) -> Table:
    """The keys that every layer needs."""
    errors = record.attention[0].output_error
    columns = ["head", "high", "keys", "layer", "low", "method", "share"]
    data = pd.DataFrame([vars(row) for row in errors.keys_needed], columns=columns)
    data["layer"] = ["all" if row.layer is None else row.layer for row in errors.keys_needed]
    for name in ("head", "keys", "low", "high"):
        data[name] = data[name].astype("Int64")
    found = {(row.layer, row.share, row.method): row for row in layers_of(record)}
    layers = (*range(errors.layers), None)
    display = pd.DataFrame({"layer": ["all" if layer is None else str(layer) for layer in layers]})
    for share in shares_of(record):
        for method in OPTIMAL:
            display[f"{share:.0%} error, {method_label(method)}"] = [
                with_ends(found[layer, share, method]) for layer in layers
            ]
    caption = (
        "The fewest keys with which |o − õ|² / |o|², summed over the layer, is at most that. The "
        f"CSV has every head. {INTERVALS} {captions.BEST_FOUND} {setting}"
    )
    return Table("layers", "Keys that each layer needs", caption, data, display)


def _heads(errors: OutputError) -> pd.DataFrame:
    """Every layer, head, method and size: relative output error with its interval."""
    rows = [vars(at) for at in errors.errors if at.head is not None]
    return pd.DataFrame(rows, columns=["layer", "head", "method", "r", "error", "low", "high"])
