import pytest

from value_aware_study.report.exhibits import table_3, table_4
from value_aware_study.report.formatting import DASH, setting_value, tokens_count
from value_aware_study.report.published import TABLE_3, TABLE_4_LONG


def test_table_3_counts_each_source_and_keeps_the_papers_rows(tokens):
    table = table_3.exhibit(tokens).table
    rows = table.data.set_index("corpus")
    assert rows.loc["numpy", ["all", "training", "evaluation"]].tolist() == [17200, 14790, 2040]
    assert table.display.set_index("corpus").loc["scipy", "evaluation tokens"] == DASH
    assert table.display.set_index("corpus").loc["PG19 (Rae et al., 2020)", "all tokens"] == "3.06B"


def test_table_3_says_how_much_of_the_evaluation_text_is_copied():
    parts = {"documents": 1, "tokens": 10, "words": 200}
    sources = {
        "a": {"train": {"tokens": 90}, "evaluation": parts | {"copied_words": 3}},
        "b": {"train": {"tokens": 90}, "evaluation": parts | {"copied_words": 1}},
    }
    shown = table_3.exhibit({"sources": sources})
    rows = shown.table.display.set_index("corpus")
    assert rows.loc[["a", "b"], "copied words, %"].tolist() == ["1.5", "0.5"]
    assert rows.loc["PG19 (Rae et al., 2020)", "copied words, %"] == DASH
    assert "1.0% in all" in shown.notes[0]


def test_the_papers_training_tokens_are_ten_million_instances_of_510():
    assert sum(training for _, _, training, _ in TABLE_3) == pytest.approx(10e6 * 510)
    assert all(held == 2000 * 510 for *_, held in TABLE_3)


def test_table_4_sets_ours_beside_the_paper_and_dashes_what_is_missing(training):
    rows = table_4.exhibit(training)[0].table.display.set_index("hyperparameter")
    assert rows.loc["sequence length (SQL)"].tolist() == ["512", DASH, "4,096", "512"]
    assert rows.loc["learning rate (LR)"].tolist() == ["5e-6", DASH, "5e-6", "0.0005"]
    assert rows.loc["block part of the positions (POSq)"].tolist() == ["n", "n", "y", "y"]
    assert rows.loc["optimizer steps (STP)", "ours, short"] == "2,000"


def test_table_4_says_that_the_papers_steps_disagree():
    [note] = table_4.exhibit({})[0].notes
    assert "2.5M" in note and "9.904M" in note
    instances = TABLE_4_LONG["steps"] * TABLE_4_LONG["batch_size"] / TABLE_4_LONG["epochs"]
    assert instances == 9_904_000


def test_a_hyperparameter_without_a_row_gets_one(training):
    rows = table_4.exhibit(training)[1].table.display.set_index("hyperparameter")
    assert rows.loc["precision"].tolist() == [DASH, "32-true", "32-true", "32-true"]


def test_nothing_trained_leaves_the_papers_column():
    rows = table_4.exhibit({})[1].table.display.set_index("hyperparameter")
    assert rows.loc["warm-up steps", "paper"] == "4,000"
    assert set(rows["ours"]) == {DASH}


@pytest.mark.parametrize(
    ("value", "text"), [(True, "y"), (0.0, "0"), (5e-6, "5e-6"), (None, DASH), ("none", "none")]
)
def test_settings_as_text(value, text):
    assert setting_value(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(1.53e9, "1.53B"), (510e6, "510M"), (17_200, "17.2K"), (999, "999")]
)
def test_token_counts_as_text(count, text):
    assert tokens_count(count) == text
