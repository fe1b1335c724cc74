"""The survey benchmark's report: answers to the claims, tables, figures and a page."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from value_aware_study.reporting import figures
from value_aware_study.reporting.claim import (
    VERDICTS,
    Answer,
    claims_markdown,
    claims_section,
)
from value_aware_study.reporting.distance import distance_figures, distance_table
from value_aware_study.reporting.document import page, sections
from value_aware_study.reporting.figure import Figure
from value_aware_study.reporting.pattern_figure import pattern_figures
from value_aware_study.reporting.records import Record
from value_aware_study.reporting.survey_claims import answers
from value_aware_study.reporting.survey_figures import exponents, time_and_memory
from value_aware_study.reporting.survey_records import FIT_FROM, QUICK, Measurements, frame
from value_aware_study.reporting.table import DASH, Table, number
from value_aware_study.reporting.trained_table import trained_table

__all__ = ["write_survey"]

CLAIMS = "The survey's claims, measured here"
LONG_FROM = 512
FIRST = ("distance_", "patterns_", "trained", "figure_", "growth")
LAST = ("methods", "distance", "cells")
TRAINING = "forward_backward"
PASSES = {"forward": "forward", TRAINING: "forward + backward", "attention": "attention alone"}
TITLES = {
    "forward": "Time of a forward pass (ms)",
    "forward_backward": "Time of forward + backward (ms)",
    "memory": "Peak memory of forward + backward (MiB)",
}


def write_survey(
    record: Mapping[str, Any],
    models: Sequence[Record],
    trained: Sequence[Record],
    folder: Path,
) -> None:
    """Write claims, tables (.csv, .md), figures (.png) and index.html.

    `record` is the benchmark's, `models` those of every method at equal budgets, `trained` those of
    models trained with a method. The same input gives the same bytes.
    """
    measured, folder = Measurements(record), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kind = "GPU" if record["layer"]["device"].startswith("cuda") else "CPU"
    found = answers(measured, f"on this {kind}")
    tables = [distance_table(models), trained_table(trained, models), *_tables(measured)]
    drawn = [*distance_figures(models), *pattern_figures(models), *_figures(measured)]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as temporary:
        made = Path(temporary)
        for table in tables:
            (made / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
            (made / f"{table.name}.md").write_text(table.markdown(), encoding="utf-8")
        for figure in drawn:
            figures.save(figure.chart, made / f"{figure.name}.png")
        claims = claims_markdown(
            CLAIMS, f"{setting(record)} {HOW} {VERDICTS} {_read(record)}", found
        )
        (made / "claims.md").write_text(claims, encoding="utf-8")
        html = page(
            "Every method of the survey, measured side by side", _body(record, found, tables, drawn)
        )
        (made / "index.html").write_text(html, encoding="utf-8")
        for path in sorted(made.iterdir()):
            os.replace(path, folder / path.name)


def setting(record: Mapping[str, Any]) -> str:
    """The layer and the machine in one sentence."""
    layer, run_on = record["layer"], record["run_on"]
    versions = ", ".join(f"{name} {value}" for name, value in sorted(run_on["versions"].items()))
    counted = Measurements(record).counted
    rounds = ", ".join(f"{counted(name)} {title}" for name, title in PASSES.items())
    return (
        f"One pre-norm encoder layer, width {layer['width']}, {layer['heads']} heads, feed-forward "
        f"{layer['feedforward']}, batch {layer['batch']}, {layer['dtype']}, on {layer['device']}; "
        f"{run_on['hardware']}, {layer['threads']} threads; {versions}. Rounds: {rounds}."
    )


RATIOS = (
    "Ratios of times are taken round by round: the median and, in brackets, its 95% interval (sign "
    "test). A finding whose interval holds its threshold is undecided. Memory is measured once."
)
LIMIT = (
    "The survey measured on a GPU (RTX 3090). These verdicts are of a CPU, where other things "
    "cost: they neither confirm nor refute its claims on a GPU."
)
HOW = (
    "Time: median over rounds in which every method runs at every length, in alternating order, "
    "after one round that is not counted; bars are quartiles. Memory: the peak of one pass in a "
    "fresh process, above what it holds with weights and inputs in place."
)


def _body(
    record: Mapping[str, Any],
    found: Sequence[Answer],
    tables: Sequence[Table],
    drawn: Sequence[Figure],
) -> list[str]:
    return [
        f"<p>{escape(setting(record))} {escape(HOW)}</p>",
        claims_section(CLAIMS, f"{VERDICTS} {_read(record)}", found),
        *_ordered(sections(tables, drawn)),
        "<section><h2>Reproduce</h2><pre>make survey</pre></section>",
    ]


def _ordered(parts: Mapping[str, str]) -> list[str]:
    """What the reader came for first, long tables last."""
    first = [name for name in parts if name.startswith(FIRST)]
    middle = [name for name in parts if name not in (*first, *LAST)]
    return [parts[name] for name in (*first, *middle, *(name for name in LAST if name in parts))]


def _read(record: Mapping[str, Any]) -> str:
    """How the claims are to be read."""
    return RATIOS if record["layer"]["device"].startswith("cuda") else f"{LIMIT} {RATIOS}"


def _figures(measured: Measurements) -> list[Figure]:
    lengths = measured.lengths("forward_backward")
    short = [length for length in lengths if length < LONG_FROM]
    long = [length for length in lengths if length >= LONG_FROM]
    about = setting(measured.record)
    dense = "Forward + backward; sorted by time at the longest. Dashed: dense attention."
    return [
        Figure(
            "figure_9",
            f"Memory and time for long sequences ({_listed(long)} tokens), the survey's Figure 9",
            f"{dense} {HOW} {about}",
            time_and_memory(measured, long),
        ),
        Figure(
            "figure_10",
            f"Memory and time for short sequences ({_listed(short)} tokens), the survey's "
            "Figure 10",
            f"{dense} {HOW} {about}",
            time_and_memory(measured, short),
        ),
        Figure(
            "growth",
            f"How cost grows with the length from {FIT_FROM:,} tokens on",
            f"{_fit_caption(measured)} {about}",
            exponents(measured),
        ),
    ]


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths) or "none"


def _fit_caption(measured: Measurements) -> str:
    lengths = [n for n in measured.lengths("attention") if n >= FIT_FROM]
    return (
        "Least squares of log cost on log length over the measured lengths of at least "
        f"{FIT_FROM:,} tokens ({_listed(lengths)} for the attention alone), one forward pass. The "
        "attention alone has no projections and no feed-forward layer, whose cost grows with L "
        "and hides the attention's. Counted: multiply-adds, fitted the same way."
    )


def _tables(measured: Measurements) -> list[Table]:
    times = [_costs(measured, name, name, QUICK) for name in ("forward", TRAINING)]
    memory = _costs(measured, "memory", TRAINING, "peak_mib")
    every = frame(measured.record)
    cells = Table(
        "cells",
        "Every measurement",
        f"Medians and quartiles in ms, peak memory in MiB. {HOW} {setting(measured.record)}",
        every,
        every.groupby(["pass", "length"], sort=False)
        .size()
        .reset_index(name="methods")
        .astype(str),
    )
    return [*times, memory, _exponent_table(measured), _methods_table(measured), cells]


def _costs(measured: Measurements, table: str, name: str, quantity: str) -> Table:
    """Methods by lengths, sorted by the cost at the longest length."""
    lengths = measured.lengths(name)
    rows = {m: measured.by_length(name, m, quantity) for m in measured.record["methods"]}
    order = sorted(rows, key=lambda m: rows[m].get(max(lengths, default=0), float("inf")))
    data = pd.DataFrame({"method": [measured.label(m) for m in order]})
    display = data.copy()
    for length in lengths:
        costs = [rows[m].get(length) for m in order]
        data[str(length)] = costs
        display[f"{length:,}"] = [number(cost) for cost in costs]
    caption = f"{HOW} {_left_out(measured, name)}{setting(measured.record)}"
    return Table(table, TITLES[table], caption, data, display)


def _left_out(measured: Measurements, name: str) -> str:
    """Which cells were not measured, and why."""
    reasons = [
        f"{measured.label(cell['method'])} at {cell['length']:,} tokens ({cell['left_out']})"
        for cell in measured.record["cells"]
        if cell["pass"] == name and "left_out" in cell
    ]
    return f"Left out: {'; '.join(reasons)}. " if reasons else ""


def _exponent_table(measured: Measurements) -> Table:
    lengths = measured.lengths("attention")
    rows = []
    for method, about in measured.record["methods"].items():
        rows.append(
            {
                "method": about["label"],
                "published": about["order"],
                "exponent": about["exponent"],
                "counted": measured.counted_exponent(method, lengths),
                "attention, time": measured.exponent("attention", method, QUICK),
                "attention, memory": measured.exponent("attention", method, "peak_mib"),
                "layer, time": measured.exponent("forward", method, QUICK),
                "fitted on": _listed(
                    [n for n in measured.by_length("attention", method, QUICK) if n >= FIT_FROM]
                ),
            }
        )
    data = pd.DataFrame(rows).sort_values("attention, time", kind="stable")
    fitted = ["counted", "attention, time", "attention, memory", "layer, time"]
    display = data[["method", "published"]].copy()
    for column in fitted:
        display[column] = [number(value, 2) for value in data[column]]
    display["fitted on"] = data["fitted on"]
    caption = f"p of cost ~ L^p. {_fit_caption(measured)} {setting(measured.record)}"
    return Table("exponents", "Cost against length", caption, data, display)


def _methods_table(measured: Measurements) -> Table:
    rows = [
        {
            "method": about["label"],
            "class": about["class"],
            "arguments": _arguments(about),
            "kernel": about["kernel"],
        }
        for about in measured.record["methods"].values()
    ]
    data = pd.DataFrame(rows)
    caption = "Every argument, as it was run; L is the sequence length."
    return Table("methods", "The methods and their settings", caption, data, data)


def _arguments(about: Mapping[str, Any]) -> str:
    given = [f"{name} = {value}" for name, value in about["arguments"].items()]
    given += [f"{name} = {_power(*value)}" for name, value in about["by_length"].items()]
    return ", ".join(given) or DASH


def _power(factor: float, power: float, *most: float) -> str:
    grown = "L" if power == 1 else "√L" if power == 0.5 else f"L^{power:g}"
    value = grown if factor == 1 else f"{factor:g} {grown}"
    return f"min({value}, {most[0]:g})" if most else value
