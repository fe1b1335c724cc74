"""The loss of every cache method on queries that it has not observed, and its gaps."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import ceil, floor, log10
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from value_aware_attention.measurement.cache_record import CacheCell, CacheGaps, CacheRecord
from value_aware_attention.measurement.record import Estimate, estimate
from value_aware_study.cards import cache_cards
from value_aware_study.report.charts import OUTPUT_ERROR, dots, toggled
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.look import Mark, Panel
from value_aware_study.report.measured import FLOOR
from value_aware_study.report.words import DASH, intervals, number, with_interval

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
"""End metrics of the tasks, with their titles."""
EXACT = "exact model"
GAPS = ("criterion", "information", "sharing", "weights")
COMPARED: dict[str, tuple[Callable[[CacheCell], bool], Callable[[CacheCell], bool]]] = {
    "value-aware / best score": (
        lambda cell: cell.joint and not cell.refits,
        lambda cell: not cell.joint and not cell.refits,
    ),
    "value-aware, refitted / best without refit": (
        lambda cell: cell.joint and cell.refits,
        lambda cell: not cell.refits,
    ),
    "value-aware, refitted / best refit of another set": (
        lambda cell: cell.joint and cell.refits,
        lambda cell: not cell.joint and cell.refits,
    ),
}
"""Numerator and denominator of each ratio; the first method of the numerator counts."""
ORDER = {compared: place for place, compared in enumerate(COMPARED)}


def keys_of(record: CacheRecord) -> int:
    """Counts the keys that are chosen from."""
    return record.prefix or record.length


def shown(one: CacheCell | CacheGaps) -> str:
    """Names the queries that it observed: "last 32"; others are all of the prefix, or so spaced."""
    if one.observed == "last":
        return f"last {one.rows}"
    return ORACLE if one.observed == "hindsight" else one.observed


def label(method: str) -> str:
    """Returns the label of a method's card; of a method without one, its name."""
    card = cache_cards().get(method)
    return card.label if card else method


def distance(cell: CacheCell) -> Estimate:
    """Returns the cell's distance from the exact model's output."""
    return next(cell.ends[name] for name in END if name in cell.ends)


def by_text(records: Sequence[CacheRecord]) -> list[Exhibit]:
    """Lists one table a share of keys: methods by texts."""
    parts = sorted({keys_of(r) // cell.r for r in records for cell in r.cells}, reverse=True)
    return [_of_part(records, part) for part in parts]


def _of_part(records: Sequence[CacheRecord], part: int) -> Exhibit:
    found = {
        (cell.method, shown(cell), record.task): cell
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
        display[task] = [_error_and_distance(cell) if cell else DASH for cell in cells]
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
        {"name": label(cell.method), "series": shown(cell), "value": cell.error.value,
         "low": cell.error.low, "high": cell.error.high}
        for cell in record.cells if keys_of(record) // cell.r == part
    )  # fmt: skip
    numbers = ["value", "low", "high"]
    frame[numbers] = frame[numbers].astype(float).clip(FLOOR)
    used = {name: mark for name, mark in MARKS.items() if name in set(frame["series"])}
    means = frame.assign(log=np.log(frame["value"])).groupby("name")["log"].mean()
    order = means.sort_values().index.tolist()
    drawn = dots(frame, used, _error_axis(frame[numbers]), order=order)
    return toggled(drawn, title=record.task)


def _error_axis(numbers: pd.DataFrame) -> alt.X:
    """Builds a logarithmic axis that ends at the numbers, labelled at round ones."""
    low, high = float(numbers.min().min()) / 1.1, float(numbers.max().max()) * 1.1
    digits = (1, 2, 5) if high > 10 * low else range(1, 10)
    steps = [
        float(f"{digit}e{power}")
        for power in range(floor(log10(low)), ceil(log10(high)))
        for digit in digits
    ]
    axis = alt.Axis(values=[step for step in steps if low < step < high], format="~g")
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    return alt.X("value:Q", title=OUTPUT_ERROR, scale=scale, axis=axis)


def _error_and_distance(cell: CacheCell) -> str:
    far = distance(cell).value
    error = number(cell.error.value, 4)
    return error if far is None else f"{error} ({number(1e3 * far, 1)})"


def answers(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Shows the tasks' own metrics: right answers, or the distance from Bayes' predictions."""
    tasks = [(r, name) for r in records for name in OWN if name in r.exact]
    if not tasks:
        return None
    found = {
        (label(cell.method), shown(cell), record.task, cell.r): cell.ends[name]
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
            display[column] = [number(one and one.value, 3) for one in values]
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
    """Shows every measurement of every method, with its interval and the cost of choosing."""
    rows = [
        {"texts": record.task, "keys": keys_of(record), "r": cell.r, "method": cell.method,
         "observed": shown(cell), "measure": name, "value": one.value, "low": one.low,
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
    display["95% interval"] = intervals(data, 4)
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
    """Returns the lowest and highest mean of a draw."""
    means = pd.Series(cell.by_unit[name]).groupby(list(record.seeds)).mean()
    return {"lowest draw": means.min(), "highest draw": means.max()}


def gaps(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Shows the loss of each method in four factors, pooled over layers and heads."""
    rows = [
        {"texts": record.task, "r": gap.r, "method": gap.method, "observed": shown(gap)}
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
        display[name] = [with_interval(one.value, one.low, one.high, 2) for one in given[name]]
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
    """Shows the mean largest weight of served queries for each head of each model."""
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


def gain(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Compares the joint choice with the best of the others on the same observed queries."""
    rows = [row for record in records for row in _gains(record)]
    if not rows:
        return None
    data = pd.DataFrame(rows).sort_values(
        "compared", key=lambda one: one.map(ORDER.get), kind="stable"
    )
    looks = list(dict.fromkeys(data["observed"]))
    head = ["compared", "texts", "r"]
    groups = data.groupby(head, sort=False)
    wide = pd.DataFrame([names for names, _ in groups], columns=head)
    display = wide.astype(str)
    for look in looks:
        found = [group[group["observed"] == look] for _, group in groups]
        display[look] = [_gain_text(one) for one in found]
        for name in ("error", "error low", "error high", "distance", "below"):
            wide[f"{look} {name}"] = [None if one.empty else one[name].iloc[0] for one in found]
    return Exhibit(
        "cache_gain",
        "What the joint choice gains",
        "Its error over that of the best other method, chosen on the same texts; below 1 it gains.",
        [
            "Ratios of mean errors over the same texts, with 95% intervals from their paired "
            "differences; a gain is firm where the interval lies below 1. The best other method is "
            "the one of least mean error on these very texts, with the same queries observed or "
            "none: a choice after the fact, which favours it. The CSV names it, and has the ratio "
            "of the model's distances (KL; of an encoder 1 − cosine)."
        ],
        table=Table(wide, display),
    )


def _gains(record: CacheRecord) -> Iterator[dict[str, Any]]:
    def place(cell: CacheCell) -> tuple[int, str]:
        return cell.r, cell.observed

    known = (c for c in record.cells if c.error.value is not None and c.observed != "hindsight")
    cells = sorted(known, key=place)
    blind = [cell for cell in cells if cell.observed == "nothing"]
    for (r, observed), group in groupby((c for c in cells if c not in blind), place):
        same = [*group, *(cell for cell in blind if cell.r == r)]
        for compared, (is_above, is_below) in COMPARED.items():
            above = next((cell for cell in same if is_above(cell)), None)
            others = [cell for cell in same if is_below(cell)]
            if above is None or not others:
                continue
            below = min(others, key=lambda cell: cell.error.value or 0.0)
            row = {"texts": record.task, "r": r, "observed": observed, "compared": compared,
                   "below": below.method}  # fmt: skip
            far = next(name for name in END if name in above.ends)
            errors = _ratio(above, below, "error", "error")
            yield row | errors | _ratio(above, below, far, "distance")


def _ratio(above: CacheCell, below: CacheCell, measure: str, name: str) -> dict[str, float | None]:
    units = (np.array(cell.by_unit[measure]) for cell in (above, below))
    found = estimate(*units, least=0.0)
    return {name: found.value, f"{name} low": found.low, f"{name} high": found.high}


def _gain_text(found: pd.DataFrame) -> str:
    if found.empty:
        return DASH
    value, low, high = found[["error", "error low", "error high"]].iloc[0]
    return with_interval(value, low, high, 2)


def agreement(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Ranks methods by output error and by the model's own distance, and compares the two."""
    rows = []
    for record in records:
        for r in sorted({cell.r for cell in record.cells}):
            cells = [cell for cell in record.cells if cell.r == r and cell.error.value is not None]
            if len(cells) > 2:
                errors = [cell.error.value for cell in cells]
                found = spearmanr(errors, [distance(cell).value for cell in cells]).statistic
                row = {"texts": record.task, "r": r, "methods": len(cells)}
                rows.append(row | {"Spearman": float(found)})
    if not rows:
        return None
    data = pd.DataFrame(rows)
    display = data.astype(str).assign(Spearman=[number(one, 2) for one in data["Spearman"]])
    return Exhibit(
        "cache_agreement",
        "Whether the output error ranks methods as the model's output does",
        "Spearman's rank correlation, over methods, of output error and distance; 1 = alike.",
        ["A method counts once for each way to observe queries; hindsight is among them."],
        table=Table(data, display),
        folded=True,
    )
