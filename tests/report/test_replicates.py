"""The range over seeds where models were trained again: SYNTHETIC records."""

import math
from dataclasses import replace

import pytest
from synthetic import trained_again

from value_aware_study.report import captions
from value_aware_study.report.exhibits import every_r, layers, paper
from value_aware_study.report.frame import Results, of_models

ELU = {"model": "causal_elu", "approximation": "optimal_v_oblivious", "r": 4}
OVER_SEEDS, SAID = "range over seeds", "Each causal model was trained 3 times, "


@pytest.fixture(scope="module")
def again(records):
    """Every causal model three times: approximations add half as much, then twice."""
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


def test_a_training_is_the_models_that_were_trained_as_often_under_their_first_names(
    again, records
):
    trainings = Results.of(again).trainings()
    assert [len(one.records) for one in trainings] == [len(records), 3, 3]
    third = trainings[2].of_kernel("elu")
    assert third.model == "causal_elu" and third.cells in [one.cells for one in again[5:]]
    assert len(Results.of(records).trainings()) == 1
    every = trained_again(records, 0.5, 0.9, tasks=("causal", "masked"))
    for one in (trainings := Results.of(every).trainings())[1:]:
        assert [r.model for r in one.records] == [r.model for r in trainings[0].records]


def test_another_method_or_length_of_training_is_no_replicate(records):
    long = next(record for record in records if record.model == "masked_long")
    others = [
        replace(long, model="masked_long_window", trained_with="SlidingWindow"),
        replace(long, model="masked_long_short", length=64),
    ]
    assert not Results.of([long, *others]).replicates
    assert len(Results.of([long, replace(long, model="masked_long_second")]).replicates) == 1


def test_masked_models_have_a_range_in_tables_and_figures_and_a_caption_of_the_data(records):
    found = Results.of(trained_again(records, 0.5, tasks=("masked",)))
    once = "Each causal model was trained once, each masked model 2 times: range"
    assert once in every_r.figure_5(found).caption
    table = paper.table_1(found)
    assert (twice := "Each masked model was trained 2 times: range") in table.caption
    data = table.table.data.set_index("method").loc["OVO 1"]
    exact, first = 45.0, data["difference"]
    second = exact * (1 + first / exact) ** 0.5 - exact
    assert data[["difference_trained_low", "difference_trained_high"]].tolist() == pytest.approx(
        [second, first]
    )
    display = table.table.display.set_index("method")
    assert display[paper.OF_DIFFERENCE]["OVO 1"].endswith("; seeds +18.6 to +45.0")
    assert display[paper.OF_DIFFERENCE]["exact"].endswith("; seeds 45.0 to 45.0")
    figure = paper.figure_1(found)
    assert OVER_SEEDS in figure.table.display and twice in figure.caption
    assert "trained_low" in figure.charts[0].to_json()
    assert "seeds" not in "".join(paper.table_2(found).table.display.to_numpy().ravel())


def test_the_caption_says_how_often_each_kind_of_model_was_trained(records):
    elu = next(record for record in records if record.model == "causal_elu")
    again = [replace(elu, model=f"causal_elu_{name}") for name in ("second", "third")]
    said = captions.seeds(Results.of([*records, *again]), tasks=["causal"])
    assert (
        said
        == " Each causal model was trained 1 to 3 times: range over seeds; interval: over text."
    )
    assert captions.seeds(Results.of([*records, *again]), tasks=["masked"]) == ""


def test_without_replicates_nothing_is_said_of_seeds(records, results):
    for exhibit in (
        paper.table_2(results), every_r.figure_5(results), layers.hero(results)
    ):  # fmt: skip
        assert SAID not in exhibit.caption and OVER_SEEDS not in exhibit.table.display
        assert "trained_" not in exhibit.table.csv()
        assert "trained_" not in "".join(panel.to_json() for panel in exhibit.charts)


def test_the_hyperparameters_have_the_seed_of_every_training(training):
    def seeded(seed):
        return {"hyperparameters": {"seed": seed}}

    numbered = {"": 0, "_third": 2, "_second": 1}
    given = {
        f"{model}{name}": seeded(seed)
        for model in ("causal_elu", "masked_short")
        for name, seed in numbered.items()
    }
    shown = [exhibit.table.data for exhibit in paper.table_4(given)]
    rows = [data.set_index("hyperparameter").loc["seed"] for data in shown]
    assert (rows[0]["ours, short"], rows[1]["ours, elu"]) == ("0, 1, 2", "0, 1, 2")
