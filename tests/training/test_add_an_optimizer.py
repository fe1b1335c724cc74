"""docs/recipe.md adds an optimizer by one file, which works in a copy of the project."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.processes import write_tokens

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
TRAINING = ("-m", "pipelines.train_causal", "scale=smoke", "logger=none",
            "trainer.accelerator=cpu", "optimizer@causal.optimizer=nadam")  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name in ("conf", "docs", "pipelines", "src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "params.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    ((name, text),) = re.findall(r"\(`([\w/.]+)`\):\n\n```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": "src:."}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_it_trains_and_its_record_and_card_have_its_arguments(project: Path) -> None:
    write_tokens(project)
    done = run(project, *TRAINING, "causal.optimizer.momentum_decay=0.01")
    assert done.returncode == 0, done.stderr
    (file,) = project.glob("outputs/smoke/metrics/train/*.json")
    settings = json.loads(file.read_text())["hyperparameters"]
    assert settings["optimizer"] == "NAdam" and settings["momentum_decay"] == 0.01
    assert settings["beta_2"] == 0.98 and settings["momentum"] is None


def test_a_value_that_is_no_number_is_refused_at_once(project: Path) -> None:
    done = run(project, *TRAINING, "causal.optimizer.momentum_decay=inf")
    assert done.returncode == 1
    _, line = done.stderr.splitlines()  # the first says that there is no git to compare with
    assert "causal.optimizer.momentum_decay is inf; it must be at least 0" in line
