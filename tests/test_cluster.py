"""Clusters run sweeps through submitit, train on several devices, and share results by DVC."""

import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from dvc.repo import Repo

from pipelines.scale import choose
from tests.apps import ROOT, refusal
from tests.training.processes import save_tokenizer, write_tokens
from value_aware_attention.kernels import Elu
from value_aware_attention.models import CausalLanguageModel

pytestmark = pytest.mark.slow


def write_run(root: Path) -> Path:
    """Writes random tokens and a model with random weights, as a run leaves them."""
    write_tokens(root)
    torch.manual_seed(0)
    model = CausalLanguageModel(
        vocabulary_size=60, layers=2, width=64, heads=1, feedforward=64, kernel=Elu(), dropout=0.0
    )
    model.save_pretrained(root / "outputs/smoke/models/causal_elu")
    save_tokenizer(root / "outputs/smoke/models/causal_elu")
    return root


@pytest.mark.filterwarnings("ignore")
def test_a_sweep_of_trainings_on_several_devices_is_refused_before_any_work(
    tmp_path: Path,
) -> None:
    write_tokens(tmp_path)
    line = refusal("train_causal -m trainer=ddp kernel=elu", tmp_path)
    assert "run the whole sweep again" in line and "submitit_slurm" in line
    assert not (tmp_path / ".cache").exists()


PROJECT = (
    *("conf", "pipelines", "src", "params.yaml", "dvc.yaml", ".gitignore"),
    *("requirements.txt", "requirements-models.txt"),
)


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def repository(folder: Path) -> Path:
    """Copies this project at smoke scale, without its history and outputs."""
    for name in PROJECT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        folder.mkdir(exist_ok=True)
        copy(ROOT / name, folder / name)
    for compiled in folder.rglob("__pycache__"):
        shutil.rmtree(compiled)
    git(folder, "init", "--quiet")
    Repo.init(str(folder)).close()
    with chdir(folder):
        choose(["scale=smoke"])
    shutil.copy(ROOT / ".dvc/config", folder / ".dvc/config")
    shutil.copy(ROOT / ".dvcignore", folder / ".dvcignore")
    return folder


def shares(clone: Path, remote: Path) -> Repo:
    """Opens a repository with the remote of docs/cluster.md."""
    (clone / ".dvc/config.local").write_text(
        f"[core]\n    remote = shared\n['remote \"shared\"']\n    url = {remote}\n"
    )
    return Repo(str(clone))


@pytest.mark.filterwarnings("ignore")
def test_what_is_pushed_to_a_folder_is_pulled_into_a_clone_and_nothing_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    first, clone = repository(tmp_path / "first"), tmp_path / "clone"
    monkeypatch.chdir(first)
    with shares(first, tmp_path / "remote") as repo:
        assert [stage.name for stage in repo.reproduce("tokens")] == [
            "fingerprints",
            "corpus",
            "tokens",
        ]
        assert repo.push("tokens", with_deps=True) > 0
    git(first, "add", "--all")
    git(first, "commit", "--quiet", "--message", "computed")
    git(tmp_path, "clone", "--quiet", str(first), str(clone))
    shutil.rmtree(first)  # with its cache: what the clone gets comes from the remote

    monkeypatch.chdir(clone)
    assert not (clone / "outputs").exists()
    with shares(clone, tmp_path / "remote") as repo:
        repo.pull("tokens", with_deps=True)
        assert (clone / "outputs/smoke/tokens/causal/train.npy").stat().st_size > 10_000
        assert repo.reproduce("tokens") == []
        assert git(clone, "status", "--porcelain") == ""
        # what has changed does run
        params = (clone / "params.yaml").read_text()
        (clone / "params.yaml").write_text(params.replace("rearrange: true", "rearrange: false"))
        assert [stage.name for stage in repo.reproduce("tokens")] == [
            "fingerprints",
            "tokens",
        ]
