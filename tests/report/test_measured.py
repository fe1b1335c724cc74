from dataclasses import replace

import pytest
from synthetic import curve, output_error, probed, without_attention
from synthetic import match as match_of

from value_aware_attention.measurement.headline import match as matching_keys
from value_aware_attention.measurement.headline import matches
from value_aware_study.report.exhibits import layers
from value_aware_study.report.frame import (
    error_rows,
    of_kernels,
    of_models,
)

# Two layers of norms 1 and 9: weighed by them, errors pool to the numbers in the tests.
OBLIVIOUS = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.0], [9.0, 8.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.0]]
AWARE = [[0.8, 0.3, 0.3, 0.0, 0.0], [6.0, 4.4, 2.3, 0.7, 0.0]]


def measured(oblivious=OBLIVIOUS, aware=AWARE, keys=100, sizes=(1, 2)):
    methods = {
        "optimal_v_oblivious": curve(range(1, len(oblivious[0]) + 1), oblivious),
        "optimal_v_aware": curve(range(1, len(aware[0]) + 1), aware),
    }
    matching = [match(layer, r) for layer in (None, 0, 1) for r in sizes]
    return output_error(keys, (1.0, 9.0), methods, matching, head_dim=4)


def match(layer, r):
    """Matches r keys with ten times as many, and one more for each layer."""
    return match_of(layer, r, 10 * r + (layer or 0))


def errors_of(*given, **options):
    return [row["error"] for row in error_rows(*given, **options)]


def test_errors_pool_as_sums_over_the_sum_of_norms():
    pooled = errors_of(measured(), "optimal_v_aware")
    assert pooled == pytest.approx([0.68, 0.47, 0.26, 0.07, 0.0])
    assert errors_of(measured(), "optimal_v_aware", layer=1)[0] == pytest.approx(6 / 9)
    assert [row["r"] for row in error_rows(measured(), "optimal_v_aware")] == [1, 2, 3, 4, 5]


def test_a_match_is_the_records_own_pooled_or_of_a_layer():
    assert matching_keys(measured(), 2).keys == 20 and matching_keys(measured(), 2).low == 19
    assert matching_keys(measured(), 2, layer=1).keys == 21
    assert matching_keys(measured(), 16) is None


def test_the_sentence_has_the_counts_with_their_intervals_and_the_median_query():
    assert matches(measured(sizes=(1, 4, 8))) == (
        "4 value-aware keys match 40 (39 to 42), 8 match 80 (79 to 82) of 100 keys chosen by "
        "attention weight (errors pooled; of single queries, 4 match 5 in the median, 4 to 40 in "
        "the quartiles)"
    )


def test_the_sentence_is_empty_where_nothing_was_counted():
    assert matches(measured(sizes=())) == ""


def test_models_are_named_causal_ones_first_and_those_without_the_measurement_left_out(results):
    found = of_models(results)
    assert [item.label for item in found] == [
        "causal, exponential",
        "causal, polynomial (deg 2)",
        "causal, elu",
        "masked, 512 tokens",
    ]
    assert [item.output_error.keys for item in found] == [256, 256, 256, 512]
    assert len({item.mark for item in found}) == 4


def test_only_the_models_own_kernel_is_called_its_own():
    found = of_kernels(probed(("exponential", "polynomial", "elu", "made_up")))
    assert [item.label for item in found] == [
        "exponential, its own",
        "polynomial (deg 2), post hoc",
        "elu, post hoc",
        "made_up, post hoc",
    ]
    assert len({item.mark for item in found}) == 4


def test_the_answer_is_of_the_first_record_that_has_one(results):
    first, second, *others = results.causal
    shown = layers.hero(replace(results, records=[*without_attention([first]), second, *others]))
    needed = matching_keys(second.attention[0].output_error, 4)
    assert shown.title.startswith("causal, polynomial (deg 2) at 256 tokens: 4 keys chosen")
    assert f"as well as {needed.keys} by weight" in shown.title
    assert shown.table.data["r"].tolist() == [1, 2, 4, 8, 16]
    assert "tiny at 16" in layers.hero(replace(results, probed=[probed()])).title
    assert layers.hero(replace(results, records=without_attention(results.records))) is None
