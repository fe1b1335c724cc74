import copy

import pytest

from value_aware_attention.reporting.headline import headline
from value_aware_attention.reporting.measured_report import keys_needed_table
from value_aware_attention.reporting.measurements import (
    error_rows,
    keys_needed,
    keys_needed_sentence,
    of_records,
    total_error,
)
from value_aware_attention.reporting.records import model_named
from value_aware_attention.reporting.table import DASH

# Two layers of norms 1 and 9: weighed by them, errors pool to the numbers in the tests.
OBLIVIOUS = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.0], [9.0, 8.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.0]]
AWARE = [[0.8, 0.3, 0.3, 0.0, 0.0], [6.0, 4.4, 2.3, 0.7, 0.0]]


def measured(oblivious=OBLIVIOUS, aware=AWARE, keys=8):
    return {
        "search": "default",
        "rows": 256,
        "keys": keys,
        "head_dim": 4,
        "kernel": "exponential",
        "squared_norm": [1.0, 9.0],
        "methods": {
            "optimal_v_oblivious": {
                "sizes": [*range(1, len(oblivious[0]) + 1)],
                "layers": oblivious,
            },
            "optimal_v_aware": {"sizes": [*range(1, len(aware[0]) + 1)], "layers": aware},
        },
    }


def test_errors_pool_as_sums_over_the_sum_of_norms():
    pooled = total_error(measured(), "optimal_v_aware")
    assert pooled == pytest.approx([0.68, 0.47, 0.26, 0.07, 0.0])
    assert total_error(measured(), "optimal_v_aware", layer=1)[0] == pytest.approx(6 / 9)
    assert [row["r"] for row in error_rows(measured(), "optimal_v_aware")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("r", "needed"), [(1, 3), (2, 3), (4, 8)])
def test_keys_needed_is_the_first_size_with_at_most_the_error(r, needed):
    assert keys_needed(measured(), r) == needed


def test_keys_needed_of_one_layer_is_its_own():
    assert [keys_needed(measured(), r, layer=0) for r in (1, 2, 4)] == [2, 7, 8]
    assert [keys_needed(measured(), r, layer=1) for r in (1, 2, 4)] == [3, 3, 7]


def test_an_equal_error_suffices():
    same = measured(aware=[[0.7], [4.0]])
    assert keys_needed(same, 1) == 3


def test_all_keys_suffice_whatever_rounding_left_of_their_error():
    rough = copy.deepcopy(OBLIVIOUS)
    rough[0][-1] = 1e-12
    exact = [[0.8, 0.3, 0.3, 0.0], [6.0, 4.4, 2.3, 0.0]]
    assert keys_needed(measured(rough, exact), 4) == 8
    assert keys_needed(measured(rough, exact, keys=9), 4) is None


def test_a_size_that_was_not_measured_is_none():
    assert keys_needed(measured(), 16) is None


def test_the_sentence_has_the_counted_numbers():
    few = [[0.0] * 3 + [0.05] * 13, [0.0] * 3 + [2.55] * 4 + [0.5] * 9]
    many = [[0.0] * 600, [9.0] * 68 + [2.0] * 125 + [0.4] * 407]
    text = keys_needed_sentence(measured(many, few, keys=600))
    assert text == (
        "4 value-aware keys match 69 keys chosen by attention weight, 8 match 194, "
        "16 match 194 of 600"
    )


def test_the_sentence_leaves_out_sizes_that_are_all_keys_or_not_measured():
    assert keys_needed_sentence(measured()) == (
        "4 value-aware keys match 8 keys chosen by attention weight of 8"
    )
    assert "not measured" in keys_needed_sentence(measured(keys=4))


def test_models_are_named_and_those_without_the_measurement_stay(records):
    found = of_records(records)
    assert [item.label for item in found] == [
        "causal, exponential",
        "causal, polynomial (deg 2)",
        "causal, elu",
        "masked, 512 tokens",
        "masked, 64 tokens",
    ]
    assert [item.keys for item in found] == [256, 256, 256, 512, 64]
    assert found[-1].output_error is None and len({item.mark for item in found}) == 5


def test_the_table_has_pooled_counts_and_its_csv_the_layers(records):
    table = keys_needed_table(of_records(records), "setting.")
    errors = model_named(records, "causal_elu")["output_error"]
    needed = keys_needed(errors, 4)
    rows = table.data[(table.data["model"] == "causal, elu") & (table.data["r"] == 4)]
    assert rows["layer"].tolist() == ["all", 0, 1, 2, 3]
    assert rows["keys_needed"].tolist() == [
        needed,
        *(keys_needed(errors, 4, layer) for layer in range(4)),
    ]
    column = table.display.set_index("r, value-aware keys")["causal, elu, keys of 256"]
    assert column["4"] == f"{needed} ({100 * needed / 256:.0f}%)"
    for words in ("best found", "conservative", "256 queries in each of 4 layers", "setting."):
        assert words in table.caption


def test_a_table_without_measurements_is_empty_and_says_so(records):
    old = [{k: v for k, v in r.items() if k != "output_error"} for r in records]
    table = keys_needed_table(of_records(old), "")
    assert table.data.empty and "No output error was measured" in table.caption
    assert table.csv().startswith("model,layer,r,keys_needed")


def test_a_count_that_was_never_reached_is_a_dash():
    [item, *_] = of_records(
        [
            {"model": "causal_elu", "task": "causal", "kernel": "elu", "length": 9}
            | {
                "output_error": measured(
                    OBLIVIOUS, [[0.8, 0.3, 0.3, 0.0], [6.0, 4.4, 2.3, -1.0]], 9
                )
            }
        ]
    )
    assert keys_needed_table([item], "").display.iloc[-1, -1] == DASH


def test_the_headline_has_a_line_for_each_measured_model(records):
    text = headline(records)
    for record in records:
        if "output_error" in record:
            assert keys_needed_sentence(record["output_error"]) in text
    old = [{k: v for k, v in r.items() if k != "output_error"} for r in records]
    assert "match" not in headline(old)
