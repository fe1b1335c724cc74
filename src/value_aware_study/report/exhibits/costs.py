"""Tables of the survey benchmark: costs by length, every cell, and the methods' settings."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import DASH, missing, number
from value_aware_study.report.survey_records import HOW, QUICK, TRAINING, Measurements

__all__ = ["exhibit"]

COSTS = (
    ("forward", "Time of a forward pass, ms", "forward", QUICK),
    ("forward_backward", "Time of forward + backward, ms", TRAINING, QUICK),
    ("memory", "Peak memory of forward + backward, MiB", TRAINING, "peak_mib"),
)
"""Name and title of a table, and the pass and the quantity in it."""


def exhibit(measured: Measurements) -> list[Exhibit]:
    """Tables of what was measured, the methods' settings, and every measurement."""
    costs = [_costs(measured, *one) for one in COSTS if measured.lengths(one[2])]
    return [*costs, _methods(measured), *([_cells(measured)] if len(measured.frame) else [])]


def _costs(measured: Measurements, name: str, title: str, step: str, quantity: str) -> Exhibit:
    """Methods by lengths, sorted by the cost at the longest length."""
    lengths = measured.lengths(step)
    rows = {m: measured.by_length(step, m, quantity) for m in measured.record["methods"]}
    order = sorted(rows, key=lambda method: rows[method].get(max(lengths), float("inf")))
    data = pd.DataFrame({"method": [measured.label(method) for method in order]})
    display = data.copy()
    for length in lengths:
        costs = [rows[method].get(length) for method in order]
        data[str(length)] = costs
        display[f"{length:,} tokens"] = [number(cost) for cost in costs]
    notes = [f"{HOW} {_left_out(measured, step)}".strip(), measured.setting]
    caption = "One layer; lower is better, the cheapest at the longest length first."
    return Exhibit(name, title, caption, notes, table=Table(data, display))


def _left_out(measured: Measurements, step: str) -> str:
    """Which cells were not measured, and why."""
    reasons = [
        f"{measured.label(cell['method'])} at {cell['length']:,} tokens ({cell['left_out']})"
        for cell in measured.record["cells"]
        if cell["pass"] == step and "left_out" in cell
    ]
    return f"Left out: {'; '.join(reasons)}." if reasons else ""


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
    caption = "Every argument, as it was run; L is the sequence length."
    title = "The methods and their settings"
    return Exhibit("methods", title, caption, table=Table(data, data))


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
    caption = "Medians and quartiles in ms, peak memory in MiB."
    return Exhibit("cells", "Every measurement", caption, [HOW], table=Table(every, display))
