"""Time and memory of a layer with every method: figures, the growth of cost, and tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import linear_regression
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.records.estimate import DASH, number
from value_aware_study.report import charts, look, words
from value_aware_study.report.captions import machine
from value_aware_study.report.exhibit import Exhibit, Table

FIT_FROM = 2048
"""Tokens from which on cost is fitted against length."""
DENSE = "eager"
"""Exact attention that holds all weights, as the survey's did."""
QUICK, SMALL = "milliseconds", "peak_mib"
TRAINING = "forward_backward"
PASSES = {"forward": "forward", TRAINING: "forward + backward", "attention": "attention alone"}
WRITTEN = {QUICK: "median, ms", SMALL: "peak memory, MiB"}
OLDER = "Time and memory were measured by older code."
ROW = 21
MARKS = {
    "time": look.Mark.of("green"),
    "memory": look.Mark.of("purple", "triangle-up"),
    "published": look.Mark.of("grey", "diamond"),
}
FITTED = {"time": "attention, time", "memory": "attention, memory"}
EXPLAINED = (
    "Time may grow faster than the counted multiply-adds, most of all for dense attention: "
    "fetching L² weights from memory is not counted. Random keys compute all pairs and hide the "
    "others where they keep a sixteenth or more of the keys, and gather them beyond, so that their "
    "exponents mix two ways. An exponent of memory far below 1 means that most of the "
    "peak does not grow with the length here: projections, features or landmarks weigh as much; "
    "one below 0 is left out."
)


@dataclass(frozen=True)
class Measurements:
    """Looks things up in a record, which has `cells`, `methods`, `layer` and `run_on`.

    A quantity is "milliseconds" or "peak_mib".
    """

    record: Mapping[str, Any]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Tabulates passes by length and method; `low` and `high` are quartiles of the time."""
        return pd.DataFrame(
            [
                {**cell, **cell.get("time", {}), "label": self.label(cell["method"])}
                for cell in self.record["cells"]
            ],
            columns=[
                *("pass", "length", "method", "label", "milliseconds", "low", "high", "passes"),
                *("peak_mib", "left_out"),
            ],
        )

    @property
    def how(self) -> str:
        """Says how time and memory were measured."""
        return self.record.get("how", OLDER)

    @property
    def setting(self) -> str:
        """Describes the layer and the rounds in two sentences."""
        layer = self.record["layer"]
        rounds = {
            cell["pass"]: f"{len(cell['time']['rounds'])} {PASSES[cell['pass']]}"
            for cell in self.record["cells"]
            if "time" in cell
        }
        return (
            f"One pre-norm encoder layer, width {layer['width']}, {layer['heads']} heads, "
            f"feed-forward {layer['feedforward']}, batch {layer['batch']}, {layer['dtype']}, on "
            f"{layer['device']}. Rounds: {', '.join(rounds.values())}."
        )

    @property
    def machine(self) -> tuple[str, str]:
        """Names the measurements and the machine that made them."""
        run_on, threads = self.record["run_on"], self.record["layer"]["threads"]
        hardware = machine(run_on["hardware"], threads, run_on["versions"])
        return "the survey's time and memory", hardware

    def label(self, method: str) -> str:
        return self.record["methods"][method]["label"]

    def by_length(self, name: str, method: str, quantity: str) -> dict[int, float]:
        """Maps each length to the cost of a pass of a method."""
        rows = self.frame[(self.frame["pass"] == name) & (self.frame["method"] == method)]
        rows = rows[rows[quantity].notna()]
        return dict(zip(rows["length"], rows[quantity], strict=True))


def slope(costs: Mapping[int, float | None]) -> float | None:
    """Fits p of cost ~ L^p over L >= 2048; None with fewer than two positive costs."""
    logs = {
        math.log(length): math.log(cost)
        for length, cost in costs.items()
        if length >= FIT_FROM and cost
    }
    return linear_regression(list(logs), list(logs.values())).slope if len(logs) > 1 else None


def time_and_memory(measured: Measurements) -> list[Exhibit]:
    """Shows forward + backward at long and at short lengths, each if it was measured."""
    rows = measured.frame
    rows = rows[(rows["pass"] == TRAINING) & rows[QUICK].notna()].sort_values(["length", QUICK])
    is_long = rows["length"] >= 512
    ranges = (("long", "Figure 9", rows[is_long]), ("short", "Figure 10", rows[~is_long]))
    return [
        _of_lengths(measured, name, figure, selected)
        for name, figure, selected in ranges
        if len(selected)
    ]


def _of_lengths(measured: Measurements, name: str, figure: str, rows: pd.DataFrame) -> Exhibit:
    last = rows["length"].iloc[-1]
    drawn = rows.rename(columns={"label": "name"}).assign(
        series=[f"L = {length:,}" for length in rows["length"]]
    )
    dashed = "Dashed: dense attention at each L, the tokens; a mark to its right costs more."
    return Exhibit(
        f"time_memory_{name}",
        f"Memory and time for {name} sequences",
        f"Forward + backward of one layer, fastest at {last:,} tokens first (the survey's "
        f"{figure}).",
        [f"{dashed} {measured.how}", measured.setting],
        [
            _cost_panel(drawn, SMALL, (), "peak memory, MiB"),
            _cost_panel(drawn, QUICK, ("low", "high"), "time, ms"),
        ],
        Table(
            rows[["length", "method", "label", QUICK, "low", "high", SMALL]],
            {
                "tokens": [f"{length:,}" for length in rows["length"]],
                "method": rows["label"],
                "time, ms": [number(value) for value in rows[QUICK]],
                "quartiles": words.intervals(rows),
                "peak memory, MiB": [number(value) for value in rows[SMALL]],
            },
        ),
        listed=f"Cost, {name} sequences",
    )


def _cost_panel(drawn: pd.DataFrame, field: str, ends: Sequence[str], title: str) -> look.Panel:
    """Draws a dot a method and length; methods are in the order of the longest length's times."""
    columns = {"value": drawn[field], "low": math.nan, "high": math.nan}
    values = drawn[["name", "series", "method"]].assign(**columns)
    if ends:
        values[["low", "high"]] = drawn[[*ends]]
    values["said"] = words.sentences(values, "{name}, {series}", f" {title.rpartition(' ')[2]}")
    numbers = values[["value", "low", "high"]]
    first, last = numbers.min().min(), numbers.max().max()
    steps = (digit * 10.0**power for power in range(-3, 8) for digit in (1, 2, 5))
    ticks = [step for step in steps if first <= step <= last]
    x = alt.X(
        "value:Q",
        title=charts.direction(title, "lower"),
        scale=alt.Scale(type="log", padding=8, nice=False),
        axis=alt.Axis(values=ticks, format="~g", labelOverlap="greedy", labelSeparation=6),
    )
    is_longest = drawn["length"] == drawn["length"].max()
    order = list(dict.fromkeys([*drawn["name"][is_longest], *drawn["name"]]))
    marks = look.ramp(list(dict.fromkeys(drawn["series"])))
    dense = values[values["method"] == DENSE]  # dashed for every length, the last one named
    base = alt.Chart(dense[["name", "series", "value"]]).encode(
        x="value:Q", color=charts.colour(marks)
    )
    named = alt.Chart(dense.tail(1)[["name", "value"]]).mark_text(
        align="right", baseline="bottom", dx=2, dy=-4, text="dense attention"
    )
    lines = [base.mark_rule(strokeDash=[5, 4]), named.encode(x="value:Q", y=alt.value(0))]
    return charts.toggled([*lines, *charts.dots(values, marks, x, order=order)], ROW)


def exponents(measured: Measurements) -> Exhibit | None:
    """Shows exponents of the attention alone; None without a method at two long lengths."""
    data = _exponents(measured)
    fitted = data[data["attention, time"].notna()]
    if fitted.empty:
        return None
    rows = measured.frame
    lengths = rows["length"][(rows["pass"] == "attention") & (rows["length"] >= FIT_FROM)]
    display = data[["method", "published"]].copy()
    for column in ("counted", *FITTED.values(), "layer, time"):
        display[column] = [number(value, 2) for value in data[column]]
    display["fitted on"] = data["fitted on"]
    return Exhibit(
        "exponents",
        "How cost grows with the length",
        f"The exponent p of cost ~ L^p from {FIT_FROM:,} tokens on, beside the published one.",
        [
            "Least squares of log cost on log length over the measured lengths of at least "
            f"{FIT_FROM:,} tokens ({_listed(sorted(set(lengths)))} for the attention alone), one "
            "forward pass. The attention alone has no projections and no feed-forward layer, whose "
            "cost grows with L and hides the attention's. Counted: multiply-adds, fitted the same "
            "way.",
            EXPLAINED,
            measured.setting,
        ],
        [_exponents_panel(fitted)],
        Table(data, display),
        listed="Growth of cost",
    )


def _exponents(measured: Measurements) -> pd.DataFrame:
    methods = measured.record["methods"]
    times, memory = (
        {method: measured.by_length("attention", method, quantity) for method in methods}
        for quantity in (QUICK, SMALL)
    )
    rows = [
        {
            "method": about["label"],
            "published": about["order"],
            "exponent": about["exponent"],
            "counted": slope({int(at): count for at, count in about["multiply_adds"].items()}),
            "attention, time": slope(times[method]),
            # a peak that shrinks with the length is an artefact of the fit
            "attention, memory": power
            if (power := slope(memory[method])) is not None and power >= 0
            else None,
            "layer, time": slope(measured.by_length("forward", method, QUICK)),
            "fitted on": _listed([length for length in times[method] if length >= FIT_FROM]),
        }
        for method, about in methods.items()
    ]
    return pd.DataFrame(rows).sort_values("attention, time", kind="stable", ignore_index=True)


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths) or "none"


def _exponents_panel(fitted: pd.DataFrame) -> look.Panel:
    """Draws time and memory as marks, the published exponent as a hollow one."""
    columns = {"exponent": "published"} | {field: name for name, field in FITTED.items()}
    values = fitted[["method", *columns]].rename(columns={"method": "name"} | columns)
    long = values.melt("name", var_name="series").dropna().astype({"value": float})
    long["said"] = words.sentences(long, "{name}, {series}, exponent")
    ours = long["series"] != "published"
    last = max(2, round(long["value"].max() + 0.5))
    x = alt.X(
        "value:Q",
        title=charts.direction("p of cost ~ L^p, attention alone", "lower"),
        scale=alt.Scale(domain=[min(0.0, float(long["value"].min())) - 0.1, last]),
        axis=alt.Axis(values=list(range(last + 1)), format="d"),
    )
    return charts.toggled(
        charts.dots(long[ours], MARKS, x, long[~ours], order=values["name"].tolist()), ROW
    )


def cost_tables(measured: Measurements) -> list[Exhibit]:
    """Tabulates the methods' settings, and every measurement."""
    methods = pd.DataFrame(
        {
            "method": about["label"],
            "class": about["class"],
            "arguments": _arguments(about),
            "kernel": about["kernel"],
        }
        for about in measured.record["methods"].values()
    )
    rows = measured.frame
    display = rows[["length", "label"]].rename(columns={"label": "method"})
    display.insert(0, "pass", rows["pass"].map(PASSES))
    for name in (QUICK, "low", "high", SMALL):
        display[WRITTEN.get(name, name)] = [number(value, 2) for value in rows[name]]
    display["left out"] = ["" if words.missing(why) else why for why in rows["left_out"]]
    return [
        Exhibit(
            "methods",
            "The methods and their settings",
            "Every argument, as it was run; L is the sequence length.",
            table=Table(methods, methods),
            listed="Settings",
        ),
        Exhibit(
            "cells",
            "Every measurement",
            "Medians and quartiles in ms, peak memory in MiB.",
            [measured.how],
            table=Table(rows, display),
            folded=True,
        ),
    ]


def _arguments(about: Mapping[str, Any]) -> str:
    by_length = {name: _power(*value) for name, value in about["by_length"].items()}
    arguments = about["arguments"] | by_length
    return words.plain(", ".join(f"{name} = {value}" for name, value in arguments.items())) or DASH


def _power(factor: float, power: float, *most: float) -> str:
    term = {1: "L", 0.5: "√L"}.get(power, f"L^{power:g}")
    value = term if factor == 1 else f"{factor:g} {term}"
    return f"min({value}, {most[0]:g})" if most else value
