"""A run is chosen in params.yaml, and goes through DVC with a line for each stage."""

import shutil
import subprocess
import sys
from difflib import ndiff
from pathlib import Path

import pytest
from dvc.utils.hydra import apply_overrides
from omegaconf import OmegaConf

from pipelines import repro
from pipelines.app import choice, composed, scale_of_params, values
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
    for module in (choice, values):
        monkeypatch.setattr(module, "committed", lambda folder: head)
    return file


def value(params: Path, key: str) -> object:
    return OmegaConf.select(OmegaConf.load(params), key)


def test_the_scale_and_its_axes_are_where_dvc_reads_them_and_go_back(params: Path) -> None:
    choice.choose(["scale=hours"])
    assert (value(params, "scale"), value(params, "overrides")) == ("hours", [])
    assert value(params, "grid.replicates") == ["second", "third"]
    assert choice.choose([]).scale == "hours" and params.read_bytes() == params.read_bytes()
    choice.choose(["scale=smoke"])
    assert value(params, "grid.replicates") == []
    choice.choose(["scale=laptop"])
    assert params.read_text() == PARAMS


def test_the_overrides_of_a_run_replace_those_of_the_run_before(params: Path) -> None:
    folder = params.parent / "größe # x=y"
    choice.choose(["scale=smoke", "causal.steps=3", "logger=none"])
    cfg = choice.checked()
    assert (cfg.causal.steps, cfg.masked.short.steps) == (3, 6)
    choice.choose(["corpus=local", f"corpus.path='{folder}'"])
    cfg = choice.checked()
    assert (cfg.scale, cfg.causal.steps, cfg.corpus.path) == ("smoke", 6, str(folder))
    choice.choose(["causal.steps=3"])
    choice.choose(["grid.replicates=[second, third]"])  # an axis leaves the overrides
    assert choice.checked().grid.replicates == ["second", "third"]
    assert scale_of_params([]) == ["scale=smoke", "causal.steps=3"]
    assert scale_of_params(["scale=smoke"]) == ["causal.steps=3"]
    assert scale_of_params(["scale=laptop"]) == []
    choice.choose(["grid.replicates=[]", "scale=laptop"])
    assert params.read_text() == PARAMS


@pytest.mark.parametrize(
    ("key", "value"), [("training.log_every", 40), ("grid.replicates", ["second"]), ("seed", 5)]
)
def test_dvc_changes_the_lines_of_one_value(params: Path, key: str, value: object) -> None:
    apply_overrides(params, [f"{key}={value}"])
    changes = [
        line for line in ndiff(PARAMS.split(), params.read_text().split()) if line[0] in "+-"
    ]
    assert len(changes) == (3 if isinstance(value, list) else 2)
    choice.choose(["scale=smoke"])
    written = params.read_text()
    apply_overrides(params, ["scale=smoke"])
    assert params.read_text().split() == written.split()


def test_a_scale_whose_axes_dvc_does_not_read_is_refused(params: Path) -> None:
    params.write_text(PARAMS.replace("scale: laptop", "scale: hours"))
    assert_refused(r"^grid\.replicates is \[second, third\] at .*=hours", choice.checked)
    params.write_text(PARAMS.replace("overrides: []", "overrides: [scale=smoke]"))
    assert_refused(r"^scale is smoke at .* and laptop in params", choice.checked)


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
    monkeypatch.setattr(repro, "run", pytest.fail)
    written = params.stat().st_mtime_ns
    with pytest.raises(SystemExit, match=f"^error: .*{line}") as stop:
        repro.main(["report", argument])
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
    monkeypatch.setattr(repro, "run", pytest.fail)
    assert_refused(
        r"leads out of the project.*copy of the project on that",
        repro.main,
        ["scale=smoke"],
        error=SystemExit,
    )
    assert params.read_text() == PARAMS
    Path(".git").rmdir()  # DVC follows links where there is no git
    monkeypatch.setattr(repro, "run", lambda *_: None)
    repro.main(["scale=smoke"])


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
    """Copies the project with fewer stages, and with neither git nor .dvc."""
    tree = tmp_path / "project"
    for name in ("conf", "pipelines", "src", "results"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = PARAMS
    for old, new in FEWER.items():
        text = text.replace(old, new)
    (tree / "params.yaml").write_text(text)
    for name in ("dvc.yaml", "requirements.txt"):
        shutil.copy(ROOT / name, tree)
    scale = (ROOT / "conf/scale/smoke.yaml").read_text().replace("scale: smoke", "scale: again")
    scale = scale.replace("grid: {", "grid: {replicates: [second], ")
    (tree / "conf/scale/again.yaml").write_text(scale)
    return tree


def command(project: Path, app: str, *arguments: str) -> str:
    """Runs an app; returns what it prints."""
    words = [sys.executable, "-m", f"pipelines.{app}", *arguments]
    process = subprocess.run(words, cwd=project, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.slow
def test_a_scale_runs_through_dvc_without_git_and_goes_on_where_it_was(project: Path) -> None:
    output = command(project, "run", "scale=again", "logger=none")
    lines = output.splitlines()
    assert lines[0].startswith('params.yaml now has scale "again", overrides ["logger=none"], ')
    assert lines[1] == "14 stages; unchanged ones are passed over"
    outputs, seeds = project / "outputs/again", project / "results/seeds/again"
    assert sorted(path.stem for path in (outputs / "records").iterdir()) == [
        *("causal_elu", "causal_elu_second", "masked_long", "masked_long_second")
    ]
    models = [outputs / f"models/causal_elu{end}/model.safetensors" for end in ("", "_second")]
    assert models[0].read_bytes() != models[1].read_bytes()
    assert len((outputs / "seconds.json").read_text().splitlines()) == 14 + 2
    record = outputs / "records/masked_long.json"
    before = record.read_bytes()
    record.unlink()
    command(project, "run")
    assert record.read_bytes() == before  # from DVC's cache
    assert f"{seeds.relative_to(project)} has" in command(
        project, "publish", "publish.trainings=true"
    )
    for folder in (outputs, project / ".dvc", project / ".cache", project / "report"):
        shutil.rmtree(folder)
    (project / "dvc.lock").unlink()
    output = command(project, "run")
    assert "\nreport: " in output and "train_" not in output
    assert record.read_bytes() == before and not (outputs / "models").exists()
    assert (project / "report/index.html").exists()
    edited = project / "pipelines/evaluate.py"
    edited.write_text(edited.read_text().replace("if __name__", "UNUSED = 1\n\nif __name__"))
    output = command(project, "run")
    assert "evaluate_causal@elu: pipelines.evaluate\n" in output and models[1].exists()
