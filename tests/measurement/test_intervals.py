"""Paired intervals: coverage on known data, agreement with scipy, and keys by weight that match."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from value_aware_attention import records
from value_aware_attention.measurement.layers import (
    keys_needed,
    matching_keys,
    matching_keys_of_queries,
)
from value_aware_attention.measurement.measure import end_metric
from value_aware_attention.measurement.task import UnitSums
from value_aware_attention.records.estimate import Estimate, estimate, ratio_of_sums


def test_with_equal_units_it_is_the_paired_t_interval() -> None:
    exact, method = np.random.default_rng(0).normal(size=(2, 30))
    interval = estimate(4 * (method - exact), np.full(30, 4.0))
    expected = stats.ttest_rel(method, exact).confidence_interval(0.95)
    assert interval.value == pytest.approx((method - exact).mean())
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_it_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(5, 15, size=(40, 400)).astype(float)
    differences = rng.normal(0.3, 1.0, size=(40, 400)) * np.sqrt(counts) + 0.2 * counts
    truth = 0.2 + 0.3 * np.sqrt(np.arange(5, 15)).mean() / np.arange(5, 15).mean()
    _, low, high = ratio_of_sums(differences, counts)
    assert 365 <= ((low <= truth) & (truth <= high)).sum() <= 395


def test_one_unit_has_no_interval() -> None:
    interval = estimate(np.array([1.0]), np.array([4.0]))
    assert interval.value == 0.25 and interval.low is None
    counts = matching_keys(OBLIVIOUS[:1], np.array([0.65]), NORM[:1])
    assert counts == {"keys": 4, "low": None, "high": None}


@pytest.mark.parametrize(
    ("metric", "least", "most"), [("error", 0.0, 100.0), ("cosine", -1.0, 1.0)]
)
def test_no_interval_leaves_the_range_of_its_metric(metric: str, least: float, most: float) -> None:
    counts, few = np.full(3, 10.0), np.array([0.0, 0.0, 2.0])
    for end, inward in ((least, few), (most, -few)):
        exact = UnitSums(end / most * counts, counts)
        measured = end_metric(UnitSums(exact.totals + inward, counts), exact, metric)
        assert least <= measured["low"] < measured["value"] < measured["high"] <= most
        assert end in (measured["low"], measured["high"])
        assert 0.0 in (measured["difference_low"], measured["difference_high"])
    share = estimate(few / 2, np.ones(3), least=0.0, most=1.0)
    assert (share.low, share.high) == (0.0, 1.0)


def test_intervals_of_many_ratios_are_those_of_each_and_shrink_with_the_units() -> None:
    random = np.random.default_rng(0)
    totals, counts = random.normal(size=(6, 3)), random.uniform(1, 2, size=(6, 1))
    middle, low, high = ratio_of_sums(totals, counts)
    for place in range(3):
        ratio = estimate(totals[:, place], counts[:, 0])
        assert (middle[place], low[place], high[place]) == pytest.approx(
            (ratio.value, ratio.low, ratio.high)
        )
    # The same units four times over: half the standard error, and a smaller t.
    again, low_again, high_again = ratio_of_sums(np.tile(totals, (4, 1)), np.tile(counts, (4, 1)))
    np.testing.assert_allclose(again, middle)
    assert ((high_again - low_again) < 0.5 * (high - low)).all()


@pytest.mark.parametrize(
    ("ends", "unit", "text"),
    [
        ((30.5, 30.4, 30.6), "perplexity", "30.50 (30.40 to 30.60)"),
        ((30.5, 30.4, 30.6), "[error]", "30.5 [30.4, 30.6]"),
        ((30.5, None, None), "[cosine]", "30.5000"),
        ((0.01234, 0.0111, 0.0222), "", "0.0123 (0.0111 to 0.0222)"),
        ((123456.0, 99999.0, 2e5), "[perplexity]", "1.2e+05 [99,999.00, 2e+05]"),
        ((None, None, None), "error", "–"),
    ],
)
def test_an_estimate_is_written_in_its_unit(ends: tuple, unit: str, text: str) -> None:
    value, low, high = ends
    assert f"{Estimate(value=value, low=low, high=high):{unit}}" == text


@pytest.mark.slow
def test_records_the_page_and_corpora_are_read_and_written_without_torch() -> None:
    names = [file.stem for file in Path(records.__file__).parent.glob("[a-z]*.py")]
    modules = [f"value_aware_attention.records.{name}" for name in sorted(names)]
    study = ("report.contents", "report.records", "data.corpora")
    modules += [f"value_aware_study.{name}" for name in study]
    heavy = {"torch", "transformers", "datasets"}
    code = f"import sys, {', '.join(modules)}; assert not {heavy} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)


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
