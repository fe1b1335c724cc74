"""Counts the keys that lose as little of the end metric as a few value-aware ones."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from value_aware_attention.measurement.estimate import (
    CONFIDENCE,
    Array,
    Estimate,
    number,
)
from value_aware_attention.measurement.record import AWARE, OBLIVIOUS, Cell, Record

NOT_DETERMINED = "not determined"
"""Stands for the end of an interval beyond all numbers of keys that were measured"""
SLOT = "mean_value_slot"
"""Name of `MeanValueSlot` in records"""


@dataclass(frozen=True, kw_only=True)
class EndMatch(Estimate):
    """A number of keys, between measured ones, with its 95% interval over units.

    None stands for a number or an end beyond `most`, the largest one measured; `low` is None too
    where there is a single unit.
    """

    most: int

    def __str__(self) -> str:
        """Writes "22.1 (20.3 to 23.9)", "more than 65", or "more than 65 (at least 50.3)"."""
        if self.value is None:
            sure = self.low is None or round(self.low, 1) >= self.most
            return f"more than {self.most:,}{'' if sure else f' (at least {number(self.low)})'}"
        if self.low is None:
            return number(self.value)
        high = NOT_DETERMINED if self.high is None else number(self.high)
        return f"{number(self.value)} ({number(self.low)} to {high})"


def end_matches(
    record: Record, r: int, *, by: str = OBLIVIOUS, method: str = AWARE, mass: str = "mean_key"
) -> EndMatch | None:
    """Computes how many keys chosen `by` another rule lose as little as r of `method`, everywhere.

    Everywhere is in all layers at once, and the loss is the end metric's, in nats for a perplexity.
    Between the numbers of keys at which it was measured it is linear in their logarithm; the first
    number that loses as little counts. The interval is the jackknife's, of the logarithm: every
    unit is left out in turn, and Student's t has units - 1 degrees of freedom. Its ends are cut at
    the largest number measured and, by weight, at r, as fewer cannot match r value-aware keys.
    `mass` is that of the slot where `by` is `SLOT`. None where too little was measured.
    """
    targets = [cell for cell in _by_size(record, method, mass) if cell.parameters["r"] == r]
    rivals = sorted(_by_size(record, by, mass), key=lambda cell: int(cell.parameters["r"]))
    if not targets or len(rivals) < 2:
        return None
    sizes = [cell.parameters["r"] for cell in rivals]
    logs, least = np.log(sizes), math.log(r if by == OBLIVIOUS else sizes[0])
    sign = -1.0 if record.metric == "cosine" else 1.0
    sums = sign * np.array([cell.unit_totals for cell in (*rivals, targets[0])])
    units = len(targets[0].unit_counts)
    value = max(_first_enough(logs, sums.sum(axis=1)), least)
    left_out = [_first_enough(logs, others) for others in (sums.sum(axis=1) - sums.T)]
    cut = np.clip(left_out, least, logs[-1])
    if units < 2:
        return EndMatch(value=_keys(value), low=None, high=None, most=sizes[-1])
    error = math.sqrt((units - 1) / units * float(((cut - cut.mean()) ** 2).sum()))
    margin = float(stdtrit(units - 1, (1 + CONFIDENCE) / 2)) * error
    low, high = (min(value, logs[-1]) + way * margin for way in (-1, 1))
    if max(high, *left_out) > logs[-1]:
        high = math.inf
    return EndMatch(
        value=_keys(value), low=_keys(max(low, least)), high=_keys(high), most=sizes[-1]
    )


def _by_size(record: Record, method: str, mass: str) -> list[Cell]:
    """Lists the cells of a method with r keys in every layer."""
    return [
        cell
        for cell in record.cells
        if cell.approximation == method
        and "r" in cell.parameters
        and not {"layers", "sinks"} & set(cell.parameters)
        and cell.parameters.get("mass", mass) == mass
    ]


def _first_enough(logs: Array, losses: Array) -> float:
    """Finds where the losses, of which the last is the target, first fall to it; inf for nowhere.

    Linear between the places in `logs`.
    """
    losses, target = losses[:-1], losses[-1]
    enough = losses <= target
    if not enough.any():
        return math.inf
    place = int(enough.argmax())
    if place == 0:
        return float(logs[0])
    before, after = losses[place - 1], losses[place]
    share = (before - target) / (before - after)
    return float(logs[place - 1] + share * (logs[place] - logs[place - 1]))


def _keys(log: float) -> float | None:
    return math.exp(log) if math.isfinite(log) else None
