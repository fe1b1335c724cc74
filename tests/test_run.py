"""A run is chosen in params.yaml, and goes through DVC with a line for each stage."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from pipelines import repro
from pipelines.app import choice, composed, scale_of_params

ROOT = Path(__file__).parents[1]
PARAMS = (ROOT / "params.yaml").read_text()
FEWER = {"[exponential, polynomial, elu]": "[elu]", "length: [short, long]": "length: [long]"}


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(ROOT / "params.yaml", "."))


def value(params: Path, key: str) -> object:
    return OmegaConf.select(OmegaConf.load(params), key)


def test_the_scale_and_its_axes_are_where_dvc_reads_them_and_go_back(params: Path) -> None:
    choice.choose(["scale=hours"])
    assert (value(params, "scale"), value(params, "overrides")) == ("hours", [])
    assert value(params, "grid.replicates") == ["second", "third"]
    before = params.read_bytes()
    assert choice.choose([]).scale == "hours" and params.read_bytes() == before
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
    choice.choose(["scale=laptop"])
    assert params.read_text() == PARAMS


def test_every_app_takes_the_overrides_at_that_scale_alone(params: Path) -> None:
    choice.choose(["scale=smoke", "causal.steps=3"])
    assert scale_of_params([]) == ["scale=smoke", "causal.steps=3"]
    assert scale_of_params(["scale=smoke"]) == ["causal.steps=3"]
    assert scale_of_params(["scale=laptop"]) == []


def test_an_edited_axis_wins_over_the_scale_and_stays(params: Path) -> None:
    params.write_text(PARAMS.replace("replicates: []", "replicates:\n  - second", 1))
    choice.choose(["scale=hours"])
    assert value(params, "grid.replicates") == ["second"]
    choice.choose(["scale=laptop"])
    assert value(params, "grid.replicates") == ["second"]


def test_a_list_in_lines_is_replaced_too() -> None:
    text = "grid:\n  kernel:\n    - elu\n    - exponential\n  length: [long]  # last\n"
    written = choice.with_value(text, "grid.kernel", ["polynomial"])
    assert yaml.safe_load(written) == {"grid": {"kernel": ["polynomial"], "length": ["long"]}}
    assert written.endswith("\n  length: [long]  # last\n")


def test_a_scale_whose_axes_dvc_does_not_read_is_refused(params: Path) -> None:
    params.write_text(PARAMS.replace("scale: laptop", "scale: hours"))
    with pytest.raises(ValueError, match=r"^grid\.replicates is \[second, third\] at .*=hours"):
        choice.checked()
    params.write_text(PARAMS.replace("overrides: []", "overrides: [scale=smoke]"))
    with pytest.raises(ValueError, match=r"^scale is smoke at .* and laptop in params"):
        choice.checked()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "grid.kernel=[eluu]",
            "grid.kernel is \\['eluu'\\].* did you mean elu",
        ),
        ("in_context.replicates=[a", "replicates=.a is no YAML; a list is written"),
        (
            "kernel=elu",
            "kernel=elu is not for a run of all stages; every stage",
        ),
        ("paths.outputs=/big", "paths.outputs=/big .* work in a copy of the project"),
        ("++paths.report=/big", "paths.report=/big .* work in a copy of the project"),
        ("paths.root=/big", "paths.root=/big .* work in a copy of the project"),
        ("causal.stesp=3", "stesp"),
        ("corpus.path=a=b", "corpus.path=a=b cannot be read .* a value with =, .* needs quotes"),
        ("scale=huge", "huge"),
        ("scale=gpu", "scale=gpu .* 14 days; trainer.accelerator=auto"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_params_as_they_are(
    params: Path, monkeypatch: pytest.MonkeyPatch, given: str, line: str
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(repro, "run", pytest.fail)
    written = params.stat().st_mtime_ns
    with pytest.raises(SystemExit, match=f"^error: .*{line}") as stop:
        repro.main(["report", given])
    assert "\n" not in str(stop.value) and params.read_text() == PARAMS
    # an axis is written before it is composed, because DVC and Hydra read it there
    assert given.partition("=")[0] in choice.AXES or params.stat().st_mtime_ns == written


@pytest.mark.parametrize("link", ["outputs", "outputs/smoke", "outputs/smoke/models", "report"])
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
    with pytest.raises(SystemExit, match=r"leads out of the project.*copy of the project on that"):
        repro.main(["scale=smoke"])
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


def test_an_axis_is_written_where_dvc_reads_it(params: Path) -> None:
    cfg = choice.choose(["in_context.replicates=[second, deep]"])
    assert cfg.in_context.replicates == ["second", "deep"]
    assert yaml.safe_load(params.read_text())["in_context"]["replicates"] == ["second", "deep"]
    assert choice.checked().in_context.replicates == ["second", "deep"]


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


def command(project: Path, *given: str, app: str = "run") -> list[str]:
    """Runs the pipeline, or another app; returns the printed lines."""
    words = [sys.executable, "-m", f"pipelines.{app}", *given]
    found = subprocess.run(words, cwd=project, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.splitlines()


@pytest.mark.slow
def test_a_scale_runs_through_dvc_without_git_and_goes_on_where_it_was(project: Path) -> None:
    lines = command(project, "scale=again", "logger=none")
    assert lines[0] == "params.yaml now has scale again and logger=none"
    assert lines[1] == "14 stages; unchanged ones are passed over"
    assert " 1/14 fingerprints: " in lines[2] and "14/14 report: " in lines[15]
    outputs = project / "outputs/again"
    assert sorted(path.stem for path in (outputs / "records").iterdir()) == [
        *("causal_elu", "causal_elu_second", "masked_long", "masked_long_second")
    ]
    models = [outputs / f"models/causal_elu{end}/model.safetensors" for end in ("", "_second")]
    assert models[0].read_bytes() != models[1].read_bytes()
    assert len((outputs / "seconds.json").read_text().splitlines()) == 14 + 2
    record = outputs / "records/masked_long.json"
    record.unlink()
    lines = command(project, "scale=again", "logger=none")
    assert lines[1].startswith("0 stages run in") and record.exists()  # from DVC's cache
    again = outputs / "records/causal_elu_second.json"
    before, kept = again.read_bytes(), "results/seeds/again/second.json.gz"
    assert command(project, "publish.seed=second", app="publish") == [
        f"{kept} has the records of the seed"
    ]
    again.unlink()
    shutil.rmtree(models[1].parent)
    lines = command(project, "scale=again", "logger=none")
    assert f"{kept} has the records of seed second: its stages are passed over" in lines
    assert again.read_bytes() == before and not models[1].exists()
