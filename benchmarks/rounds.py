"""Paired rounds: everything that is compared is timed in turn, until the comparison is decided."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from value_aware_study.benchmarking.ratio import Ratio

__all__ = ["EQUAL", "Seconds", "in_rounds", "ratio", "seconds", "verdict"]

EQUAL = 1.05
"""Times whose ratio lies between 1 / EQUAL and EQUAL count as equal."""
LEVEL = 0.99
"""Of each of the five looks that can end the rounds, so that a verdict errs in 5% of all cases."""
LOOKS = (8, 16, 32, 64, 128)
Seconds = dict[str, list[float]]


def in_rounds(
    works: Mapping[str, Callable[[], float]],
    pairs: Sequence[tuple[str, str]],
    limit: float,
    least: int = 3,
) -> Seconds:
    """What each work says it took, round by round, after one round that is not counted.

    A round runs all in turn, every other one backwards. After 8, 16, 32, 64 or 128 rounds it is
    enough if `verdict` decides all `pairs`; after `limit` seconds, or 128 rounds, it ends anyway,
    but not before `least` rounds.
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
    """Time over time, paired by the rounds, with its 99% interval."""
    return Ratio.of(spent[ours], spent[theirs], LEVEL)


def verdict(ratio: Ratio) -> str:
    """Whether the first is faster, slower or equal within 5%, or the rounds do not tell."""
    if ratio.side() != "undecided":
        return "faster" if ratio.side() == "below" else "slower"
    equal = ratio.side(1 / EQUAL) == "above" and ratio.side(EQUAL) == "below"
    return "equal" if equal else "undecided"


def seconds(work: Callable[[], object]) -> float:
    """Seconds on the clock that a call takes, the release of its result included."""
    began = perf_counter()
    work()
    return perf_counter() - began
