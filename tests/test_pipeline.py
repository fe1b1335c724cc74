"""dvc.yaml, params.yaml, conf/ and the imports describe one pipeline."""

import ast
import json
import shutil
import subprocess
from functools import cache
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.repo import Repo
from dvc.stage import PipelineStage
from omegaconf import DictConfig, OmegaConf

from pipelines import fingerprints
from pipelines.app import composed as compose
from pipelines.app.choice import AXES
from pipelines.repro import ENCODER, SHARED, TARGETS, Running, rows_of

ROOT = Path(__file__).parents[1]
PARAMS = OmegaConf.load(ROOT / "params.yaml")


@cache
def stages() -> dict[str, PipelineStage]:
    """Returns every stage as DVC expands it."""
    return {stage.addressing: stage for stage in Repo(str(ROOT)).index.stages}


def axes() -> dict[str, list[str]]:
    """Returns the keys of params.yaml that each stage of dvc.yaml is a matrix of."""
    text = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    return {
        name: [key.strip("${}") for key in stage.get("matrix", {}).values()]
        for name, stage in text.items()
    }


def stage_names() -> list[str]:
    names = []
    for name, keys in axes().items():
        cells = product(*(OmegaConf.select(PARAMS, key) for key in keys))
        names += ["@".join(filter(None, (name, "-".join(cell)))) for cell in cells]
    return [name for name in names if name != "fingerprints"]


def test_the_lists_that_stages_are_made_of_are_known() -> None:
    assert set(chain(*axes().values())) == set(AXES)


def app_of(stage: PipelineStage) -> tuple[str, list[str]]:
    words = stage.cmd.split()
    assert words[:2] == ["python", "-m"], stage.cmd
    return words[2].removeprefix("pipelines."), words[3:]


@cache
def composed(name: str) -> DictConfig:
    app, overrides = app_of(stages()[name])
    return compose(app, [*overrides, f"scale={PARAMS.scale}"], return_hydra_config=True)


@pytest.fixture(params=stage_names())
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(ROOT)
    return request.param


def test_dvc_expands_to_the_stages_of_the_file() -> None:
    assert sorted(stages()) == sorted([*stage_names(), "fingerprints"])


@pytest.mark.filterwarnings("ignore:_NoneStep:DeprecationWarning")  # of dvc
@pytest.mark.parametrize("target", TARGETS)
def test_rows_run_in_an_order_that_they_can_and_share_one_stage(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ordered = rows_of(target, fingerprints.needed(["report"]))
    makes = {name: {out.def_path for out in stage.outs} for name, stage in stages().items()}
    for row in ordered:
        made: set[str] = set()
        for name in row:
            made |= makes[name]
            others = set().union(*makes.values()) - made
            read = {dep.def_path for dep in stages()[name].deps}
            assert not any(covers({one}, dep, "/") for one in others for dep in read), name
    for one, other in combinations(ordered, 2):
        assert set(one) & set(other) == {SHARED}


def test_a_stage_that_fails_is_named_below_its_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    running = Running([["a", "b", ENCODER]], tmp_path / "seconds.json")
    with pytest.raises(
        ValueError, match=f"^{ENCODER} failed; once what is said above is put right, the same"
    ):
        running.follow(["false"], ENCODER)
    of_dvc = "Running stage 'a':\n> x\nRunning stage 'b':\nwhy"
    with pytest.raises(ValueError, match=r"^b failed; once"):
        running.follow(["sh", "-c", f'echo "{of_dvc}"; exit 1'])
    said = capfd.readouterr()
    assert said.out == " 1/3 a: 0 s\n" and said.err == "Running stage 'b':\nwhy\n"
    assert set(json.loads(running.file.read_text())) == {"a"}
    running.follow(["true"], "report")  # on top of the rows
    assert capfd.readouterr().out == " 4/4 report: 0 s\n"


def file_deps(stage: PipelineStage) -> set[str]:
    return {str(Path(dep.fs_path).relative_to(ROOT)) for dep in stage.deps}


def covers(tracked: set[str], path: str, separator: str) -> bool:
    return any(path == t or path.startswith(t + separator) for t in tracked)


def test_every_stage_reads_its_own_fingerprint_and_no_source_itself(name: str) -> None:
    deps = file_deps(stages()[name])
    assert f"outputs/{PARAMS.scale}/fingerprints/{name}.json" in deps
    assert not {dep for dep in deps if dep.startswith(("conf", "pipelines", "src", "params"))}


def strings(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(strings, value.values()), set())
    if isinstance(value, list):
        return set().union(*map(strings, value), set())
    return {value} if isinstance(value, str) else set()


def test_composed_paths_are_the_outs_and_the_deps(name: str) -> None:
    stage, cfg = stages()[name], composed(name)
    app, _ = app_of(stage)
    section = OmegaConf.to_container(cfg[app], resolve=False)
    paths = {
        str(Path(text))
        for key, text in _resolved_strings(cfg, app, section)
        if text.startswith("./")
    }
    outs = {str(Path(out.fs_path).relative_to(ROOT)) for out in stage.outs}
    for out in outs:
        assert covers(paths, out, "/"), f"{name} has the out {out}; its config writes {paths}"
    for dep in file_deps(stage):
        if dep.startswith(("outputs/", "results/")) and "fingerprints" not in dep:
            assert covers(paths, dep, "/") or any(p.startswith(dep) for p in paths), dep


def _resolved_strings(cfg: DictConfig, path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in _resolved_strings(cfg, f"{path}.{k}", v)]
    if not isinstance(value, str) or "hydra:" in value:
        return []
    resolved = OmegaConf.select(cfg, path)
    if OmegaConf.is_config(resolved):
        return [(path, s) for s in strings(OmegaConf.to_container(resolved, resolve=True))]
    return [(path, resolved)] if isinstance(resolved, str) else []


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        (".git", None, "is not a git repository: run git init, or dvc config --local core.no_scm"),
        (".dvc", None, "has no .dvc: git checkout .dvc, or dvc init"),
        (".dvc/config", b"[core", "DVC: config file error: Invalid line"),
        ("dvc.lock", b"schema: 9.0\nstages: {}\n", "dvc.lock' validation failed [(]invalid schema"),
        ("dvc.lock", b"", "dvc.lock' validation failed"),
        ("dvc.lock", b"\xff\xfe", "DVC: unable to read: 'dvc.lock', is not valid utf-8"),
        ("dvc.yaml", b"stages: [", "DVC: unable to read: 'dvc.yaml', YAML file structure"),
        ("dvc.yaml", b"stages: {a: 5}", "dvc.yaml' validation failed [(]expected a dictionary"),
        ("dvc.yaml", b"stages: {a: {cmd: '${b}'}}", "DVC: failed to parse 'stages.a.cmd'"),
        ("dvc.yaml", None, "dvc.yaml has no stages, or there is none here"),
    ],
)
def test_a_file_of_dvc_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: bytes | None, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    Path(".dvc").mkdir()
    for name, content in {"dvc.yaml": b"stages: {a: {cmd: x}}", ".dvc/config": b""}.items():
        Path(name).write_bytes(content)
    if text is None:
        there = Path(file)
        shutil.rmtree(there) if there.is_dir() else there.unlink()
    else:
        Path(file).write_bytes(text)
    with pytest.raises(ValueError, match=line) as caught:
        list(fingerprints.stages())
    assert "\n" not in str(caught.value)


def test_both_readers_of_params_agree_and_it_holds_no_interpolation() -> None:
    text = (ROOT / "params.yaml").read_text()
    assert "${" not in text
    assert yaml.safe_load(text) == OmegaConf.to_container(PARAMS)


def test_the_library_imports_no_hydra_the_study_no_runner_and_the_report_nothing_heavy() -> None:
    runners = {"dvc", "wandb"}
    heavy = {"torch", "transformers", "pytorch_lightning", "hydra"}
    refused = {
        "value_aware_attention": {"hydra", "omegaconf"} | runners,
        "value_aware_study": runners,
        "value_aware_study/report": heavy | runners,
    }
    for folder, names in refused.items():
        for file in (ROOT / "src" / folder).rglob("*.py"):
            assert not imported_by(file) & names, file


def imported_by(file: Path) -> set[str]:
    """Returns the packages that a file's import statements name."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
