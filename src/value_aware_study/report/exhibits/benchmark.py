"""Time and memory of a layer with every method: figures, growth with the length, and tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import linear_regression
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.estimate import DASH, number
from value_aware_study.benchmarking.ratio import Ratio
from value_aware_study.report.captions import machine
from value_aware_study.report.charts import colour, direction, dots, toggled
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.look import Mark, Panel, ramp
from value_aware_study.report.words import intervals, missing, sentences

FIT_FROM = 2048
"""Tokens from which on cost is fitted against length."""
DENSE = ("eager", "fused")
"""Exact attention; every other method of a record is an efficient one."""
COLUMNS = (
    *("pass", "length", "method", "label", "milliseconds", "low", "high", "passes"),
    *("peak_mib", "left_out"),
)
QUICK = "milliseconds"
TRAINING = "forward_backward"
PASSES = {"forward": "forward", TRAINING: "forward + backward", "attention": "attention alone"}
HOW = (
    "Time: median over rounds in which every method runs at every length, in alternating order, "
    "after one round that is not counted; bars are quartiles. Memory: the peak of one pass in a "
    "fresh process, above what it holds with weights and inputs in place."
)
LONG_FROM = 512
"""Tokens of the shortest sequence in the figure of long ones."""
ROW = 21
PANELS = (
    ("peak_mib", (), "peak memory, MiB"),
    ("milliseconds", ("low", "high"), "time, ms"),
)
"""Columns of a value and of the ends of its interval, if it has one, and the title of its axis."""
MARKS = {
    "time": Mark.of("green"),
    "memory": Mark.of("purple", "triangle-up"),
    "published": Mark.of("grey", "diamond"),
}
FITTED = {"time": "attention, time", "memory": "attention, memory"}
EXPLAINED = (
    "Time may grow faster than the counted multiply-adds, most of all for dense attention: "
    "fetching L² weights from memory is not counted. Random keys compute all pairs and hide the "
    "others where they keep a sixteenth or more of the keys, and gather them beyond, so that their "
    "exponents mix two ways. An exponent of memory far below 1 means that most of the "
    "peak does not grow with the length here: projections, features or landmarks weigh as much."
)
Benchmark = Mapping[str, Any]
"""The record of the benchmark: `cells`, `methods`, `layer` and `run_on`."""


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Divides ours by theirs round by round, with a 95% interval; memory has one round."""
    return Ratio.of(ours, theirs) if len(ours) > 1 else Ratio.exact(ours[0] / theirs[0])


def listed(lengths: Sequence[int]) -> str:
    """Writes "2,048, 4,096"; "none" for none."""
    return ", ".join(f"{length:,}" for length in lengths) or "none"


@dataclass(frozen=True)
class Measurements:
    """Look-ups in a record; `quantity` is "milliseconds" or "peak_mib"."""

    record: Benchmark

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Tabulates passes by length and method; `low` and `high` are quartiles of the time."""
        rows = [
            {**cell, **cell.get("time", {}), "label": self.label(cell["method"])}
            for cell in self.record["cells"]
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    @property
    def on_gpu(self) -> bool:
        return self.record["layer"]["device"].startswith("cuda")

    @property
    def where(self) -> str:
        """Returns the limit of a verdict: "on this CPU"."""
        return f"on this {'GPU' if self.on_gpu else 'CPU'}"

    @property
    def setting(self) -> str:
        """Describes the layer and the rounds in two sentences."""
        layer = self.record["layer"]
        rounds = ", ".join(f"{self.counted(name)} {title}" for name, title in PASSES.items())
        return (
            f"One pre-norm encoder layer, width {layer['width']}, {layer['heads']} heads, "
            f"feed-forward {layer['feedforward']}, batch {layer['batch']}, {layer['dtype']}, on "
            f"{layer['device']}. Rounds: {rounds}."
        )

    @property
    def machine(self) -> tuple[str, str]:
        """Names the measurements and the machine that made them."""
        run_on, threads = self.record["run_on"], self.record["layer"]["threads"]
        on = machine(run_on["hardware"], threads, run_on["versions"])
        return "the survey's time and memory", on

    def label(self, method: str) -> str:
        return self.record["methods"][method]["label"]

    def efficient(self) -> list[str]:
        """Returns every method but exact attention."""
        return [name for name in self.record["methods"] if name not in DENSE]

    def by_length(self, name: str, method: str, quantity: str) -> dict[int, float]:
        """Maps each length to the cost of a pass of a method."""
        rows = self.frame[(self.frame["pass"] == name) & (self.frame["method"] == method)]
        known = rows[rows[quantity].notna()]
        return dict(zip(known["length"], known[quantity], strict=True))

    def lengths(self, name: str) -> list[int]:
        """Returns the lengths of a pass, short ones first."""
        return sorted(set(self.frame[self.frame["pass"] == name]["length"]))

    def rounds(self, name: str, quantity: str) -> dict[int, dict[str, list[float]]]:
        """Maps length -> method -> cost of each round; memory is measured once."""
        found: dict[int, dict[str, list[float]]] = {}
        for cell in self.record["cells"]:
            if cell["pass"] == name and "left_out" not in cell:
                values = cell["time"]["rounds"] if quantity == QUICK else [cell[quantity]]
                found.setdefault(cell["length"], {})[cell["method"]] = values
        return dict(sorted(found.items()))

    def counted(self, name: str) -> int:
        """Counts the rounds in which a pass was timed."""
        timed = [values for costs in self.rounds(name, QUICK).values() for values in costs.values()]
        return max(map(len, timed), default=0)

    def exponent(self, name: str, method: str, quantity: str) -> float | None:
        """Fits p of cost ~ L^p over L >= 2048; None with fewer than two positive costs."""
        values = self.by_length(name, method, quantity)
        long = {length: cost for length, cost in values.items() if length >= FIT_FROM and cost > 0}
        return slope(list(long), list(long.values())) if len(long) > 1 else None

    def counted_exponent(self, method: str, lengths: Sequence[int]) -> float | None:
        """Fits p of the multiply-adds that the method counts for itself."""
        counts = self.record["methods"][method]["multiply_adds"]
        long = [n for n in lengths if n >= FIT_FROM and counts.get(str(n)) is not None]
        return slope(long, [counts[str(n)] for n in long]) if len(long) > 1 else None


def slope(lengths: Sequence[float], costs: Sequence[float]) -> float:
    """Returns the exponent p of cost ~ L^p: least squares of log cost on log length."""
    return linear_regression(list(map(math.log, lengths)), list(map(math.log, costs))).slope


def time_and_memory(measured: Measurements) -> list[Exhibit]:
    """Shows forward + backward at long and at short lengths, each if it was measured."""
    rows = measured.frame
    rows = rows[(rows["pass"] == TRAINING) & rows["milliseconds"].notna()]
    ranges = (
        ("long", "Figure 9", rows[rows["length"] >= LONG_FROM]),
        ("short", "Figure 10", rows[rows["length"] < LONG_FROM]),
    )
    return [
        _of_lengths(measured, name, figure, found) for name, figure, found in ranges if len(found)
    ]


def _of_lengths(measured: Measurements, name: str, figure: str, rows: pd.DataFrame) -> Exhibit:
    lengths = sorted(set(rows["length"]))
    rows = rows.sort_values(["length", "milliseconds"])
    longest = rows[rows["length"] == lengths[-1]]["label"]
    order = list(dict.fromkeys([*longest, *rows["label"]]))
    drawn = rows.rename(columns={"label": "name"}).assign(
        series=[f"L = {length:,}" for length in rows["length"]]
    )
    marks = ramp([f"L = {length:,}" for length in lengths])
    dashed = "Dashed: dense attention at each L, the tokens; a mark to its right costs more."
    return Exhibit(
        f"time_memory_{name}",
        f"Memory and time for {name} sequences",
        f"Forward + backward of one layer, fastest at {lengths[-1]:,} tokens first (the survey's "
        f"{figure}).",
        [f"{dashed} {HOW}", measured.setting],
        [_cost_panel(drawn, marks, order, *panel) for panel in PANELS],
        _cost_table(rows),
    )


def _cost_panel(
    drawn: pd.DataFrame,
    marks: Mapping[str, Mark],
    order: Sequence[str],
    field: str,
    ends: Sequence[str],
    title: str,
) -> Panel:
    columns = {"value": drawn[field], "low": math.nan, "high": math.nan}
    values = drawn[["name", "series", "method"]].assign(**columns)
    if ends:
        values[["low", "high"]] = drawn[[*ends]]
    values["said"] = sentences(values, "{name}, {series}", f" {title.rpartition(' ')[2]}")
    numbers = values[["value", "low", "high"]]
    first, last = numbers.min().min(), numbers.max().max()
    steps = (digit * 10.0**power for power in range(-3, 8) for digit in (1, 2, 5))
    ticks = [step for step in steps if first <= step <= last]
    scale = alt.Scale(type="log", padding=8, nice=False)
    axis = alt.Axis(values=ticks, format="~g", labelOverlap="greedy", labelSeparation=6)
    x = alt.X("value:Q", title=direction(title, "lower"), scale=scale, axis=axis)
    return toggled([*_dense_lines(values, marks), *dots(values, marks, x, order=order)], ROW)


def _dense_lines(values: pd.DataFrame, marks: Mapping[str, Mark]) -> list[alt.Chart]:
    """Draws a dashed line at dense attention's value for every length, the last one named."""
    dense = values[values["method"] == DENSE[0]]
    base = alt.Chart(dense[["name", "series", "value"]]).encode(x="value:Q", color=colour(marks))
    named = alt.Chart(dense.tail(1)[["name", "value"]]).mark_text(
        align="right", baseline="bottom", dx=2, dy=-4, text="dense attention"
    )
    return [base.mark_rule(strokeDash=[5, 4]), named.encode(x="value:Q", y=alt.value(0))]


def _cost_table(rows: pd.DataFrame) -> Table:
    """Tabulates median time with quartiles, and peak memory, by length and method."""
    data = rows[["length", "method", "label", "milliseconds", "low", "high", "peak_mib"]]
    display = pd.DataFrame(
        {
            "tokens": [f"{length:,}" for length in rows["length"]],
            "method": rows["label"],
            "time, ms": [number(value) for value in rows["milliseconds"]],
            "quartiles": intervals(rows),
            "peak memory, MiB": [number(value) for value in rows["peak_mib"]],
        }
    )
    return Table(data, display)


def exponents(measured: Measurements) -> Exhibit | None:
    """Shows exponents of the attention alone; None without a method at two long lengths."""
    data = _exponents(measured)
    fitted = data[data["attention, time"].notna()]
    if fitted.empty:
        return None
    return Exhibit(
        "exponents",
        "How cost grows with the length",
        f"The exponent p of cost ~ L^p from {FIT_FROM:,} tokens on, beside the published one.",
        [fit_note(measured), EXPLAINED, measured.setting],
        [_exponents_panel(fitted)],
        _exponents_table(data),
    )


def fit_note(measured: Measurements) -> str:
    """Says which costs were fitted on which lengths."""
    lengths = [n for n in measured.lengths("attention") if n >= FIT_FROM]
    return (
        "Least squares of log cost on log length over the measured lengths of at least "
        f"{FIT_FROM:,} tokens ({listed(lengths)} for the attention alone), one forward pass. The "
        "attention alone has no projections and no feed-forward layer, whose cost grows with L "
        "and hides the attention's. Counted: multiply-adds, fitted the same way."
    )


def _exponents(measured: Measurements) -> pd.DataFrame:
    lengths = measured.lengths("attention")
    rows = [
        {
            "method": about["label"],
            "published": about["order"],
            "exponent": about["exponent"],
            "counted": measured.counted_exponent(method, lengths),
            "attention, time": measured.exponent("attention", method, QUICK),
            "attention, memory": measured.exponent("attention", method, "peak_mib"),
            "layer, time": measured.exponent("forward", method, QUICK),
            "fitted on": listed(
                [n for n in measured.by_length("attention", method, QUICK) if n >= FIT_FROM]
            ),
        }
        for method, about in measured.record["methods"].items()
    ]
    columns = ["method", "published", "exponent", "counted", *FITTED.values()]
    frame = pd.DataFrame(rows, columns=[*columns, "layer, time", "fitted on"])
    return frame.sort_values("attention, time", kind="stable", ignore_index=True)


def _exponents_panel(fitted: pd.DataFrame) -> Panel:
    """Draws time and memory as marks, the published exponent as a hollow one."""
    columns = {"exponent": "published"} | {field: name for name, field in FITTED.items()}
    values = fitted[["method", *columns]].rename(columns={"method": "name"} | columns)
    long = values.melt("name", var_name="series").dropna().astype({"value": float})
    long["said"] = sentences(long, "{name}, {series}, exponent")
    ours = long["series"] != "published"
    last = max(2, round(long["value"].max() + 0.5))
    scale = alt.Scale(domain=[min(0.0, float(long["value"].min())) - 0.1, last])
    axis = alt.Axis(values=list(range(last + 1)), format="d")
    title = direction("p of cost ~ L^p, attention alone", "lower")
    x = alt.X("value:Q", title=title, scale=scale, axis=axis)
    layers = dots(long[ours], MARKS, x, long[~ours], order=values["name"].tolist())
    return toggled(layers, ROW)


def _exponents_table(data: pd.DataFrame) -> Table:
    display = data[["method", "published"]].copy()
    for column in ("counted", *FITTED.values(), "layer, time"):
        display[column] = [number(value, 2) for value in data[column]]
    display["fitted on"] = data["fitted on"]
    return Table(data, display)


def cost_tables(measured: Measurements) -> list[Exhibit]:
    """Tabulates the methods' settings, and every measurement."""
    return [_methods(measured), *([_cells(measured)] if len(measured.frame) else [])]


def _methods(measured: Measurements) -> Exhibit:
    rows = [
        {
            "method": about["label"],
            "class": about["class"],
            "arguments": _arguments(about),
            "kernel": about["kernel"],
        }
        for about in measured.record["methods"].values()
    ]
    data = pd.DataFrame(rows, columns=["method", "class", "arguments", "kernel"])
    return Exhibit(
        "methods",
        "The methods and their settings",
        "Every argument, as it was run; L is the sequence length.",
        table=Table(data, data),
    )


def _arguments(about: Mapping[str, Any]) -> str:
    by_length = {name: _power(*value) for name, value in about["by_length"].items()}
    given = about["arguments"] | by_length
    return ", ".join(f"{name} = {value}" for name, value in given.items()) or DASH


def _power(factor: float, power: float, *most: float) -> str:
    grown = "L" if power == 1 else "√L" if power == 0.5 else f"L^{power:g}"
    value = grown if factor == 1 else f"{factor:g} {grown}"
    return f"min({value}, {most[0]:g})" if most else value


def _cells(measured: Measurements) -> Exhibit:
    every = measured.frame
    display = every[["pass", "length", "label"]].rename(columns={"label": "method"})
    for name in (QUICK, "low", "high", "peak_mib"):
        display[name] = [number(value, 2) for value in every[name]]
    display["left out"] = ["" if missing(why) else why for why in every["left_out"]]
    return Exhibit(
        "cells",
        "Every measurement",
        "Medians and quartiles in ms, peak memory in MiB.",
        [HOW],
        table=Table(every, display),
    )
