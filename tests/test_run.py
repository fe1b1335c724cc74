"""The whole run of a scale without DVC: which stages it starts, and which it leaves out."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipelines import run

ROOT = Path(__file__).parents[1]
STAGES = [
    *("corpus", "tokens", "train_causal@exponential", "train_causal@polynomial"),
    *("train_causal@elu", "train_masked_short", "train_masked_long"),
    *("evaluate_causal@exponential", "evaluate_causal@polynomial", "evaluate_causal@elu"),
    *("evaluate_masked@short", "evaluate_masked@long", "report"),
]
Started = list[tuple[str, list[str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """What would have been started; nothing is."""
    calls: Started = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "start", lambda name, words: calls.append((name, words)))
    return calls


def again(started: Started, folder: Path, *overrides: str) -> list[str]:
    """The stages that a run with these overrides starts."""
    started.clear()
    run.run(["scale=smoke", f"paths.root={folder}", *overrides])
    return [name for name, _ in started]


def test_every_stage_up_to_the_report_runs_once(started: Started, tmp_path: Path) -> None:
    assert again(started, tmp_path) == STAGES
    commands = dict(started)
    elu = commands["train_causal@elu"]
    assert elu[:2] == ["pipelines.train_causal", "kernel=elu"]
    assert f"paths.outputs={tmp_path}/outputs/smoke" in elu
    assert f"paths.results={tmp_path}/outputs/smoke/results" in commands["report"]
    assert again(started, tmp_path, "trainer.accumulate=2", "logger=none") == []


def test_a_changed_value_repeats_what_reads_it_and_what_follows(
    started: Started, tmp_path: Path
) -> None:
    again(started, tmp_path)
    fewer = again(started, tmp_path, "evaluation.causal_units=2")
    assert fewer == [name for name in STAGES if name.startswith(("evaluate_causal", "report"))]
    masked = again(started, tmp_path, "evaluation.causal_units=2", "masked.short.steps=7")
    assert masked == [*STAGES[5:7], *STAGES[10:]]
    assert again(started, tmp_path, "evaluation.causal_units=2", "masked.short.steps=7") == []


def test_a_run_that_was_ended_goes_on_where_it_was(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str, words: list[str]) -> None:
        if name == "train_masked_short":
            raise subprocess.CalledProcessError(137, words)

    with monkeypatch.context() as patch:
        patch.setattr(run, "start", start)
        patch.setattr(sys, "argv", ["run", "scale=smoke", f"paths.root={tmp_path}"])
        with pytest.raises(SystemExit, match=r"^error: .*137.*the same command") as stop:
            run.main()
    assert "\n" not in str(stop.value)
    assert again(started, tmp_path) == STAGES[5:]


def test_the_records_of_a_run_meant_for_a_gpu_are_published(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert again(started, tmp_path, "trainer=bf16")[-2:] == ["report", "publish"]
    _, words = started[-1]
    assert words[0] == "pipelines.publish"
    assert f"paths.outputs={tmp_path}/outputs/smoke" in words


def test_without_a_gpu_the_cost_is_named_before_any_work(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run", "scale=gpu", f"paths.root={tmp_path}"])
    with pytest.raises(SystemExit, match=r"^error: scale=gpu .* 15 days; trainer.accelerator=auto"):
        run.main()
    assert not started and not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["causal.stesp=3", "scale=huge"])
def test_a_wrong_override_is_one_line(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", given])
    with pytest.raises(SystemExit, match=r"^error: .*(stesp|huge)") as stop:
        run.main()
    assert "\n" not in str(stop.value) and not started
