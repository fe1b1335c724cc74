"""Times calls in turn, in paired rounds, until their comparison is decided."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import inf
from time import perf_counter
from typing import Any

from benchmarks.ratio import Ratio

EQUAL = 1.05
"""Largest ratio of two times that count as equal; the smallest is 1 / EQUAL."""
LEVEL = 0.99
"""Of each interval at the five `LOOKS`, so that a verdict errs in 5% of all comparisons."""
LOOKS = (8, 16, 32, 64, 128)
"""Numbers of rounds after which the comparison may be decided and the rounds end."""
Seconds = dict[str, list[float]]


def in_rounds(
    works: Mapping[str, Callable[[], float]],
    pairs: Sequence[tuple[str, str]],
    limit: float,
    least: int = 3,
) -> Seconds:
    """Returns the seconds of each call, round by round, after one round that is not counted.

    A round runs all calls in turn, every second round in reverse. Rounds end after one of `LOOKS`
    if `verdict` then decides all `pairs`, after `limit` seconds and at least `least` rounds, or
    after the last of `LOOKS`.
    """
    for work in works.values():
        work()
    spent: Seconds = {name: [] for name in works}
    began = perf_counter()
    for number in range(1, LOOKS[-1] + 1):
        for name in works if number % 2 else reversed(works):
            spent[name].append(works[name]())
        if number in LOOKS and all(verdict(ratio(spent, *pair)) != "undecided" for pair in pairs):
            break
        if number >= least and perf_counter() - began > limit:
            break
    return spent


def ratio(spent: Seconds, ours: str, theirs: str) -> Ratio:
    """Returns the ratio of two times, paired by round, with its 99% interval."""
    return Ratio.of([a / b for a, b in zip(spent[ours], spent[theirs], strict=True)], LEVEL)


def verdict(ratio: Ratio) -> str:
    """Returns "faster", "slower", "equal" (within 5%), or "undecided" by these rounds."""
    bounds = {"faster": (0.0, 1.0), "slower": (1.0, inf), "equal": (1 / EQUAL, EQUAL)}
    return next((name for name in bounds if ratio.within(*bounds[name])), "undecided")


def cells(*ratios: Mapping[str, Any]) -> list[str]:
    """Returns table cells of a record's ratios, each with its verdict, and the rounds."""
    measured = [Ratio(**ratio) for ratio in ratios]
    pairs = [(str(ratio), verdict(ratio)) for ratio in measured]
    return [*chain.from_iterable(pairs), str(measured[0].rounds)]


def seconds(work: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    """Times a call, by default in wall-clock time; its result is released."""
    began = clock()
    work()
    return clock() - began
