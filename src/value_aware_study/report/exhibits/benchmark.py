"""Time and memory of a layer with every method: the survey's claims, figures, growth, and tables.

The claims are answered from our measurements alone: two costs of the same rounds are divided, and
a comparison is no firmer than the interval of this ratio.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import linear_regression
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.estimate import DASH, number
from value_aware_study.benchmarking.ratio import Ratio
from value_aware_study.report import charts, look, words
from value_aware_study.report.captions import machine
from value_aware_study.report.claim import VERDICTS, Answer, Finding, decided
from value_aware_study.report.exhibit import Exhibit, Table

FIT_FROM = 2048
"""Tokens from which on cost is fitted against length."""
DENSE = ("eager", "fused")
"""Exact attention; every other method of a record is an efficient one."""
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
EQUAL = 1.25
"""Two costs within this factor of each other count as about equal."""
FLAT = 2.0
"""A cost that grows by less than this over all lengths counts as nearly flat."""
EQUAL_UP_TO = 512
"""Tokens up to which the survey calls dense attention about equal."""
SUFFIXES = {"eager": "", "fused": " (Beside PyTorch's fused dense attention.)"}
RATIOS = (
    "Ratios of times are taken round by round: the median and, in brackets, its 95% interval (sign "
    "test). A finding whose interval holds its threshold is open. Memory is measured once."
)
LIMIT = (
    "The survey measured on a GPU (RTX 3090). These verdicts are of a CPU, where other things "
    "cost: they neither confirm nor refute its claims on a GPU."
)

EAGER = DENSE[:1]
Comparisons = Iterator[tuple[str, pd.Series, float, float]]
"""What is divided by what, the ratios by length and round, and the bounds that a claim has"""


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

    def costs(self, name: str, quantity: str) -> pd.DataFrame:
        """Tabulates the costs of a pass by length and round (memory has one), a column a method."""
        rows = [
            {"length": cell["length"], "round": place, "method": cell["method"], "cost": cost}
            for cell in self.record["cells"]
            if cell["pass"] == name and "left_out" not in cell
            for place, cost in enumerate(
                cell["time"]["rounds"] if quantity == QUICK else [cell[quantity]]
            )
            if cost  # a pass that needs no memory has no ratio to another's
        ]
        table = pd.DataFrame(rows, columns=["length", "round", "method", "cost"]).pivot(
            index=["length", "round"], columns="method", values="cost"
        )
        # of a method that claims name and that was not measured, the costs are missing
        named = (*DENSE, "nystrom", "fourier_mixing", "reformer")
        return table.reindex(columns=list(dict.fromkeys([*named, *self.record["methods"]])))

    @property
    def place(self) -> str:
        """Names the limit of a verdict."""
        return "GPU" if self.record["layer"]["device"].startswith("cuda") else "CPU"

    @property
    def how(self) -> str:
        """Says how time and memory were measured."""
        return self.record.get("how", OLDER)

    @property
    def setting(self) -> str:
        """Describes the layer and the rounds in two sentences."""
        layer = self.record["layer"]
        rounds = [
            f"{self.costs(name, QUICK).index.get_level_values('round').nunique()} {title}"
            for name, title in PASSES.items()
        ]
        return (
            f"One pre-norm encoder layer, width {layer['width']}, {layer['heads']} heads, "
            f"feed-forward {layer['feedforward']}, batch {layer['batch']}, {layer['dtype']}, on "
            f"{layer['device']}. Rounds: {', '.join(rounds)}."
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


def grows(exponent: float | None) -> float | None:
    """Drops an exponent below 0: a peak that shrinks with the length is an artefact of the fit."""
    return None if exponent is None or exponent < 0 else exponent


def dense_about_equal(costs: pd.DataFrame, alone: pd.DataFrame, dense: str) -> Comparisons:
    """Divides the cost of dense attention by the median of all other methods', to 512 tokens."""
    ratios = costs[dense] / costs.drop(columns=list(DENSE)).median(axis=1)
    yield "{dense} over the other methods' median", ratios.loc[:EQUAL_UP_TO], 1 / EQUAL, EQUAL


def all_beat_dense(costs: pd.DataFrame, alone: pd.DataFrame, dense: str) -> Comparisons:
    """Divides the cost of every method by dense attention's at the longest length."""
    for method in costs.columns.drop(list(DENSE)):
        ratios = costs[method] / costs[dense]
        yield f"{{{method}}} over {{dense}}", ratios.loc[longest(costs) :], 0.0, 1.0


def linformer_worst(costs: pd.DataFrame, alone: pd.DataFrame, dense: str) -> Comparisons:
    """Divides the growth from 512 tokens on by the largest of the other efficient methods'."""
    growth = grown(costs.drop(columns=list(DENSE)).loc[EQUAL_UP_TO:])
    for method in growth.columns[growth.columns.str.startswith("linformer")]:
        ratios = growth[method] / growth.drop(columns=method).max(axis=1)
        what = (
            f"growth of {{{method}}} from {EQUAL_UP_TO} tokens on, over the largest of the others"
        )
        yield what, ratios.loc[longest(costs) :], 1.0, math.inf


def nystrom_worst_short(costs: pd.DataFrame, alone: pd.DataFrame, dense: str) -> Comparisons:
    """Divides the cost at 128 and 256 tokens by the largest of all other methods'."""
    ratios = costs["nystrom"] / costs.drop(columns="nystrom").max(axis=1)
    yield "{nystrom} over the largest of the others", ratios.loc[128:256], 1.0, math.inf


def fourier_flat(costs: pd.DataFrame, alone: pd.DataFrame, dense: str) -> Comparisons:
    """Computes the growth of the Fourier layer over all lengths, and its lead at each."""
    growth = grown(costs)["fourier_mixing"].loc[longest(costs, 0) :]
    yield f"growth of {{fourier_mixing}} (nearly flat: below {FLAT:g})", growth, 0.0, FLAT
    ratios = costs["fourier_mixing"] / costs.drop(columns="fourier_mixing").min(axis=1)
    yield "{fourier_mixing} over the least of the others", ratios, 0.0, 1.0


def reformer_pays_late(costs: pd.DataFrame, alone: pd.DataFrame, dense: str) -> Comparisons:
    """Divides Reformer's cost by dense attention's: the layer to 2,048 tokens, attention beyond."""
    ratios = (costs["reformer"] / costs[dense]).loc[:FIT_FROM]
    yield "a layer with {reformer} over one with {dense}", ratios, 1.0, math.inf
    ratios = (alone["reformer"] / alone[dense]).loc[longest(alone, FIT_FROM) :]
    yield "{reformer} alone over {dense}", ratios, 0.0, 1.0


def longest(costs: pd.DataFrame, beyond: int = EQUAL_UP_TO) -> int:
    """Returns the longest length beyond some tokens; what was not measured if there is none."""
    return max([beyond + 1, *costs.index.get_level_values("length")])


def grown(costs: pd.DataFrame) -> pd.DataFrame:
    """Divides the costs of later lengths by those of the first, round by round."""
    first = min(costs.index.get_level_values("length"), default=0)
    return (costs / costs.groupby(level="round").transform("first")).loc[first + 1 :]


CLAIMS: Mapping[str, tuple[Callable[..., Comparisons], Sequence[str]]] = {
    "Dense attention performs about like the other methods up to 512 tokens.": (
        dense_about_equal,
        DENSE,
    ),
    "For longer sequences all methods are more efficient than dense attention.": (
        all_beat_dense,
        DENSE,
    ),
    "Linformer does not scale as well as the other efficient methods.": (linformer_worst, EAGER),
    "Nyströmformer is the most inefficient method at 128 and 256 tokens.": (
        nystrom_worst_short,
        EAGER,
    ),
    "FNet is almost independent of the length, and ahead of every other method.": (
        fourier_flat,
        EAGER,
    ),
    "Reformer becomes more efficient only for very long inputs (over 2,048).": (
        reformer_pays_late,
        DENSE,
    ),
}
"""Claim of the survey in our words -> the function that compares, and the dense attentions that are
compared with: eager, which held all weights in the survey, and PyTorch's fused one."""


def answers(measured: Measurements) -> list[Answer]:
    """Answers every claim; one has no findings if its methods or lengths were not measured."""
    return [
        Answer(claim + SUFFIXES[dense], list(findings(measured, compare, dense)))
        for claim, (compare, beside) in CLAIMS.items()
        for dense in beside
    ]


def findings(
    measured: Measurements, compare: Callable[..., Comparisons], dense: str
) -> Iterator[Finding]:
    """Makes a finding of each length's ratio, which a claim has between two bounds."""
    labels = {method: measured.label(method) for method in measured.record["methods"]}
    for quantity, name in {QUICK: "time", SMALL: "peak memory"}.items():
        passes = (measured.costs(name, quantity) for name in (TRAINING, "attention"))
        for what, ratios, low, high in compare(*passes, dense):
            for length, rounds in ratios.dropna().groupby(level="length"):
                ratio = Ratio.of(list(rounds)) if quantity == QUICK else Ratio.exact(*rounds)
                ends = ratio.median, ratio.low, ratio.high
                yield Finding(
                    f"{length:,} tokens {ratio}",
                    ratio.within(low, high),
                    f"{name}, {what.format(**labels, dense=labels[dense])}",
                    "",
                    *ends,
                    "ratio",
                )


def survey_claims(measured: Measurements) -> list[Exhibit]:
    """Shows every claim of the survey with its verdict and counts, then all its comparisons."""
    answered = answers(measured)
    pairs = [(answer.claim, finding) for answer in answered for finding in answer.findings]
    comparisons = pd.DataFrame(
        [(claim, of.what, of.sentence, of.mark) for claim, of in pairs],
        columns=["claim", "compared", "measured", "agrees"],
    )
    rows = pd.DataFrame(
        {
            "claim": [answer.claim for answer in answered],
            "verdict": [answer.verdict for answer in answered],
            "decided for it": [decided(answer.findings) for answer in answered],
            "measured here": ["; ".join(answer.lines()) or "not measured" for answer in answered],
        }
    )
    return [
        Exhibit(
            "survey_claims",
            "The survey's claims, measured here",
            f"Verdicts on this {measured.place}, no firmer than their intervals.",
            [VERDICTS, f"{LIMIT} " * (measured.place == "CPU") + RATIOS, measured.setting],
            table=Table(rows, rows.drop(columns="measured here")),
            listed="The survey's claims",
        ),
        Exhibit(
            "survey_findings",
            "Every comparison behind the survey's verdicts",
            "One length a line: the median of the rounds' ratios, and its interval.",
            table=Table(comparisons, comparisons),
            folded=True,
            listed="Every comparison",
        ),
    ]


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
    dense = values[values["method"] == DENSE[0]]  # dashed for every length, the last one named
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
    times = {method: measured.by_length("attention", method, QUICK) for method in methods}
    rows = [
        {
            "method": about["label"],
            "published": about["order"],
            "exponent": about["exponent"],
            "counted": slope({int(at): count for at, count in about["multiply_adds"].items()}),
            "attention, time": slope(times[method]),
            "attention, memory": grows(slope(measured.by_length("attention", method, SMALL))),
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
