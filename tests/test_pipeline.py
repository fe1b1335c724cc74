"""dvc.yaml, params.yaml and conf/ describe one pipeline, whose plots DVC draws."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import vl_convert
import yaml
from dvc.repo import Repo
from dvc.stage import PipelineStage
from omegaconf import DictConfig, OmegaConf

from docs.stages import LATER
from pipelines import fingerprints
from pipelines.app import composed as compose
from pipelines.app.values import read_params
from pipelines.scale import STAGE_AXES
from tests.apps import ROOT, copy_of_the_project
from tests.refusals import assert_refused

PARAMS = OmegaConf.load(ROOT / "params.yaml")
BEFORE = {"fingerprints", "corpus", "tokens"}


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
    assert set(chain(*axes().values())) == set(STAGE_AXES)


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


def groups_of(command: str, *options: str) -> set[str]:
    """Returns the stages, without values of a matrix, that a command of make asks DVC for."""
    make = ["make", "--dry-run", command, "PYTHON=true", *options]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # not the last line: make names folders around what it prints, when it was called by make
    (line,) = (line for line in lines.splitlines() if "--glob " in line)
    patterns = line.partition("--glob ")[2]
    names = [name for pattern in shlex.split(patterns.partition("&&")[0]) for name in stages()
             if fnmatchcase(name, pattern)]  # fmt: skip
    return {name.partition("@")[0] for name in names}


def test_the_commands_of_make_ask_for_all_that_the_page_shows() -> None:
    of_paper = {"evaluate_causal", "evaluate_masked"}
    commands = {"repro": of_paper | {"evaluate_pretrained"}} | {k: {*v} for k, v in LATER.items()}
    assert {command: groups_of(command) for command in commands} == commands
    assert (groups_of("seed"), groups_of("seed", "SEED=second")) == (of_paper, set())
    read = {name for name in axes() if not name.startswith("train_") and "_again" not in name}
    # A variant's evaluation reads what its training made.
    assert set().union(*commands.values()) - {"train_variant"} == read - BEFORE - {"report"}


def covers(tracked: set[str], path: str, separator: str) -> bool:
    return any(path == t or path.startswith(t + separator) for t in tracked)


def strings(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(strings, value.values()), set())
    if isinstance(value, list):
        return set().union(*map(strings, value), set())
    return {value} if isinstance(value, str) else set()


def test_a_stage_reads_its_fingerprint_and_its_composed_paths_are_the_outs_and_the_deps(
    name: str,
) -> None:
    stage, cfg = stages()[name], composed(name)
    deps = {str(Path(dep.fs_path).relative_to(ROOT)) for dep in stage.deps}
    assert f"outputs/{PARAMS.scale}/fingerprints/{name}.json" in deps
    assert not {dep for dep in deps if dep.startswith(("conf", "pipelines", "src", "params"))}
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
    for dep in deps:
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
        ("dvc.lock", b"schema: 9.0\nstages: {}\n", "DVC: .*dvc.lock' validation failed"),
        ("dvc.yaml", b"stages: [", "DVC: unable to read: 'dvc.yaml', YAML file structure"),
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
    assert_refused(line, list, fingerprints.stages())


def test_both_readers_of_params_agree_and_it_holds_no_interpolation() -> None:
    text = (ROOT / "params.yaml").read_text()
    assert "${" not in text
    assert yaml.safe_load(text) == OmegaConf.to_container(PARAMS)


SPEC = re.compile(r"var spec = (.+);$", re.MULTILINE)
MODELS = ("causal_exponential", "causal_polynomial", "causal_elu", "masked_short", "masked_long")
CURVE = {"curve": [{"step": step, "loss": 5 - step / 100} for step in (50, 100, 150)], "loss": 3.5}


@pytest.fixture(scope="module")
def titles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Draws the plots of a run's files; returns the SVG of each by its title."""
    folder = tmp_path_factory.mktemp("run")
    copy_of_the_project(folder, "dvc.yaml", "params.yaml", ".dvc/plots")
    with contextlib.chdir(folder):
        outputs = folder / "outputs" / read_params()["scale"]
        for name in ("plots", "metrics/train"):
            (outputs / name).mkdir(parents=True)
        for model in (*MODELS, "causal_elu_second"):
            (outputs / f"plots/{model}.csv").write_text("r,OVO,OVA\n1,9.5,8\n4,7,6\n65,5,5\n")
            (outputs / f"metrics/train/{model}.json").write_text(json.dumps(CURVE))
        dvc = [sys.executable, "-m", "dvc"]
        subprocess.run([*dvc, "config", "--local", "core.no_scm", "true"], check=True)
        subprocess.run([*dvc, "plots", "show"], check=True)
    page = (folder / "dvc_plots" / "index.html").read_text()
    drawn = [vl_convert.vegalite_to_svg(json.loads(spec)) for spec in SPEC.findall(page)]
    return {re.findall(r"<text[^>]*>([^<]*: [^<]*)<", svg)[-1]: svg for svg in drawn}


@pytest.mark.slow
def test_every_model_has_its_loss_against_r_and_its_learning_curve(titles: dict[str, str]) -> None:
    against_r = {title for title in titles if not title.endswith("loss on validation text")}
    assert against_r == {
        *(f"{model}: perplexity" for model in (*MODELS[:3], "causal_elu_second")),
        *(f"{model}: error in %" for model in MODELS[3:]),
    }
    assert {f"{title.partition(':')[0]}: loss on validation text" for title in against_r} == {
        *titles.keys() - against_r
    }
    assert ">optimizer step<" in titles["masked_long: loss on validation text"]
    for word in (">OVO<", ">OVA<", ">r, keys kept<"):
        assert word in titles["masked_long: error in %"]


@pytest.mark.slow
def test_r_is_on_a_logarithmic_axis(titles: dict[str, str]) -> None:
    """The ticks at 4 and 16 keys are as far apart as those at 1 and 4."""
    tick = r'<text[^>]*translate\(([\d.]+),[\d.]+\)"[^>]*>{}<'
    svg = titles["causal_elu_second: perplexity"]
    at_1, at_4, at_16 = (
        float(re.search(tick.format(r), svg)[1])  # type: ignore[index]
        for r in (1, 4, 16)
    )
    assert at_16 - at_4 == pytest.approx(at_4 - at_1, abs=0.5)
