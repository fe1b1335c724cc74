"""Exhibits show the range over seeds where causal models were trained again (SYNTHETIC)."""

import math
from dataclasses import replace

import pytest
from synthetic import match, trained_again, with_attention

from value_aware_study.report.exhibits import every_r, layers, paper_tables
from value_aware_study.report.measured import of_models
from value_aware_study.report.results import Results

ELU = {"model": "causal_elu", "approximation": "optimal_v_oblivious", "r": 4}
OVER_SEEDS, SAID = "range over seeds", "Each kernel was trained 3 times"


@pytest.fixture(scope="module")
def again(records):
    """Trains every causal model three times: approximations add half as much loss, then twice."""
    return trained_again(records, 0.5, 2.0)


def test_the_range_of_a_change_is_of_each_training_against_its_own_exact_attention(again, results):
    found = Results.of(again)
    once = results.find(among=results.changes, **ELU)["value"]
    row = found.find(among=found.changes, **ELU)
    assert row["value"] == once and "trained_low" not in results.changes
    assert [row["trained_low"], row["trained_high"]] == pytest.approx([once / 2, once * 2])
    assert math.exp(found.find(among=found.nats, **ELU)["trained_high"]) == pytest.approx(
        found.find(**ELU)["trained_high"]
    )


def test_the_first_training_is_shown_and_what_was_trained_once_has_no_range(again, results):
    found = Results.of(again)
    assert len(found.settings) == len(results.settings)
    masked = found.settings[found.settings["task"] == "masked"]
    assert len(masked) and masked["trained_low"].isna().all()
    assert [one.label for one in of_models(found)] == [one.label for one in of_models(results)]


def test_a_training_is_the_models_of_one_seed_and_the_masked_ones(again, records):
    trainings = Results.of(again).trainings()
    assert [len(one.records) for one in trainings] == [len(records)] * 3
    assert trainings[2].of_kernel("elu").model == "causal_elu_third"
    assert len(Results.of(records).trainings()) == 1


def test_without_replicates_nothing_is_said_of_seeds(records, results):
    for exhibit in (
        paper_tables.table_2(results), every_r.figure_5(results), layers.hero(results)
    ):  # fmt: skip
        assert SAID not in exhibit.caption and OVER_SEEDS not in exhibit.table.display
        assert "trained_" not in exhibit.table.csv()
        assert "trained_" not in "".join(panel.to_json() for panel in exhibit.charts)


def test_the_hero_has_the_range_of_the_keys_that_match(records):
    first, *others = [one for one in records if one.task == "causal"]
    counts = [match(None, 4, keys) for keys in (50, 90)]
    measured = first.attention[0].output_error
    seeds = [
        replace(
            with_attention(first, output_error=replace(measured, matching_keys=(count,))),
            model=f"{first.model}_{name}",
        )
        for name, count in zip(("second", "third"), counts, strict=True)
    ]
    found = Results.of([first, *others, *seeds])
    shown = layers.hero(found).table.display.set_index("r, value-aware keys")
    mine = next(one.keys for one in measured.matching_keys if one.layer is None and one.r == 4)
    ends = min(mine, 50), max(mine, 90)
    assert shown.loc["4", OVER_SEEDS] == "{} to {}".format(*ends)
    assert shown.loc["1", OVER_SEEDS] == "–"


def test_the_hyperparameters_have_the_seed_of_every_training(training):
    def seeded(seed):
        return {"hyperparameters": {"seed": seed}}

    given = {"causal_elu": seeded(0), "causal_elu_third": seeded(2), "causal_elu_second": seeded(1)}
    _, causal = paper_tables.table_4(given)
    row = causal.table.data.set_index("hyperparameter").loc["seed"]
    assert row["ours, elu"] == "0, 1, 2"
