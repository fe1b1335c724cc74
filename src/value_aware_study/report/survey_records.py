"""The survey benchmark's record: times and memory by method and length, and fitted exponents."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import linear_regression
from typing import Any

import pandas as pd

from value_aware_study.benchmarking.ratio import Ratio
from value_aware_study.report.captions import machine

__all__ = [
    "DENSE",
    "FIT_FROM",
    "HOW",
    "QUICK",
    "TRAINING",
    "Measurements",
    "listed",
    "paired",
    "summary",
]

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
Benchmark = Mapping[str, Any]
"""What the benchmark writes: `cells`, `methods`, `layer` and `run_on`."""


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours / theirs round by round with its 95% interval; of memory, measured once, the ratio."""
    return Ratio.of(ours, theirs) if len(ours) > 1 else Ratio.exact(ours[0] / theirs[0])


def listed(lengths: Sequence[int]) -> str:
    """ "2,048, 4,096"; "none" for none."""
    return ", ".join(f"{length:,}" for length in lengths) or "none"


def summary(record: Benchmark) -> dict[str, float]:
    """One number a method: milliseconds of forward + backward at the longest length measured."""
    values: dict[str, float] = {}
    for cell in record["cells"]:
        if cell["pass"] == TRAINING and "time" in cell:
            values[cell["method"]] = cell["time"]["milliseconds"]
    return values


@dataclass(frozen=True)
class Measurements:
    """Look-ups in a record; `quantity` is "milliseconds" or "peak_mib"."""

    record: Benchmark

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per pass, length and method; quartiles of the time as `low` and `high`."""
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
        """What verdicts are limited to."""
        return f"on this {'GPU' if self.on_gpu else 'CPU'}"

    @property
    def setting(self) -> str:
        """The layer and the rounds in two sentences."""
        layer = self.record["layer"]
        rounds = ", ".join(f"{self.counted(name)} {title}" for name, title in PASSES.items())
        return (
            f"One pre-norm encoder layer, width {layer['width']}, {layer['heads']} heads, "
            f"feed-forward {layer['feedforward']}, batch {layer['batch']}, {layer['dtype']}, on "
            f"{layer['device']}. Rounds: {rounds}."
        )

    @property
    def machine(self) -> tuple[str, str]:
        """That time and memory were measured, and on what."""
        run_on, threads = self.record["run_on"], self.record["layer"]["threads"]
        on = machine(run_on["hardware"], threads, run_on["versions"])
        return "the survey's time and memory", on

    def label(self, method: str) -> str:
        return self.record["methods"][method]["label"]

    def efficient(self) -> list[str]:
        """Every method but exact attention."""
        return [name for name in self.record["methods"] if name not in DENSE]

    def by_length(self, name: str, method: str, quantity: str) -> dict[int, float]:
        """What a pass of a method took, for every length it was measured at."""
        rows = self.frame[(self.frame["pass"] == name) & (self.frame["method"] == method)]
        known = rows[rows[quantity].notna()]
        return dict(zip(known["length"], known[quantity], strict=True))

    def lengths(self, name: str) -> list[int]:
        """The lengths of a pass, short ones first."""
        return sorted(set(self.frame[self.frame["pass"] == name]["length"]))

    def rounds(self, name: str, quantity: str) -> dict[int, dict[str, list[float]]]:
        """Length -> method -> what each round took; of memory, measured once, the one value."""
        found: dict[int, dict[str, list[float]]] = {}
        for cell in self.record["cells"]:
            if cell["pass"] == name and "left_out" not in cell:
                values = cell["time"]["rounds"] if quantity == QUICK else [cell[quantity]]
                found.setdefault(cell["length"], {})[cell["method"]] = values
        return dict(sorted(found.items()))

    def counted(self, name: str) -> int:
        """Rounds in which a pass was timed."""
        timed = [values for costs in self.rounds(name, QUICK).values() for values in costs.values()]
        return max(map(len, timed), default=0)

    def exponent(self, name: str, method: str, quantity: str) -> float | None:
        """p of cost ~ L^p over L >= 2048; None with fewer than two lengths, or nothing used."""
        values = self.by_length(name, method, quantity)
        long = {length: cost for length, cost in values.items() if length >= FIT_FROM and cost > 0}
        return slope(list(long), list(long.values())) if len(long) > 1 else None

    def counted_exponent(self, method: str, lengths: Sequence[int]) -> float | None:
        """The same of the multiply-adds that the method counts for itself."""
        counts = self.record["methods"][method]["multiply_adds"]
        long = [n for n in lengths if n >= FIT_FROM and counts.get(str(n)) is not None]
        return slope(long, [counts[str(n)] for n in long]) if len(long) > 1 else None


def slope(lengths: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent p of cost ~ L^p: least squares of log cost on log length."""
    return linear_regression(list(map(math.log, lengths)), list(map(math.log, costs))).slope
