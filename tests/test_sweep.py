"""A sweep leaves a table and a picture; when jobs fail, the others run, and these are named."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipelines.app.sweep import picture_of, rows_of
from tests.apps import run_app
from tests.test_cluster import write_run

pytestmark = pytest.mark.filterwarnings("ignore")
SWEEP = "evaluate -m kernel=elu approximation=optimal_v_oblivious approximation.r="


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def ended(command: str, root: Path) -> list[str]:
    """Returns the lines that a failing sweep ends with."""
    with pytest.raises(SystemExit) as stop:
        run_app(command, root)
    return str(stop.value).splitlines()


def sizes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the r of every printed row but that of exact attention."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [words[3] for words in lines if words[:3:2] == ["causal_elu", "optimal_v_oblivious"]]


def test_a_sweep_leaves_its_table_with_exact_attention_and_a_picture(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_app(f"{SWEEP}1,4", root)
    folder = root / "logs/hydra/evaluate"
    table = pd.read_csv(folder / "sweep.csv")
    exact, *_ = values = table["perplexity"].tolist()
    assert (folder / "multirun.yaml").exists()
    assert table["method"].tolist() == ["exact", "optimal_v_oblivious", "optimal_v_oblivious"]
    assert table["r"].tolist()[1:] == [1, 4] and set(table["kernel"]) == {"elu"}
    assert table["times_exact"].tolist() == pytest.approx([value / exact for value in values])
    assert (table["perplexity_low_95"] <= table["perplexity"]).all()
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [f"{folder}/sweep.csv", f"{folder}/sweep.png"]
    assert printed[-6].split() == list(table)
    run_app("evaluate -m kernel=elu approximation=exact,linear_attention", root)
    assert pd.read_csv(folder / "sweep.csv")["method"].tolist() == ["exact", "linear_attention"]
    assert not (folder / "sweep.png").exists()  # no method with r


def test_rows_are_compared_with_their_own_exact_attention() -> None:
    numbers = {"low": 1.0, "high": None, "count": 9}
    exact = {"approximation": "exact", "kernel": "elu", "metric": "error_percent", **numbers}
    jobs = [
        {
            "row": [*{"model": model, "approximation": "random_keys", "r": 2, "value": 6}.items()],
            "exact": exact | {"model": model, "value": value},
        }
        for model, value in (("a", 3.0), ("b", 2.0), ("a", 3.0), ("c", 0.0))
    ]
    rows = rows_of(json.loads(json.dumps([*jobs, {"row": [["model", "d"]]}, {"failure": "it"}])))
    assert [row["model"] for row in rows] == ["a", "a", "b", "b", "a", "c", "c", "d"]
    assert [row.get("times_exact") for row in rows] == [1, 2, 1, 3, 2, None, None, None]
    assert picture_of(rows[-1:]) is None
    assert picture_of(
        [rows[1] | numbers | {"low": -1.0}]
    )  # an interval that a logarithm cannot show


def test_a_bad_cell_is_named_by_what_it_was_given_and_the_others_are_a_table(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = ended(f"{SWEEP}1,0,4", root)
    assert (
        line
        == "error: approximation.r=0: approximation.r is 0; it must be a whole number of at least 1"
    )
    assert sizes(capsys) == ["1", "4"]


def test_a_traceback_is_shown_and_the_other_cells_run(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = import_module("pipelines.evaluate")
    whole = app.evaluate

    def broken(cfg: Any, device: str) -> Any:
        return {}["missing"] if cfg.approximation.r < 4 else whole(cfg, device)

    monkeypatch.setattr(app, "evaluate", broken)
    first, second = ended(f"{SWEEP}1,2,4", root)
    assert first.startswith("error: approximation.r=1: KeyError") and "missing" in first
    assert second.startswith("error: approximation.r=2: KeyError")
    printed = capfd.readouterr()
    assert printed.err.count("Traceback") == 2
    assert printed.out.splitlines()[-3].split()[3] == "4"


def test_a_sweep_is_ended_by_hand_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def interrupted(cfg: Any, device: str) -> None:
        asked.append(cfg.approximation.r)
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("pipelines.evaluate"), "evaluate", interrupted)
    assert ended(f"{SWEEP}1,4", root) == ["error: interrupted"]
    assert asked == [1]


def test_apps_without_a_table_name_their_jobs_too(root: Path) -> None:
    lengths = "causal.length=1000000,2000000"  # the text has less: known once it is read
    (line, _) = ended(f"train_causal -m kernel=elu {lengths} logger=none seed=1", root)
    assert line.startswith("error: causal.length=1000000: ") and "too few for length" in line


@pytest.mark.slow
@pytest.mark.skipif(find_spec("submitit") is None, reason="needs requirements-cluster.txt")
def test_a_job_that_is_killed_is_named_and_the_others_are_waited_for(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = "value_aware_attention.approximations.OptimalValueOblivious"
    targets = f"approximation._target_=tests.training.processes.kill,nowhere.Nothing,{kept}"
    killed, refused = ended(f"{SWEEP}4 {targets} hydra/launcher=submitit_local", root)
    assert killed.startswith("error: approximation._target_=tests.training.processes.kill: its pro")
    assert refused.startswith("error: approximation._target_=nowhere.Nothing: ")
    assert len(list(Path(killed.rpartition(" ")[2]).glob("*/*_log.err"))) == 3
    assert capfd.readouterr().out.splitlines()[-3].split()[3] == "4"
