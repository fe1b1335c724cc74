"""A stage runs again when, and only when, one of its own values or the code it runs has changed."""

import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import fingerprints
from tests.apps import copy_of_the_project
from value_aware_attention.measurement.store import import_closure

READ = ("conf", "pipelines", "src", ".dvcignore", "dvc.yaml", "params.yaml")
FEWER = {"  - exponential\n  - polynomial\n": "", "  - fourier_mixing\n": ""}  # composing is slow
KERNELS = "src/value_aware_attention/kernels.py"
CORPUS = "pipelines/corpus.py"
OPTIMIZERS = "src/value_aware_study/training/optimizers.py"
AFTER_PREFIX = "src/value_aware_attention/decoding/after_prefix.py"
FOLDER = "outputs/laptop/fingerprints"
BEFORE_EVALUATION = ("corpus", "tokens", "train_causal", "train_masked")
LATER = ("caches", "decoding", "report", "probe", "evaluation")
"""Rooms that change no text, token or training"""
TRAINED_WITH = {"approximation", "sparse_weights"}
"""Modules of approximations that every model attends with"""


def run(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.fingerprints"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def edit(tree: Path, file: str, old: str, new: str) -> None:
    text = (tree / file).read_text()
    assert text.count(old) == 1, f"{old!r} is in {file} {text.count(old)} times"
    (tree / file).write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the project with fewer stages and computes their fingerprints."""
    tree = copy_of_the_project(tmp_path_factory.mktemp("project"), *READ)
    (tree / ".dvc").mkdir()
    (tree / ".dvc/config").write_text("[core]\n    no_scm = true\n")
    for old, new in FEWER.items():
        edit(tree, "params.yaml", old, new)
    first = run(tree)
    assert first.returncode == 0, first.stderr
    return tree


@pytest.fixture
def tree(computed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(computed, tmp_path / "project"))


def changed(tree: Path) -> set[str]:
    """Computes fingerprints; returns the stages whose fingerprints changed."""
    folder = tree / FOLDER
    before = {path.stem: path.read_bytes() for path in folder.glob("*.json")}
    result = run(tree)
    assert result.returncode == 0, result.stderr
    after = {path.stem: path.read_bytes() for path in folder.glob("*.json")}
    different = {name for name in after if before.get(name) != after[name]}
    assert {line.partition(":")[0] for line in result.stdout.splitlines()} == different
    return different


@pytest.mark.parametrize("app", BEFORE_EVALUATION)
def test_no_stage_before_evaluation_depends_on_what_comes_after_it(app: str) -> None:
    closure = import_closure(
        f"pipelines.{app}", packages=fingerprints.CODE_PACKAGES, without=fingerprints.WITHOUT
    )
    assert not {name for name in closure if {*name.split(".")} & {*LATER}}
    approximations = {name.rpartition(".")[2] for name in closure if ".approximations" in name}
    assert approximations <= TRAINED_WITH


PARAMS, CSS = "params.yaml", "src/value_aware_study/report/page.css"
CALLABLE = "from collections.abc import Callable, Iterable\n"
BATCH = "length: 512\n    batch_size: "
EDITS: dict[str, tuple[list[tuple[str, str, str]], list[str]]] = {
    "comments, a docstring and layout": (
        [
            (KERNELS, "import torch\n", "import torch  # computes\n\n\n"),
            (KERNELS, '"""Defines similarity', '"""Has similarity'),
            (PARAMS, "seed: 0\n", "seed: 0  # of everything\n"),
        ],
        [],
    ),
    "values": (
        [
            (PARAMS, f"{BATCH}4\n", f"{BATCH}2\n"),
            (PARAMS, "head size + 1\n  - 1\n", "head size + 1\n  - 3\n"),
        ],
        [
            *("train_masked_long", "evaluate_causal@elu", "evaluate_masked@short"),
            *("evaluate_masked@long", "evaluate_variant@linformer"),  # of the same section
        ],
    ),
    "a cost": ([(PARAMS, "overrides: []", "overrides: [trainer.workers=2]")], []),
    "an argument of the trainer": (
        [(PARAMS, "overrides: []", "overrides: ['+trainer.gradient_clip_val=0.5']")],
        ["train_causal@elu", "train_masked_short", "train_masked_long", "train_*"],
    ),
    "code of caches": ([(AFTER_PREFIX, "ROWS = 32", "ROWS = 33")], ["caches*"]),
    "code of a stage, and looks": (
        [
            (CORPUS, "if __name__", "UNUSED = 1\n\nif __name__"),
            (CSS, "--wide: 96rem", "--wide: 95rem"),
        ],
        ["corpus", "report"],
    ),
    "code of trainings": (
        [(OPTIMIZERS, CALLABLE, f"{CALLABLE}UNUSED = 1\n")],
        ["train_causal@elu", "train_masked_long", "train_variant@linformer", "train_*"],
    ),
}
"""Edits of files, and patterns of the stages that they change: each fits one, and no other does"""


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "patterns"), EDITS.values(), ids=EDITS)
def test_an_edit_changes_the_fingerprints_of_the_stages_that_it_reaches(
    tree: Path, edits: list[tuple[str, str, str]], patterns: list[str]
) -> None:
    for file, old, new in edits:
        edit(tree, file, old, new)
    different = changed(tree)
    fitting = [set(fnmatch.filter(different, pattern)) for pattern in patterns]
    assert all(fitting) and different == set().union(*fitting)


@pytest.mark.slow
def test_a_stage_that_is_gone_leaves_no_fingerprint(tree: Path) -> None:
    edit(tree, "params.yaml", "  - short\n", "")
    changed(tree)
    left = {path.stem for path in (tree / FOLDER).iterdir()}
    assert "evaluate_masked@long" in left and "evaluate_masked@short" not in left


def test_what_changed_is_said_with_its_new_value() -> None:
    before = {"values": {"fit": {"steps": 5}, "same": 1}, "code": {"a.b": "1", "gone": "2"}}
    after = {"values": {"fit": {"steps": 7}, "same": 1}, "code": {"a.b": "3"}}
    changes = fingerprints.differences(before, after)
    assert sorted(changes) == ["a.b", "fit.steps = 7 (was 5)", "gone"]


@pytest.mark.slow
def test_a_fingerprint_holds_resolved_values_and_every_module_a_stage_runs(computed: Path) -> None:
    content = json.loads((computed / FOLDER / "train_causal@elu.json").read_text())
    assert content["values"]["fit"]["steps"] > 0 and "run" not in content["values"]
    in_main = {"pipelines.app.training", "value_aware_study.training.fit"}
    named = {"pipelines.train_causal", "value_aware_study.training.optimizers"}
    assert in_main | named | {"value_aware_attention.attention"} <= content["code"].keys()
    assert not {name for name in content["code"] if ".evaluation." in name or ".report." in name}


@pytest.mark.slow
def test_a_value_that_does_not_compose_is_one_line_and_leaves_the_fingerprints(tree: Path) -> None:
    edit(tree, "params.yaml", "scale: laptop", "scale: lapptop")
    before = {path: path.read_bytes() for path in (tree / FOLDER).iterdir()}
    result = run(tree)
    assert result.returncode == 1 and result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1 and "lapptop" in result.stderr
    assert {path: path.read_bytes() for path in (tree / FOLDER).iterdir()} == before
