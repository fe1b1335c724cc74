"""Counts the keys that lose as little of the end metric as a few value-aware ones."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from value_aware_attention.records.estimate import CONFIDENCE, Array, Estimate, number
from value_aware_attention.records.record import AWARE, OBLIVIOUS, Cell, Record

NOT_DETERMINED = "not determined"
"""Stands for an end of an interval beyond all measured numbers of keys"""
SLOT = "mean_value_slot"
"""Name of `MeanValueSlot` in records"""


@dataclass(frozen=True, kw_only=True)
class EndMatch(Estimate):
    """A number of keys, between measured ones, with its 95% interval over units.

    None stands for a number or an end beyond `most`, the largest measured number, and for the ends
    of a single unit's interval.
    """

    most: int

    def __str__(self) -> str:
        """Writes "22.1 (20.3 to 23.9)", "22.1 (20.3 to not determined)" or "more than 65"."""
        if self.value is None:
            return f"more than {self.most:,}"
        if self.low is None:
            return number(self.value)
        high = NOT_DETERMINED if self.high is None else number(self.high)
        return f"{number(self.value)} ({number(self.low)} to {high})"


def whole_cells(record: Record) -> list[Cell]:
    """Lists the cells with r keys in every layer, without slots of exact mass."""
    return [
        cell
        for cell in record.cells
        if "r" in cell.parameters
        and "layers" not in cell.parameters
        and cell.parameters.get("mass") != "exact"
    ]


def end_matches(record: Record, r: int, *, by: str = OBLIVIOUS) -> EndMatch | None:
    """Computes how many keys of the choice `by` lose as little of the end metric as r value-aware.

    All layers have that many keys at once; the loss of a perplexity is in nats. Between measured
    numbers of keys the loss is linear in their logarithm; the first number with as little loss
    counts. The interval is a jackknife of the logarithm over units, with Student's t of units - 1
    degrees of freedom. It is cut at the largest measured number and, by weight, at r: fewer cannot
    match r value-aware keys. None if too little was measured.
    """
    cells = whole_cells(record)
    targets = [c for c in cells if c.approximation == AWARE and c.parameters["r"] == r]
    rivals = {c.parameters["r"]: c for c in cells if c.approximation == by}
    if not targets or len(rivals) < 2:
        return None
    sizes = sorted(rivals)
    logs, least = np.log(sizes), math.log(r if by == OBLIVIOUS else sizes[0])
    units = np.array([cell.unit_totals for cell in (*(rivals[size] for size in sizes), targets[0])])
    sums = (units if record.metric != "cosine" else -units).T
    value = max(_first_enough(logs, sums.sum(axis=0)), least)
    left_out = np.array([_first_enough(logs, rest) for rest in sums.sum(axis=0) - sums])
    spread = math.sqrt(len(sums) - 1) * np.clip(left_out, least, logs[-1]).std()
    margin = stdtrit(len(sums) - 1, (1 + CONFIDENCE) / 2) * spread
    low, high = max(min(value, logs[-1]) - margin, least), value + margin
    if max(high, *left_out) > logs[-1]:
        high = math.inf
    return EndMatch(value=_keys(value), low=_keys(low), high=_keys(high), most=sizes[-1])


def _first_enough(logs: Array, losses: Array) -> float:
    """Finds where losses first fall to the last one, linear between `logs`; inf if nowhere."""
    enough = np.flatnonzero(losses[:-1] <= losses[-1])
    if not len(enough):
        return math.inf
    around = slice(max(enough[0] - 1, 0), enough[0] + 1)
    return float(np.interp(losses[-1], losses[:-1][around][::-1], logs[around][::-1]))


def _keys(log: float) -> float | None:
    return math.exp(log) if math.isfinite(log) else None
