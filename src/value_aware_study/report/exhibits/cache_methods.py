"""What every cache method costs each model on queries that it has not observed."""

from collections.abc import Sequence
from math import ceil, floor, log10

import altair as alt
import numpy as np
import pandas as pd

from value_aware_attention.measurement.cache_record import CacheCell, CacheRecord, Estimate
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import interval, number
from value_aware_study.report.look import Mark, Panel, direction, dots, toggled

__all__ = ["answers", "by_text", "distance", "every_cell", "gaps", "keys_of", "label", "sharpness"]

LABELS = {
    "random": "random",
    "recent": "recent (StreamingLLM)",
    "key_norm": "key norm",
    "key_diff": "KeyDiff",
    "expected_attention": "ExpectedAttention",
    "observed_attention": "mean attention (TOVA, H2O)",
    "snapkv": "SnapKV",
    "largest_attention": "largest attention (KVzip)",
    "critical_values": "CriticalKV",
    "leave_one_out": "leave-one-out (DropKV)",
    "value_aware": "value-aware",
    "value_aware_fast": "value-aware, fast search",
    "value_aware_best": "value-aware, best search",
    "attention_matching": "attention matching, its own keys",
    "leave_one_out_refitted": "attention matching, DropKV's keys",
    "value_aware_refitted": "value-aware, refitted",
}
"""What the methods of conf/caches.yaml are called; others by their own names."""
FLOOR = 1e-6
"""Errors below it are drawn there."""
MARKS = {
    "hindsight (oracle)": Mark.of("grey", "cross"),
    "last": Mark.of("blue"),
    "noncausal": Mark.of("vermillion", "square"),
    "repeat": Mark.of("green", "diamond"),
    "nothing": Mark.of("purple", "triangle-up"),
}

ORACLE = "hindsight (oracle)"
END = {"kl": "KL, milli-nats", "cosine_distance": "1 − cos"}
"""The distance from the exact model's output, of decoders and of encoders"""
MEANING = (
    "Error: mean over layers of sum ‖o − õ‖² / sum ‖o‖² over heads and the exact model's queries "
    "after the prefix (of an encoder: those not observed). In parentheses the distance of the "
    "model's output from the exact one's with the method in all layers: KL of the next token in "
    "milli-nats (of an encoder 1 − cosine, × 1000). Equal r for all; sinks and recent keys are "
    "counted in r."
)
OBSERVED = (
    "Observed: last = the last queries of the prefix; noncausal = queries of the whole prefix, all "
    "of which see all of it; repeat = those of the prefix read once more; hindsight = the served "
    "queries themselves, an oracle. Nothing: the method looks at no query."
)
OWN = {"accuracy": "share right", "nats_to_bayes": "nats above Bayes"}
"""What tasks measure, and what it is called"""
EXACT = "exact model"
GAPS = ("criterion", "information", "sharing", "weights")


def keys_of(record: CacheRecord) -> int:
    """Counts the keys that are chosen from."""
    return record.prefix or record.length


def shown(observed: str) -> str:
    return ORACLE if observed == "hindsight" else observed


def label(method: str) -> str:
    return LABELS.get(method, method)


def distance(cell: CacheCell) -> Estimate:
    """Returns the cell's distance from the exact model's output."""
    return next(cell.ends[name] for name in END if name in cell.ends)


def by_text(records: Sequence[CacheRecord]) -> list[Exhibit]:
    """Lists one table a share of keys: methods by texts."""
    parts = sorted({keys_of(r) // cell.r for r in records for cell in r.cells}, reverse=True)
    return [_of_part(records, part) for part in parts]


def _of_part(records: Sequence[CacheRecord], part: int) -> Exhibit:
    found = {
        (cell.method, shown(cell.observed), record.task): cell
        for record in records
        for cell in record.cells
        if keys_of(record) // cell.r == part
    }
    tasks = list(dict.fromkeys(task for *_, task in found))
    rows = list(dict.fromkeys((method, observed) for method, observed, _ in found))
    rows.sort(key=lambda row: row[1] == ORACLE)
    data = pd.DataFrame(rows, columns=["method", "observed"])
    display = data.assign(method=data["method"].map(label))
    for task in tasks:
        cells = [found.get((*row, task)) for row in rows]
        data[f"{task} error"] = [cell.error.value if cell else None for cell in cells]
        data[f"{task} distance"] = [distance(cell).value if cell else None for cell in cells]
        display[task] = [_text(cell) if cell else "–" for cell in cells]
    units = "; ".join(f"{r.task}: {r.units} texts from {len(set(r.seeds))} draws" for r in records)
    return Exhibit(
        f"cache_methods_{part}",
        f"Caches that keep one key of {part}: error and distance of the model's output",
        "Error of the outputs of queries that were not observed; in parentheses KL in milli-nats.",
        [MEANING, OBSERVED, f"{units}."],
        [_panel(record, part) for record in records],
        Table(data, display),
        choices=tasks,
    )


def _panel(record: CacheRecord, part: int) -> Panel:
    """Draws every method's error on one model and its texts, a mark a way to observe."""
    frame = pd.DataFrame(
        {"name": label(cell.method), "series": shown(cell.observed), "value": cell.error.value,
         "low": cell.error.low, "high": cell.error.high}
        for cell in record.cells if keys_of(record) // cell.r == part
    )  # fmt: skip
    numbers = ["value", "low", "high"]
    frame[numbers] = frame[numbers].astype(float).clip(FLOOR)
    used = {name: mark for name, mark in MARKS.items() if name in set(frame["series"])}
    order = (
        frame.assign(log=np.log(frame["value"])).groupby("name")["log"].mean().sort_values().index
    )
    dots_of = dots(frame, used, _axis(frame[numbers]), order=order.tolist())
    return toggled(dots_of).properties(title=record.task)


def _axis(numbers: pd.DataFrame) -> alt.X:
    """A logarithmic axis that ends at the numbers, labelled at round ones."""
    low, high = float(numbers.min().min()) / 1.1, float(numbers.max().max()) * 1.1
    digits = (1, 2, 5) if high > 10 * low else range(1, 10)
    steps = [
        float(f"{digit}e{power}")
        for power in range(floor(log10(low)), ceil(log10(high)))
        for digit in digits
    ]
    title = direction("relative squared output error", "lower")
    axis = alt.Axis(values=[step for step in steps if low < step < high], format="~g")
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    return alt.X("value:Q", title=title, scale=scale, axis=axis)


def _text(cell: CacheCell) -> str:
    far = distance(cell).value
    error = "–" if cell.error.value is None else number(cell.error.value, 4)
    return error if far is None else f"{error} ({number(1e3 * far, 1)})"


def answers(records: Sequence[CacheRecord]) -> Exhibit | None:
    """What each task itself measures: right answers, or how far the predictions are from Bayes."""
    tasks = [(r, name) for r in records for name in OWN if name in r.exact]
    if not tasks:
        return None
    found = {
        (label(cell.method), shown(cell.observed), record.task, cell.r): cell.ends[name]
        for record, name in tasks
        for cell in record.cells
    }
    rows = [(EXACT, ""), *dict.fromkeys(key[:2] for key in found)]
    rows.sort(key=lambda row: row[1] == ORACLE)
    data = pd.DataFrame(rows, columns=["method", "observed"])
    display = data.copy()
    for record, name in tasks:
        for r in sorted({cell.r for cell in record.cells}):
            column = f"{record.task} r = {r}: {OWN[name]}"
            exact = {(EXACT, ""): record.exact[name]}
            values = [(exact.get(row) or found.get((*row, record.task, r))) for row in rows]
            data[column] = [one and one.value for one in values]
            display[column] = ["–" if one is None else number(one.value, 3) for one in values]
    return Exhibit(
        "cache_answers",
        "What a compressed cache leaves of the answers",
        "Queries after the prefix, with the method in all layers; means over texts.",
        [
            "Recall and copying: the share of right answers (of recall those keys that were not "
            "asked before). Markov: nats above the predictions of Bayes. A trained model without "
            "the method is the first row.",
            OBSERVED,
        ],
        table=Table(data, display),
    )


def every_cell(records: Sequence[CacheRecord]) -> Exhibit:
    """Everything that was measured of every method, with intervals and the cost of choosing."""
    rows = [
        {"texts": record.task, "keys": keys_of(record), "r": cell.r, "method": cell.method,
         "observed": shown(cell.observed), "measure": name, "value": one.value, "low": one.low,
         "high": one.high, **_of_draws(record, cell, name),
         "multiply-adds": cell.multiply_adds, "seconds": cell.seconds}
        for record in records
        for cell in record.cells
        for name, one in {"error": cell.error, **cell.ends}.items()
    ]  # fmt: skip
    data = pd.DataFrame(rows)
    display = data[["texts", "keys", "r", "method", "observed", "measure"]].astype(str)
    display["method"] = display["method"].map(label)
    display["value"] = [number(value, 4) for value in data["value"].astype(float)]
    display["95% interval"] = [
        interval(*ends, 4, number) for ends in zip(data["low"], data["high"], strict=True)
    ]
    display["milliseconds"] = [number(1e3 * x, 2) for x in data["seconds"]]
    return Exhibit(
        "cache_cells",
        "Every measure of every cache method",
        "With its interval over texts; milliseconds of one choice for a key-value head.",
        [MEANING, OBSERVED],
        table=Table(data, display),
        folded=True,
    )


def _of_draws(record: CacheRecord, cell: CacheCell, name: str) -> dict[str, float]:
    """The lowest and highest mean of a draw."""
    means = pd.Series(cell.by_unit[name]).groupby(list(record.seeds)).mean()
    return {"lowest draw": means.min(), "highest draw": means.max()}


def gaps(records: Sequence[CacheRecord]) -> Exhibit | None:
    """What a method loses in four factors, pooled over layers and heads."""
    rows = [
        {"texts": record.task, "r": gap.r, "method": gap.method, "observed": shown(gap.observed)}
        | {name: getattr(gap, name) for name in GAPS}
        for record in records
        for gap in record.gaps
        if gap.layer is None
    ]
    if not rows:
        return None
    head = ["texts", "r", "method", "observed"]
    given = pd.DataFrame(rows)
    data, display = given[head].copy(), given[head].astype(str)
    display["method"] = display["method"].map(label)
    for name in GAPS:
        for end in ("value", "low", "high"):
            column = name if end == "value" else f"{name} {end}"
            data[column] = [getattr(one, end) for one in given[name]]
        display[name] = [
            "–" if one.value is None
            else f"{number(one.value, 2)} ({interval(one.low, one.high, 2, number)})"
            for one in given[name]
        ]  # fmt: skip
    return Exhibit(
        "cache_gaps",
        "What a cache method loses, and which of four things it is",
        "Ratios of errors on served queries; 1 = nothing is lost.",
        [
            "Criterion: the method over the best set found on the same observed queries (below 1, "
            "where a set fitted to few queries carries over less). Information: that over the best "
            "set found on the served queries themselves. Sharing: that over a set for each served "
            "query alone. Weights: the best set on the served queries over the same with refitted "
            "biases and values. Best sets are best found, not proved.",
            OBSERVED,
        ],
        table=Table(data, display),
    )


def sharpness(records: Sequence[CacheRecord]) -> Exhibit:
    """How sharp each head of each model is: the mean largest weight of served queries."""
    rows = [
        {"texts": record.task, "layer": layer, "head": head, "largest weight": weight}
        for record in records
        for layer, heads in enumerate(record.sharpest)
        for head, weight in enumerate(heads)
    ]
    data = pd.DataFrame(rows)
    display = data[["texts", "layer", "head"]].astype(str)
    display["largest weight"] = [number(weight, 2) for weight in data["largest weight"]]
    return Exhibit(
        "cache_sharpness",
        "How sharp the heads are whose caches were measured",
        "Mean largest attention weight of the served queries, by layer and query head.",
        [],
        table=Table(data, display),
        folded=True,
    )
