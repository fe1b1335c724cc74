"""make experiments prints the rows that dvc.api.exp_show returns beside the published run."""

import json
from pathlib import Path

import pytest

from pipelines import experiments
from pipelines.experiments import runs, tables

NAMES = ("match_4", "OVA_1", "OVA_4", "OVA_65", "OVO_1", "OVO_4", "OVO_65", "exact")
MODELS = ("causal_exponential", "masked_long")


def row(rev: str, experiment: str | None, value: object) -> dict[str, object]:
    values = {
        f"outputs/laptop/summary/{model}.json:{name}": value for model in MODELS for name in NAMES
    }
    own = {"Experiment": experiment, "rev": rev, "State": None, "params.yaml": "0a1b"}
    return own | {"outputs/smoke/summary/causal_elu.json:exact": 1.0} | values


SHOWN = [row("workspace", None, 60.016), row("main", None, "!"), row("ab12", "moody-mohr", 1234.5)]
PUBLISHED = {model: dict.fromkeys(NAMES, 61.0) for model in (*MODELS, "masked_long_second")}
FOUND = {"published": PUBLISHED, **runs(SHOWN, "laptop")}


@pytest.mark.parametrize("width", [120, 80, 40, 20])
def test_it_is_no_wider_than_the_terminal(width: int) -> None:
    for table in tables(FOUND, width):
        _, *lines = table.splitlines()
        assert max(map(len, lines)) <= max(width, len("moody-mohr  1234.50"))
        assert len(lines) == 5


def test_every_model_has_its_unit_and_no_row_without_numbers() -> None:
    causal, masked = tables(FOUND, 120)
    title, names, *lines = causal.splitlines()
    assert title == "causal_exponential: perplexity (match_4: keys)"
    assert masked.splitlines()[0] == "masked_long: error in % (match_4: keys)"
    order = ["exact", "OVO_1", "OVA_1", "OVO_4", "OVA_4", "OVO_65", "OVA_65", "match_4"]
    assert names.split() == order
    assert [line.split() for line in lines] == [
        ["published", *["61.00"] * 7, "61"],
        ["this", "run", *["60.02"] * 7, "60"],
        ["difference", *["-0.98"] * 7, "-1"],
        ["moody-mohr", *["1234.50"] * 7, "1234"],
    ]


def test_a_model_without_a_published_one_has_no_difference() -> None:
    (table, _) = tables(runs(SHOWN[:1], "laptop"), 120)
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["this"]


def test_the_published_run_of_the_scale_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiments.dvc.api, "exp_show", lambda: SHOWN)
    monkeypatch.setattr(experiments, "scale_of_run", lambda: "laptop")
    monkeypatch.setattr(experiments, "PUBLISHED", tmp_path)
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "summary.json").write_text(json.dumps(PUBLISHED))
    experiments.main()
    assert "published" in capsys.readouterr().out
    monkeypatch.setattr(experiments, "scale_of_run", lambda: "hours")
    with pytest.raises(SystemExit, match=r"^error: no metrics of scale hours here yet"):
        experiments.main()
