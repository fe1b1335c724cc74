"""The number of keys by weight that match value-aware ones, and its interval."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from value_aware_attention.measurement.layers import (
    keys_needed,
    matching_keys,
    matching_keys_of_queries,
)
from value_aware_attention.records.estimate import ratio_of_sums

# Two units of norms 1 and 9 and eight keys: summed, their errors are 9.9, 8.8, 4.7, 3.6, ...
OBLIVIOUS = np.array(
    [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.0], [9.0, 8.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.0]]
)
NORM = np.array([1.0, 9.0])


@pytest.mark.parametrize(
    ("aware", "needed"), [([0.8, 6.0], 3), ([0.3, 4.4], 3), ([0.0, 0.7], 8), ([0.7, 4.0], 3)]
)
def test_the_match_is_the_first_size_with_at_most_the_summed_error(
    aware: list[float], needed: int
) -> None:
    assert matching_keys(OBLIVIOUS, np.array(aware), NORM)["keys"] == needed


def test_errors_are_summed_and_not_divided_unit_by_unit() -> None:
    """A mean of ratios would ask for all keys, for the unit of small norm alone."""
    oblivious = np.array([[0.9, 0.9, 0.0], [9.0, 1.0, 0.0]])
    aware, norm = np.array([0.1, 4.0]), np.array([1.0, 9.0])
    assert keys_needed((oblivious / norm[:, None]).mean(axis=0), (aware / norm).mean()) == 3
    assert matching_keys(oblivious, aware, norm)["keys"] == 2


def test_all_keys_suffice_whatever_rounding_left_of_their_error() -> None:
    rough = OBLIVIOUS.copy()
    rough[:, -1] = 1e-12
    assert matching_keys(rough, np.zeros(2), NORM)["keys"] == 8


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 6), st.integers(1, 12), st.randoms())
def test_the_interval_holds_the_sizes_whose_difference_may_be_zero(
    units: int, keys: int, random: object
) -> None:
    generator = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    oblivious = np.sort(generator.uniform(size=(units, keys)), axis=1)[:, ::-1]
    oblivious[:, -1] = 0.0
    aware, norm = generator.uniform(0, 0.5, size=units), generator.uniform(1, 2, size=units)
    counts = matching_keys(oblivious, aware, norm)
    assert counts["low"] <= counts["keys"] <= counts["high"] <= keys
    _, low, high = ratio_of_sums(oblivious - aware[:, None], norm[:, None])
    for size in range(1, keys + 1):
        if size < counts["low"]:
            assert low[size - 1] > 0  # more error than the value-aware keys leave, for certain
        if size < counts["high"]:
            assert high[size - 1] > 0


def test_a_single_unit_has_a_match_without_an_interval() -> None:
    counts = matching_keys(OBLIVIOUS[:1], np.array([0.65]), NORM[:1])
    assert counts == {"keys": 4, "low": None, "high": None}


def test_a_query_matches_within_the_keys_it_sees() -> None:
    oblivious = np.array([[0.9, 0.5, 0.1, 0.0], [0.9, 1e-9, 1e-9, 1e-9], [0.2, 0.1, 0.0, 0.0]])
    aware, visible = np.array([0.3, 0.0, 0.2]), np.array([4, 2, 4])
    assert matching_keys_of_queries(oblivious, aware, visible).tolist() == [3, 2, 1]


@settings(max_examples=100, deadline=None)
@given(
    curve=arrays(float, st.integers(1, 9), elements=st.floats(0, 2)), share=st.floats(0.001, 1.5)
)
def test_keys_needed_is_the_first_size_that_is_close_enough(
    curve: np.ndarray, share: float
) -> None:
    count = keys_needed(curve, share)
    assert all(curve[size] > share for size in range(count - 1))
    assert curve[count - 1] <= share or count == len(curve)
