"""When jobs of a sweep fail, the others run and are printed, and the failed are named."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

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
    """Returns the r of every printed row."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [words[2] for words in lines if words[:1] == ["causal_elu"]]


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
    assert printed.out.splitlines()[-1].split()[2] == "4"


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
    assert capfd.readouterr().out.splitlines()[-1].split()[2] == "4"
