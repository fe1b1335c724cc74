"""make experiments prints a table of the rows that dvc.api.exp_show returns."""

import pytest

from pipelines.experiments import table

MODELS = ("causal_exponential", "causal_polynomial", "causal_elu", "masked_short", "masked_long")
METRICS = ("OVA_1", "OVA_4", "exact", "match_4")


def row(rev: str, experiment: str | None, value: object) -> dict[str, object]:
    values = {f"outputs/summary/{name}.json:{one}": value for name in MODELS for one in METRICS}
    return {"Experiment": experiment, "rev": rev, "State": None, "params.yaml": "0a1b"} | values


SHOWN = [row("workspace", None, 60.016), row("main", None, "!"), row("ab12", "moody-mohr", 1234.5)]


@pytest.mark.parametrize("width", [120, 80, 40])
def test_it_is_no_wider_than_the_terminal(width: int) -> None:
    lines = table(SHOWN, width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("moody-mohr" in line for line in lines) >= 1


def test_it_has_exact_attention_and_four_keys_of_every_model() -> None:
    models, metrics, *rows = table(SHOWN, 120).splitlines()
    assert models.split() == ["exponential", "polynomial", "elu", "short", "long"]
    assert metrics.split() == ["OVA_4", "exact"] * 5
    assert [line.split() for line in rows] == [
        ["workspace", *["60.02"] * 10],
        ["main", *["–"] * 10],
        ["moody-mohr", *["1234.50"] * 10],
    ]


def test_without_metrics_there_is_no_table() -> None:
    assert table([{"Experiment": None, "rev": "workspace", "State": None}], 120) == ""
