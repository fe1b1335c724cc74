"""The survey benchmark's report: answers to the claims, tables, figures and a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.reporting.captions import versions
from value_aware_study.reporting.claim import VERDICTS, Claims
from value_aware_study.reporting.distance import distance_figures, distance_table
from value_aware_study.reporting.document import Part, Text, write_page
from value_aware_study.reporting.pattern_figure import pattern_figures
from value_aware_study.reporting.results import Results
from value_aware_study.reporting.survey_claims import answers
from value_aware_study.reporting.survey_figures import exponents, time_and_memory
from value_aware_study.reporting.survey_records import FIT_FROM, QUICK, Measurements
from value_aware_study.reporting.table import DASH, Figure, Table, number
from value_aware_study.reporting.trained_table import trained_table

__all__ = ["write_survey"]

CLAIMS = "The survey's claims, measured here"
LONG_FROM = 512
TRAINING = "forward_backward"
PASSES = {"forward": "forward", TRAINING: "forward + backward", "attention": "attention alone"}
TITLES = {
    "forward": "Time of a forward pass (ms)",
    "forward_backward": "Time of forward + backward (ms)",
    "memory": "Peak memory of forward + backward (MiB)",
}


def write_survey(
    benchmark: Mapping[str, Any], records: Sequence[Record], folder: Path | str
) -> None:
    """Write claims, tables (.csv, .md), figures (.png) and index.html.

    `records` are those of every method at equal budgets, and of models trained with a method.
    """
    measured = Measurements(benchmark)
    trained = [record for record in records if record.trained_with]
    results = Results.of(record for record in records if not record.trained_with)
    about = f"{setting(measured)} {HOW}"
    claims = Claims(CLAIMS, f"{VERDICTS} {_read(measured)}", answers(measured, measured.where))
    parts: list[Part] = [
        Text(paragraphs=[about]),
        claims,
        trained_table(trained, results.records),
        *distance_figures(results),
        *pattern_figures(results.records),
        *_figures(measured),
        *(_costs(measured, name, name, QUICK) for name in ("forward", TRAINING)),
        _costs(measured, "memory", TRAINING, "peak_mib"),
        _exponent_table(measured),
        _methods_table(measured),
        distance_table(results),
        _cells_table(measured),
        Text("Reproduce", html="<pre>make survey</pre>"),
    ]
    title = "Every method of the survey, measured side by side"
    write_page(folder, title, parts, {"claims.md": claims.markdown(about)})


def setting(measured: Measurements) -> str:
    """The layer and the machine in one sentence."""
    layer, run_on = measured.record["layer"], measured.record["run_on"]
    rounds = ", ".join(f"{measured.counted(name)} {title}" for name, title in PASSES.items())
    return (
        f"One pre-norm encoder layer, width {layer['width']}, {layer['heads']} heads, feed-forward "
        f"{layer['feedforward']}, batch {layer['batch']}, {layer['dtype']}, on {layer['device']}; "
        f"{run_on['hardware']}, {layer['threads']} threads; {versions(run_on['versions'])}. "
        f"Rounds: {rounds}."
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


def _read(measured: Measurements) -> str:
    """How the claims are to be read."""
    return RATIOS if measured.on_gpu else f"{LIMIT} {RATIOS}"


def _figures(measured: Measurements) -> list[Figure]:
    lengths = measured.lengths("forward_backward")
    short = [length for length in lengths if length < LONG_FROM]
    long = [length for length in lengths if length >= LONG_FROM]
    about = setting(measured)
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


def _cells_table(measured: Measurements) -> Table:
    every = measured.frame
    counts = every.groupby(["pass", "length"], sort=False).size().reset_index(name="methods")
    caption = f"Medians and quartiles in ms, peak memory in MiB. {HOW} {setting(measured)}"
    return Table("cells", "Every measurement", caption, every, counts.astype(str))


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
    caption = f"{HOW} {_left_out(measured, name)}{setting(measured)}"
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
    caption = f"p of cost ~ L^p. {_fit_caption(measured)} {setting(measured)}"
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
