"""A run is chosen in params.yaml, and goes through DVC."""

import os
import shutil
import subprocess
import sys
from difflib import ndiff
from pathlib import Path

import pytest
from dvc.repo import Repo
from dvc.utils.hydra import apply_overrides
from omegaconf import OmegaConf

from pipelines import scale
from pipelines.app import composed, scale_of_params, values
from pipelines.app.values import leaves
from tests.refusals import assert_refused

ROOT = Path(__file__).parents[1]
PARAMS = (ROOT / "params.yaml").read_text()
FEWER = {"  - exponential\n  - polynomial\n": "", "  - short\n": ""}  # stages


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path(shutil.copy(ROOT / "params.yaml", "."))
    head = dict(leaves(OmegaConf.to_container(OmegaConf.load(file))))
    monkeypatch.setattr(values, "committed", lambda folder: head)
    return file


def value(params: Path, key: str) -> object:
    return OmegaConf.select(OmegaConf.load(params), key)


def test_the_scale_and_its_axes_are_where_dvc_reads_them_and_go_back(params: Path) -> None:
    scale.choose(["hours"])
    assert (value(params, "scale"), value(params, "overrides")) == ("hours", [])
    assert value(params, "grid.replicates") == ["second", "third"]
    assert scale.choose([]).scale == "hours" and params.read_bytes() == params.read_bytes()
    scale.choose(["scale=smoke"])
    assert value(params, "grid.replicates") == []
    scale.choose(["scale=laptop"])
    assert params.read_text() == PARAMS


def test_the_overrides_of_a_run_replace_those_of_the_run_before(params: Path) -> None:
    folder = params.parent / "größe # x=y"
    scale.choose(["scale=smoke", "causal.steps=3", "logger=none"])
    cfg = scale.checked()
    assert (cfg.causal.steps, cfg.masked.short.steps) == (3, 6)
    scale.choose(["corpus=local", f"corpus.path='{folder}'"])
    cfg = scale.checked()
    assert (cfg.scale, cfg.causal.steps, cfg.corpus.path) == ("smoke", 6, str(folder))
    scale.choose(["grid.replicates=[second, third]"])
    assert value(params, "grid.replicates") == ["second", "third"]
    assert scale.checked().grid.replicates == ["second", "third"]
    assert scale_of_params([]) == ["scale=smoke", "grid.replicates=[second, third]"]
    assert scale_of_params(["scale=smoke"]) == ["grid.replicates=[second, third]"]
    assert scale_of_params(["scale=laptop"]) == []
    scale.choose(["laptop"])
    assert params.read_text() == PARAMS


def test_a_list_comes_back_after_the_scales_that_replaced_it(
    params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params.write_text(PARAMS.replace("extent:\n  - tokens_256\n", "extent:\n"))
    committed = dict(leaves(OmegaConf.to_container(OmegaConf.load(params))))
    monkeypatch.setattr(values, "committed", lambda folder: committed)
    scale.choose(["hours"])
    assert value(params, "grid.extent") == []
    scale.choose(["minilm"])
    scale.choose(["gpu", "trainer.accelerator=auto"])  # a scale without lists
    assert value(params, "grid.extent") == ["tokens_512", "tokens_2048"]
    scale.choose(["hours"])
    params.write_text(PARAMS)  # as git checkout does
    scale.choose(["gpu", "trainer.accelerator=auto"])
    assert "tokens_256" in value(params, "grid.extent")


@pytest.mark.parametrize(
    ("key", "value"), [("training.log_every", 40), ("grid.replicates", ["second"]), ("seed", 5)]
)
def test_dvc_changes_the_lines_of_one_value(params: Path, key: str, value: object) -> None:
    apply_overrides(params, [f"{key}={value}"])
    changes = [
        line for line in ndiff(PARAMS.split(), params.read_text().split()) if line[0] in "+-"
    ]
    assert len(changes) == (3 if isinstance(value, list) else 2)
    scale.choose(["scale=smoke"])
    written = params.read_text()
    apply_overrides(params, ["scale=smoke"])
    assert params.read_text().split() == written.split()


def test_a_scale_whose_axes_dvc_does_not_read_is_refused(params: Path) -> None:
    params.write_text(PARAMS.replace("scale: laptop", "scale: hours"))
    assert_refused(r"^grid\.replicates is \[second, third\] at .*=hours", scale.checked)
    params.write_text(PARAMS.replace("overrides: []", "overrides: [scale=smoke]"))
    assert_refused(r"^scale is smoke at .* and laptop in params", scale.checked)


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("grid.kernel=[eluu]", "grid.kernel is \\['eluu'\\]; it must be a list"),
        ("grid.replicates=[a", "replicates=.a cannot be read"),
        ("kernel=elu", "kernel=elu is not for a run of all stages; every stage"),
        ("++paths.report=/big", "paths.report=/big .* work in a copy of the project"),
        ("corpus.path=a=b", "corpus.path=a=b cannot be read .* a value with =, .* needs quotes"),
        ("scale=gpu", "scale=gpu .* 14 days; trainer.accelerator=auto"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_params_as_they_are(
    params: Path, monkeypatch: pytest.MonkeyPatch, argument: str, line: str
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(scale, "to_run", pytest.fail)
    written = params.stat().st_mtime_ns
    with pytest.raises(SystemExit, match=f"^error: .*{line}") as stop:
        scale.main([argument])
    assert "\n" not in str(stop.value) and params.read_text() == PARAMS
    assert params.stat().st_mtime_ns == written


@pytest.mark.parametrize("link", ["outputs", "outputs/smoke/models", "report"])
def test_a_link_out_of_the_project_is_refused_before_the_first_stage(
    params: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    link: str,
) -> None:
    Path(".git").mkdir()
    Path(link).parent.mkdir(parents=True, exist_ok=True)
    Path(link).symlink_to(tmp_path_factory.mktemp("disk"))
    line = "leads out of the project.*copy of the project on that"
    assert_refused(line, scale.choose, ["smoke"])
    assert params.read_text() == PARAMS
    Path(".git").rmdir()  # DVC follows links where there is no git
    Repo.init(no_scm=True)
    assert scale.choose(["smoke"]).scale == "smoke"


def test_links_and_folders_of_a_run_are_ignored_by_git(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".gitignore", tmp_path)
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for name in ("outputs", "report", "logs", ".cache"):
        (tmp_path / name).symlink_to("/tmp")
    listed = subprocess.run([*git, "status", "--short"], capture_output=True, text=True, check=True)
    assert listed.stdout == "?? .gitignore\n"


def test_replicates_have_outputs_of_their_own_and_read_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    first, second = (
        composed("train_causal", ["scale=smoke", f"replicate={option}"]).train_causal
        for option in ("first", "second")
    )
    assert (first.name, second.name) == ("causal_exponential", "causal_exponential_second")
    assert (first.module.seed, second.module.seed, second.batches.seed) == (0, 1, 1)
    assert first.tokens == second.tokens


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copies the project with fewer stages and without git."""
    tree = tmp_path / "project"
    for name in ("conf", "pipelines", "src", "results"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = PARAMS
    for old, new in FEWER.items():
        text = text.replace(old, new)
    (tree / "params.yaml").write_text(text)
    for name in ("dvc.yaml", "requirements.txt", "Makefile"):
        shutil.copy(ROOT / name, tree)
    (tree / ".dvc").mkdir()
    (tree / ".venv").symlink_to(sys.prefix)
    scale = (ROOT / "conf/scale/smoke.yaml").read_text().replace("scale: smoke", "scale: again")
    scale = scale.replace("grid: {", "grid: {replicates: [second], ")
    (tree / "conf/scale/again.yaml").write_text(scale)
    return tree


def command(project: Path, *words: str) -> str:
    """Runs a command in this environment, which make takes for installed; returns its output."""
    environment = os.environ | {"WANDB_MODE": "disabled", "PYTHONPATH": str(project)}
    # when make calls the tests, the make below would name its folders too
    words = (*words, "-o", "setup", "--no-print-directory") if words[0] == "make" else words
    process = subprocess.run(words, cwd=project, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.slow
def test_a_scale_runs_through_dvc_without_git_and_goes_on_where_it_was(project: Path) -> None:
    lines = command(project, "make", "repro", "SCALE=again").splitlines()
    assert lines[0].startswith('params.yaml now has scale "again", ')
    assert "12 of 13 stages will run" in lines and "  train_causal_again@elu-second" in lines
    outputs = project / "outputs/again"
    assert sorted(path.stem for path in (outputs / "records").iterdir()) == [
        *("causal_elu", "causal_elu_second", "masked_long", "masked_long_second")
    ]
    models = [outputs / f"models/causal_elu{end}/model.safetensors" for end in ("", "_second")]
    assert models[0].read_bytes() != models[1].read_bytes()
    record = outputs / "records/masked_long.json"
    before, page = record.read_bytes(), project / "report/grid.csv"
    record.unlink()
    assert "1 of 13 stages will run" in command(project, "make", "repro")
    assert record.read_bytes() == before  # from DVC's cache
    python = (sys.executable, "-m")
    shown = command(project, *python, "pipelines.publish", "what=trainings")
    assert "results/records/again has 24 files of trainings" in shown
    numbers = page.read_bytes()
    shutil.rmtree(outputs)
    shutil.rmtree(project / "report")
    command(project, "make", "page", "SCALE=again")
    assert page.read_bytes() == numbers and not (outputs / "models").exists()
    edited = project / "pipelines/evaluate.py"
    edited.write_text(edited.read_text().replace("if __name__", "UNUSED = 1\n\nif __name__"))
    output = command(project, "make", "repro")
    assert "Running stage 'evaluate_causal@elu'" in output and models[1].exists()
    assert "Running stage 'train_" not in output  # they come back from DVC's cache
