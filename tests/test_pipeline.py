"""dvc.yaml, params.yaml, conf/ and the imports describe one pipeline: they are held equal here."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.repo import Repo
from dvc.stage import PipelineStage
from omegaconf import DictConfig, OmegaConf

from pipelines.app import composed as compose

ROOT = Path(__file__).parents[1]
PARAMS = OmegaConf.load(ROOT / "params.yaml")
# Where files lie, what logs, and on which device: these change no result, so nothing re-runs.
UNTRACKED = {"paths", "logger", "trainer", "hydra", "oc"}
GROUPS = {"attention", "kernel", "length", "model"}


@cache
def stages() -> dict[str, PipelineStage]:
    """Every stage as DVC expands it."""
    return {stage.addressing: stage for stage in Repo(str(ROOT)).index.stages}


def stage_names() -> list[str]:
    text = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    axes = {"kernel": PARAMS.grid.kernel, "length": PARAMS.grid.length}
    axes["attention"] = PARAMS.survey.trained
    names = []
    for name, stage in text.items():
        axis = next(iter(stage.get("matrix", {})), None)
        names += [f"{name}@{value}" for value in axes[axis]] if axis else [name]
    return names


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
    assert sorted(stages()) == sorted(stage_names())


def references(cfg: DictConfig, section: str) -> set[str]:
    """Every config path that a section reaches by interpolation, directly or not."""
    reached: set[str] = set()
    waiting = [section]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        parent, _, key = path.rpartition(".")
        node = OmegaConf.select(cfg, parent, throw_on_missing=False) if parent else cfg
        if not isinstance(node, DictConfig) or key not in node:
            continue
        value = node._get_node(key)
        raw = OmegaConf.to_yaml(OmegaConf.create({"value": value}), resolve=False)
        waiting += [match for match in re.findall(r"\$\{([a-z_]+(?:\.\w+)*)\}", raw)]
    return reached


def tracked_params(stage: PipelineStage) -> tuple[set[str], set[str]]:
    """(keys of params.yaml, other files tracked as params)."""
    params = [dep for dep in stage.deps if hasattr(dep, "params")]
    own = {key for dep in params if Path(dep.fs_path).name == "params.yaml" for key in dep.params}
    files = {str(Path(dep.fs_path).relative_to(ROOT)) for dep in params}
    return own, files - {"params.yaml"}


def file_deps(stage: PipelineStage) -> set[str]:
    deps = [dep for dep in stage.deps if not hasattr(dep, "params")]
    return {str(Path(dep.fs_path).relative_to(ROOT)) for dep in deps}


def covers(tracked: set[str], path: str, separator: str) -> bool:
    return any(path == t or path.startswith(t + separator) for t in tracked)


def test_every_value_a_stage_reads_is_tracked_and_nothing_else(name: str) -> None:
    stage, cfg = stages()[name], composed(name)
    app, _ = app_of(stage)
    keys, _ = tracked_params(stage)
    read = references(cfg, app)
    read |= {app} if app in PARAMS else set()
    read |= (
        {"grid"}
        if stage.name.startswith(("evaluate_causal", "survey_causal", "survey_masked"))
        else set()
    )
    leaves = {
        path
        for path in read
        if OmegaConf.select(PARAMS, path) is not None or path.split(".")[0] in PARAMS
    }
    leaves -= {"corpus.sources", "corpus.description"}
    untracked = {path for path in leaves if not covers(keys, path, ".")}
    assert not untracked, f"{name} reads {untracked} of params.yaml without tracking it"
    unread = {
        key
        for key in keys - {"scale"}
        if not any(
            path == key or path.startswith(key + ".") or key.startswith(path + ".")
            for path in leaves
        )
    }
    # the corpus group shares its section with params.yaml's: tracked for evaluation_fraction
    assert unread <= {"corpus"}, f"{name} tracks {unread} of params.yaml and does not read it"


def test_the_config_files_of_a_stage_are_tracked(name: str) -> None:
    stage, cfg = stages()[name], composed(name)
    app, _ = app_of(stage)
    _, param_files = tracked_params(stage)
    deps = file_deps(stage)
    assert f"conf/{app}.yaml" in deps
    if app.endswith("report"):
        return
    assert f"conf/scale/{PARAMS.scale}.yaml" in param_files
    reached = {path.split(".")[0] for path in references(cfg, app)}
    choices = cfg.hydra.runtime.choices
    for group in GROUPS & reached:
        file = f"conf/{group}/{choices[group]}.yaml"
        if not (ROOT / file).exists():  # composed of the method's card (pipelines/methods.py)
            file = f"conf/approximation/{choices[group]}.yaml"
        assert file in param_files or covers(deps, file, "/"), f"{name} must track {file}"
    for choice, option in choices.items():
        group, _, package = choice.partition("@")  # "optimizer@causal.optimizer"
        if package in references(cfg, app):
            file = f"conf/{group}/{option}.yaml"
            assert covers(deps, file, "/"), f"{name} must track {file}"
    for file in param_files | {d for d in deps if d.startswith("conf/")}:
        assert (ROOT / file).exists()


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
        if dep.startswith(("outputs/", "results/")):
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


def module_file(module: str) -> Path | None:
    base = ROOT if module.startswith("pipelines") else ROOT / "src"
    path = base / module.replace(".", "/")
    if path.with_suffix(".py").exists():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").exists() else None


def exported_from(package: Path, name: str) -> str | None:
    """The module that a package's __init__ re-exports a name from."""
    for node in ast.walk(ast.parse(package.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name for alias in node.names}
            if name in names:
                return node.module
    return None


def imports(file: Path) -> set[str]:
    """Project modules a file imports by name; a re-export counts as the module it comes from."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.add(origin(node.module, alias.name))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {m for m in found if m.split(".")[0] in ("pipelines", "value_aware_attention")}


def origin(module: str, name: str) -> str:
    if module_file(f"{module}.{name}"):
        return f"{module}.{name}"
    file = module_file(module)
    if file is not None and file.name == "__init__.py":
        return exported_from(file, name) or module
    return module


def closure(modules: set[str]) -> set[str]:
    """Files of the modules and of everything they import from the project."""
    seen: set[str] = set()
    waiting = set(modules)
    while waiting:
        module = waiting.pop()
        seen.add(module)
        file = module_file(module)
        if file is not None:
            waiting |= imports(file) - seen
    files = {module_file(module) for module in seen}
    return {str(f.relative_to(ROOT)) for f in files if f is not None and f.name != "__init__.py"}


def targets(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["_target_"]} if "_target_" in value else set()
        return own.union(*map(targets, value.values()))
    return set()


def target_module(target: str) -> str:
    module, _, name = target.rpartition(".")
    while module and module_file(module) is None:
        module, _, name = module.rpartition(".")
    return origin(module, name) if module else ""


def test_the_python_files_a_stage_runs_are_its_deps(name: str) -> None:
    stage, cfg = stages()[name], composed(name)
    app, _ = app_of(stage)
    # `run` is the logger; `choice` is known only when Hydra runs the app
    resolved = {
        key: _resolve(cfg, f"{app}.{key}") for key in cfg[app] if key not in ("run", "choice")
    }
    needed = closure({f"pipelines.{app}", *filter(None, map(target_module, targets(resolved)))})
    deps = {dep for dep in file_deps(stage) if dep.startswith(("pipelines", "src"))}
    missing = {file for file in needed if not covers(deps, file, "/")}
    assert not missing, f"{name} runs {sorted(missing)}, which are not deps"
    unused = {dep for dep in deps if not any(covers({dep}, file, "/") for file in needed)}
    assert not unused, f"{name} has deps it does not run: {sorted(unused)}"


def _resolve(cfg: DictConfig, path: str) -> Any:
    value = OmegaConf.select(cfg, path)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def test_both_readers_of_params_agree_and_it_holds_no_interpolation() -> None:
    text = (ROOT / "params.yaml").read_text()
    assert "${" not in text
    assert yaml.safe_load(text) == OmegaConf.to_container(PARAMS)


def test_the_library_imports_neither_hydra_nor_dvc_nor_wandb() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            heads = {n.split(".")[0] for n in names}
            assert not heads & {"hydra", "omegaconf", "dvc", "wandb"}, file
