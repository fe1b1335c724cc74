"""Keys that match in the end metric: SYNTHETIC losses with a known number, and a slow jackknife."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import t as student
from synthetic import AWARE, OBLIVIOUS, probed

from value_aware_attention.records.matching import SLOT, EndMatch, end_matches
from value_aware_attention.records.record import Cell

SIZES = (1, 2, 4, 8, 16, 65)


def cell(method, r, losses, **parameters):
    counts = (10.0,) * len(losses)
    return Cell(
        approximation=method, parameters={"r": r, **parameters}, value=1.0, low=None, high=None,
        count=1, difference=0.0, difference_low=None, difference_high=None,
        unit_totals=tuple(losses), unit_counts=counts,
    )  # fmt: skip


def record(by_weight, aware, metric="perplexity", units=1, method=OBLIVIOUS, **parameters):
    """Holds total losses by weight at `SIZES`, and value-aware ones at some, of equal units."""
    losses = zip(SIZES, by_weight, strict=False)
    cells = [cell(method, r, [loss] * units, **parameters) for r, loss in losses]
    cells += [cell(AWARE, r, [loss] * units) for r, loss in aware.items()]
    return replace(probed(), metric=metric, cells=(probed().cells[0], *cells))


LOSSES = (6.0, 5.0, 4.0, 3.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("loss", "keys"),
    [(5.0, 2.0), (4.5, math.sqrt(8)), (3.25, 2**2.75), (1.5, math.sqrt(16 * 65)), (1.0, 65.0)],
)
def test_losses_are_linear_in_the_logarithm_between_measured_sizes(loss, keys):
    match = end_matches(record(LOSSES, {1: loss}), 1)
    assert match.value == pytest.approx(keys) and match.low is match.high is None
    assert str(match) == f"{keys:.1f}"
    cosine = record([-x for x in LOSSES], {1: -loss}, metric="cosine")
    assert end_matches(cosine, 1).value == pytest.approx(keys)


def test_the_first_number_that_loses_as_little_counts_from_r_to_the_largest_size():
    assert end_matches(record((6, 3, 4, 2, 1, 0), {1: 3.5}), 1).value == pytest.approx(2 ** (5 / 6))
    assert end_matches(record(LOSSES, {4: 5.5}), 4).value == pytest.approx(4)
    beyond = end_matches(record(LOSSES, {4: 0.5}, units=3), 4)
    assert beyond == EndMatch(value=None, low=pytest.approx(65), high=None, most=65)
    assert str(beyond) == "more than 65"


def test_fewer_slots_may_match_and_what_was_not_measured_has_no_count():
    slots = record(LOSSES, {4: 5.0}, method=SLOT, mass="mean_key")
    assert end_matches(slots, 4, by=SLOT).value == pytest.approx(2)
    assert end_matches(slots, 4) is None
    assert end_matches(record(LOSSES, {4: 5.0}), 2) is None
    assert end_matches(record(LOSSES, {4: 5.0}, mass="exact"), 4) is None
    assert end_matches(record(LOSSES, {4: 5.0}, layers="early"), 4) is None
    assert end_matches(record(LOSSES[:1], {1: 5.0}), 1) is None


def crossing(by_weight, target):
    """Reads a number of keys off, one segment after the other."""
    points = [*zip(map(math.log, SIZES), by_weight, strict=True)]
    if points[0][1] <= target:
        return points[0][0]
    for (left, above), (right, below) in pairwise(points):
        if below <= target:
            return left + (right - left) * (above - target) / (above - below)
    return math.inf


@pytest.mark.parametrize("seed", range(10))
def test_the_interval_is_the_jackknife_of_the_logarithm(seed):
    random = np.random.default_rng(seed)
    units, r = 5, int(random.choice([1, 4]))
    by_weight = np.array(LOSSES)[:, None] + 0.3 * random.normal(size=(6, units))
    aware = random.uniform(0.8, 3.5) + 0.3 * random.normal(size=units)
    cells = [cell(OBLIVIOUS, size, row) for size, row in zip(SIZES, by_weight, strict=True)]
    measured = replace(probed(), cells=(probed().cells[0], *cells, cell(AWARE, r, aware)))
    match = end_matches(measured, r)

    def cut(log):
        return min(max(log, math.log(r)), math.log(65))

    whole = crossing(by_weight.mean(axis=1), aware.mean())
    without = [
        crossing(np.delete(by_weight, unit, axis=1).mean(axis=1), np.delete(aware, unit).mean())
        for unit in range(units)
    ]
    middle = fmean(map(cut, without))
    error = math.sqrt((units - 1) / units * sum((cut(log) - middle) ** 2 for log in without))
    margin = student.ppf(0.975, units - 1) * error
    low, high = cut(cut(whole) - margin), whole + margin
    if max(high, *without) > math.log(65):
        high = None
    assert match.value == (pytest.approx(math.exp(whole)) if whole < math.inf else None)
    assert match.low == pytest.approx(math.exp(low))
    assert match.high == (None if high is None else pytest.approx(math.exp(max(high, math.log(r)))))
    assert ("not determined" in str(match)) == (high is None and whole < math.inf)
