"""The record, tables, figures and page of a probe: what a user's own model needs."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from value_aware_attention.measurement.layer_errors import AWARE, OBLIVIOUS, SHARES
from value_aware_attention.probe.lines import match
from value_aware_study.reporting import captions, figures
from value_aware_study.reporting.document import page, sections
from value_aware_study.reporting.probe_figures import CAUSAL, INTERVALS, probe_figures
from value_aware_study.reporting.records import method_label
from value_aware_study.reporting.table import Table, interval, number

__all__ = ["write_probe"]

Record = Mapping[str, Any]
ORDER = (
    *("end_metric_table", "end_metric", "layers", "keys_needed"),
    *("output_error", "heat_map", "keys_by_head", "matching_keys"),
)
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
    folder, record = Path(folder), _plain(record)
    setting = _setting(record)
    tables = [_end_metric(record, setting), _needed(record, setting), _matching(record, setting)]
    drawn = probe_figures(record, setting)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as temporary:
        made = Path(temporary)
        text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False)
        (made / "record.json").write_text(text + "\n", encoding="utf-8")
        for table in tables:
            (made / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
            (made / f"{table.name}.md").write_text(table.markdown(), encoding="utf-8")
        _heads(record).to_csv(made / "heads.csv", index=False, float_format="%.8g")
        for figure in drawn:
            figures.save(figure.chart, made / f"{figure.name}.png")
        known = sections(tables, drawn)
        body = [_introduction(record), *(known[name] for name in ORDER), HEADS]
        html = page(f"{record['model']}: how many keys its attention needs", body)
        (made / "index.html").write_text(html, encoding="utf-8")
        for path in sorted(made.iterdir()):
            os.replace(path, folder / path.name)


HEADS = (
    "<section><h2>Every head</h2><p><a href='heads.csv'>heads.csv</a> has one line for each layer, "
    "head, method and size; <a href='record.json'>record.json</a> has everything.</p></section>"
)


def _plain(value: Any) -> Any:
    """The record with None where a number is not known, so that it is valid JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _setting(record: Record) -> str:
    text, run_on = record["text"], record.get("run_on", {})
    installed = run_on.get("versions", {})
    versions = ", ".join(f"{name} {installed[name]}" for name in sorted(installed))
    parts = [
        f"{record['model']} ({record['architecture']}, {record['layers']} layers of "
        f"{record['heads']} heads of {record['head_dim']} dimensions), {record['kernel']} kernel",
        f"{text['windows']} of {text['available_windows']} windows of {record['length']} tokens, "
        f"{text['share_read']:.0%} of the text's {text['tokens']:,} tokens",
        f"{record['rows']} queries of each head and window; OVA's search: {record['search']}",
    ]
    if run_on:
        parts.append(f"hardware: {run_on['hardware']}; {versions}")
    return "; ".join(parts) + "."


def _introduction(record: Record) -> str:
    notes = [_setting(record), captions.OPTIMAL, captions.BEST_FOUND]
    notes += [CAUSAL] if record["causal"] else []
    notes += [POST_HOC] if record["post_hoc"] else []
    notes += [
        f"Head size + 1 = {record['head_dim'] + 1} value-aware keys are exact (Carathéodory)."
    ]
    return f"<p><strong>{escape(record['headline'])}</strong></p>\n<p>{escape(' '.join(notes))}</p>"


def _end_metric(record: Record, setting: str) -> Table:
    """The end metric of every method at every size."""
    exact, *cells = record["cells"]
    digits = DIGITS[record["metric"]]
    names = ("value", "low", "high", "difference", "difference_low", "difference_high", "count")
    rows = [
        {"approximation": c["approximation"], "r": c["parameters"].get("r")}
        | {name: c[name] for name in names}
        for c in (exact, *cells)
    ]
    data = pd.DataFrame(rows)
    data["r"] = data["r"].astype("Int64")
    display = pd.DataFrame({"r, keys": [f"{size:,}" for size in record["sizes"]]})
    for method in dict.fromkeys(cell["approximation"] for cell in cells):
        found = {c["parameters"]["r"]: c for c in cells if c["approximation"] == method}
        display[method_label(method)] = [
            f"{number(found[r]['value'], digits)} "
            f"({interval(found[r]['low'], found[r]['high'], digits)})"
            for r in record["sizes"]
        ]
    metric = {"error": "Error on hidden tokens (%)", "perplexity": "Perplexity"}
    title = metric.get(record["metric"], "Cosine to the exact hidden states")
    caption = (
        f"Exact attention: {number(exact['value'], digits)}, over {exact['count']:,} tokens. In "
        f"brackets the paired interval around it. {INTERVALS} {setting}"
    )
    return Table("end_metric_table", title, caption, data, display)


def _needed(record: Record, setting: str) -> Table:
    """The keys that every layer needs."""
    every = record["keys_needed"]
    data = pd.DataFrame(every)
    data["layer"] = ["all" if row["layer"] is None else row["layer"] for row in every]
    for name in ("head", "keys", "low", "high"):
        data[name] = data[name].astype("Int64")
    layers = (*range(record["layers"]), None)
    display = pd.DataFrame({"layer": ["all" if layer is None else str(layer) for layer in layers]})
    rows = (row for row in every if row["head"] is None)
    found = {(row["layer"], row["share"], row["method"]): row for row in rows}
    for share in SHARES:
        for method in (OBLIVIOUS, AWARE):
            display[f"{share:.0%} error, {method_label(method)}"] = [
                _count(found[layer, share, method]) for layer in layers
            ]
    caption = (
        "The fewest keys with which |o − õ|² / |o|², summed over the layer, is at most that. The "
        f"CSV has every head. {INTERVALS} {captions.BEST_FOUND} {setting}"
    )
    return Table("layers", "Keys that each layer needs", caption, data, display)


def _count(row: Record) -> str:
    ends = "" if row["low"] is None else f" ({row['low']:,}–{row['high']:,})"
    return f"{row['keys']:,}{ends}"


def _matching(record: Record, setting: str) -> Table:
    """How many keys chosen by weight have the output error of r value-aware ones."""
    keys = record["output_error"]["keys"]
    error = dict(zip(record["sizes"], record["pooled"][AWARE]["error"], strict=True))
    found = [row for r in record["sizes"] if (row := match(record, r)) is not None]
    columns = ["r", "keys_needed", "low", "high", "keys", "share", "value_aware_error"]
    rows = [
        (m["r"], m["keys"], m["low"], m["high"], keys, m["keys"] / keys, error[m["r"]])
        for m in found
    ]
    data = pd.DataFrame(rows, columns=columns).astype({"low": "Int64", "high": "Int64"})
    display = pd.DataFrame(
        [(f"{m['r']:,}", _count(m), f"{m['keys'] / keys:.0%}", f"{error[m['r']]:.2g}")
         for m in found],
        columns=["r, value-aware keys", f"keys by weight, of {keys:,}", "share",
                 "relative output error"],
    )  # fmt: skip
    title = "Keys chosen by attention weight that match r value-aware keys"
    caption = f"{captions.MATCH} {captions.BEST_FOUND} {setting}"
    return Table("matching_keys", title, caption, data, display)


def _heads(record: Record) -> pd.DataFrame:
    """Every layer, head, method and size: relative output error with its interval."""
    rows = [
        {"layer": layer, "head": head, "method": method, "r": r}
        | {name: ends[name][layer][head][at] for name in ("error", "low", "high")}
        for method, ends in record["by_head"].items()
        for layer, heads in enumerate(ends["error"])
        for head in range(len(heads))
        for at, r in enumerate(record["sizes"])
    ]
    return pd.DataFrame(rows)
