"""The whole run of a scale without DVC: which stages it starts, and which it leaves out."""

import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from dvc.repo import Repo

from pipelines import run

ROOT = Path(__file__).parents[1]
STAGES = ["corpus", "tokens", "train_causal@elu", "train_masked_short", "train_masked_long"]
STAGES += ["evaluate_causal@elu", "evaluate_masked@long", "report"]
FEWER = ["scale=smoke", "grid.kernel=[elu]", "grid.length=[long]"]  # composing takes its time
Started = list[tuple[str, list[str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """What would have been started; nothing is."""
    calls: Started = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "start", lambda name, words: calls.append((name, words)))
    return calls


@pytest.fixture
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that were not started have made nothing, which is to be no reason."""
    monkeypatch.setattr(run, "is_there", lambda out: True)


def again(started: Started, folder: Path, *overrides: str) -> list[str]:
    """The stages that a run with these overrides starts."""
    started.clear()
    run.run([*FEWER, f"paths.root={folder}", *overrides])
    return [name for name, _ in started]


def test_the_stages_are_dvcs_up_to_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = {stage.name: stage for stage in run.stages(run.composed("plan", ["scale=smoke"]))}
    expanded = Repo(str(ROOT)).index.stages
    later = ("benchmark", "survey", "train_variant", "evaluate_variant", "fingerprints")
    later += ("train_in_context", "caches")
    ours = {s.addressing: s for s in expanded if not s.addressing.startswith(later)}
    assert set(found) == set(ours) and list(found)[-1] == "report"
    for name, stage in found.items():
        assert f"python -m {' '.join(stage.words)}" == ours[name].cmd
        outs = {str(Path(out.fs_path).relative_to(ROOT)) for out in ours[name].outs}
        assert set(stage.outs) == outs


def test_replicates_of_the_causal_models_have_stages_and_outputs_of_their_own(
    started: Started, tmp_path: Path
) -> None:
    names = again(started, tmp_path, "grid.replicates=[second,third]")
    commands = dict(started)
    kinds = ("train_causal@elu", "evaluate_causal@elu")
    assert [n for n in names if n not in STAGES] == [
        f"{kind}-{i}" for kind in kinds for i in ("second", "third")
    ]
    assert commands["train_causal@elu-third"][:3] == [
        "pipelines.train_causal",
        "kernel=elu",
        "replicate=third",
    ]
    cfg = run.composed("plan", ["scale=smoke", "grid.replicates=[second]"])
    outs = {stage.name: set(stage.outs) for stage in run.stages(cfg)}
    assert "outputs/models/causal_elu_second" in outs["train_causal@elu-second"]
    assert "outputs/records/causal_elu_second.json" in outs["evaluate_causal@elu-second"]
    for name in ("train_causal@elu", "evaluate_causal@elu"):
        assert outs[name].isdisjoint(outs[f"{name}-second"])
    first, second = (
        run.composed("train_causal", ["scale=smoke", f"replicate={option}"]).train_causal
        for option in ("first", "second")
    )
    assert (first.name, second.name) == ("causal_exponential", "causal_exponential_second")
    assert (first.module.seed, second.module.seed, second.batches.seed) == (0, 1, 1)
    assert first.tokens == second.tokens


@pytest.mark.usefixtures("nothing_made")
def test_a_stage_runs_again_where_a_value_it_reads_or_what_it_reads_from_changed(
    started: Started, tmp_path: Path
) -> None:
    assert again(started, tmp_path) == STAGES
    commands = dict(started)
    assert commands["train_causal@elu"][:2] == ["pipelines.train_causal", "kernel=elu"]
    paths = run.composed("train_causal", commands["train_causal@elu"][1:]).paths
    assert paths.models == f"{tmp_path}/outputs/smoke/models"
    assert paths.report == f"{tmp_path}/outputs/smoke/report"
    elsewhere = ("trainer.accumulate=2", "logger=none")
    assert again(started, tmp_path, *elsewhere) == []
    changed = ("evaluation.causal_units=2", "masked.long.steps=7")
    assert again(started, tmp_path, *changed) == STAGES[4:]
    fewer = again(started, tmp_path, "evaluation.causal_units=3", "masked.long.steps=7")
    assert fewer == ["evaluate_causal@elu", "report"]


@pytest.mark.usefixtures("nothing_made")
def test_a_run_that_was_ended_goes_on_where_it_was(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str, words: list[str]) -> None:
        if name == "train_masked_short":
            raise subprocess.CalledProcessError(137, words)

    with monkeypatch.context() as patch:
        patch.setattr(run, "start", start)
        patch.setattr(sys, "argv", ["run", *FEWER, f"paths.root={tmp_path}"])
        with pytest.raises(SystemExit, match=r"^error: .*137.*the same command") as stop:
            run.main()
    assert "\n" not in str(stop.value)
    assert again(started, tmp_path) == STAGES[3:]


def test_without_a_gpu_the_cost_is_named_before_any_work(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run", "scale=gpu", f"paths.root={tmp_path}"])
    with pytest.raises(SystemExit, match=r"^error: scale=gpu .* 14 days; trainer.accelerator=auto"):
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


def test_a_stage_runs_again_where_something_that_it_made_is_gone_or_cut(
    started: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert again(started, tmp_path) == STAGES
    cfg = run.composed("plan", started[0][1][1:])
    made = {stage.name: list(run.outs(stage, cfg.paths)) for stage in run.stages(cfg)}
    assert made["report"] == [tmp_path / "outputs/smoke/report"]
    for out in chain.from_iterable(made.values()):
        file = out if out.suffix else out / "SHA256SUMS"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"a": 1}')
    assert again(started, tmp_path) == []
    record = made["evaluate_masked@long"][0]
    record.write_text('{"a":')
    assert again(started, tmp_path) == ["evaluate_masked@long", "report"]
    assert f"evaluate_masked@long: {record} is gone or cut" in capsys.readouterr().out
    record.write_text('{"a": 1}')
    (made["train_masked_long"][0] / "SHA256SUMS").unlink()
    assert again(started, tmp_path) == ["train_masked_long", "evaluate_masked@long", "report"]


@pytest.mark.parametrize("given", ["paths.outputs=/big", "++paths.report=/big", "paths.outputs=."])
def test_folders_that_the_run_chooses_are_refused(
    started: Started, tmp_path: Path, given: str
) -> None:
    line = r"^paths\.\w+ is (/big|\.), which a run does not take: give paths.root"
    with pytest.raises(ValueError, match=line):
        again(started, tmp_path, given)
    assert not started and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("nothing_made")
def test_a_root_with_other_letters_and_spaces_is_passed_on(
    started: Started, tmp_path: Path
) -> None:
    folder = tmp_path / "größe x"
    run.run([*FEWER, f"paths.root='{folder}'"])
    assert [name for name, _ in started] == STAGES
    cfg = run.composed("report", started[-1][1][1:])
    assert cfg.paths.report == f"{folder}/outputs/smoke/report"
