"""Rounds go on until a comparison is decided; a ratio has an interval."""

from collections.abc import Callable
from itertools import count, cycle, product

import pytest

from benchmarks.ratio import Ratio, median_interval
from benchmarks.rounds import in_rounds, ratio, verdict


@pytest.mark.parametrize("size", [6, 7, 8, 11])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_the_interval_misses_the_median_as_seldom_as_it_says(size: int, level: float) -> None:
    """Misses are counted over all signs of values around a median of 0."""
    sizes = [1.0 + number / 100 for number in range(size)]
    signed = [
        [sign * value for sign, value in zip(signs, sizes, strict=True)]
        for signs in product((-1, 1), repeat=size)
    ]
    intervals = [median_interval(values, level) for values in signed]
    if None in intervals:
        assert 2 * 0.5**size > 1 - level
    else:
        assert sum(not low <= 0 <= high for low, high in intervals) / 2**size <= 1 - level


def test_a_ratio_lies_between_bounds_with_its_whole_interval() -> None:
    half = Ratio.of([0.5] * 6)
    assert (half.median, half.low, half.high) == (0.5, 0.5, 0.5)
    assert half.within(0.4, 0.6) and half.within(0.6, 1.0) is False and str(half) == "0.5"
    noisy = Ratio.of([0.8, 0.9, 0.9, 0.9, 0.9, 1.3])
    assert noisy.within(0.0, 1.0) is None and str(noisy) == "0.9 (0.8 to 1.3)"
    assert Ratio.of([0.5] * 5).within(0.0, 1.0) is None  # too few for an interval


def times(*values: float) -> Callable[[], float]:
    seconds = cycle(values)
    return lambda: next(seconds)


def test_rounds_end_when_all_pairs_are_decided() -> None:
    works = {"ours": times(1.0), "slower": times(2.0), "equal": times(1.0, 1.01)}
    spent = in_rounds(works, [("ours", "slower"), ("ours", "equal")], 60.0)
    assert [len(each) for each in spent.values()] == [8] * 3
    assert verdict(ratio(spent, "ours", "slower")) == "faster"
    assert verdict(ratio(spent, "slower", "ours")) == "slower"
    assert verdict(ratio(spent, "ours", "equal")) == "equal"


def test_rounds_of_an_undecided_pair_end_with_the_time_or_at_the_last_look() -> None:
    works = {"ours": times(1.0, 3.0), "peer": times(2.0)}
    spent = in_rounds(works, [("ours", "peer")], 0.0)
    assert len(spent["ours"]) == 3 and verdict(ratio(spent, "ours", "peer")) == "undecided"
    spent = in_rounds(works, [("ours", "peer")], 60.0)
    assert len(spent["ours"]) == 128 and verdict(ratio(spent, "ours", "peer")) == "undecided"


def test_the_first_round_is_not_counted_and_every_other_runs_backwards() -> None:
    order: list[str] = []
    number = count()

    def noted(name: str) -> Callable[[], float]:
        def work() -> float:
            order.append(name)
            return float(next(number))

        return work

    spent = in_rounds({name: noted(name) for name in "ab"}, [("a", "b")], 0.0)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert spent == {"a": [2.0, 5.0, 6.0], "b": [3.0, 4.0, 7.0]}
