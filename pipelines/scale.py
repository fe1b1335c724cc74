"""Chooses what DVC runs: writes a scale into params.yaml and lists the stages that will run.

    python -m pipelines.scale [SCALE] [overrides] [-- stages]
    python -m pipelines.scale gpu corpus=local corpus.path=FILE && make repro

DVC and every app read the choice in params.yaml; without arguments it stays. After `--` come the
stages for `dvc repro --glob`; without them, all are listed.
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dvc.config import Config
from dvc.exceptions import DvcException, NotDvcRepoError, ReproductionError
from dvc.repo import Repo
from dvc.scm import SCMError
from dvc.stage import PipelineStage
from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update
from networkx import descendants
from omegaconf import DictConfig, OmegaConf
from pygit2 import GitError

from pipelines.app import composed, ending_with_one_line, one_line, write_json
from pipelines.app.values import PARAMS_FILE, read_params, values_of_scale
from value_aware_attention.files import load_json, write_text
from value_aware_study.safe_text import TIMES

STAGE_AXES = (
    *("grid.kernel", "grid.length", "grid.replicates", "survey.trained"),
    *("grid.pretrained", "grid.extent", "grid.prompts", "grid.joint_prompts"),
)
"""Lists of params.yaml from which dvc.yaml makes stages."""
CELLS = (*("kernel", "length", "replicate", "attention", "model", "pretrained", "extent"),)
"""Config groups in which every stage makes its own choice."""
ANYWHERE = ("paths.cache", "paths.logs", "paths.results", "paths.published")
"""Folders that dvc.yaml does not name, so they may lie outside of the project."""
REPLACED = Path(".dvc/tmp/lists.json")
"""Lists that a scale has replaced in params.yaml: key -> [what it wrote, what was there]"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the choice, then prints what `dvc repro` will run."""
    with ending_with_one_line():
        arguments = sys.argv[1:] if arguments is None else arguments
        end = arguments.index("--") if "--" in arguments else len(arguments)
        print("\n".join(to_run(choose(arguments[:end]), arguments[end + 1 :])), flush=True)


def choose(arguments: Sequence[str]) -> DictConfig:
    """Writes a scale, overrides and the lists of the scale into params.yaml; returns the config.

    Without arguments the choice stays. Raises ValueError for a run that is not possible, and then
    leaves the file unchanged.
    """
    scales = [text.removeprefix("scale=") for text in arguments if _names_scale(text)]
    overrides = [text for text in arguments if not _names_scale(text)]
    scale = [read_params()["scale"], *scales][-1]
    cfg = chosen(scale, overrides) if arguments else checked()
    check_inside(cfg)
    if cfg.trainer.accelerator == "gpu":
        from pipelines import plan  # imports torch
        from pipelines.app.training import check_gpu

        run = [f"scale={cfg.scale}", *(overrides if arguments else read_params()["overrides"])]
        check_gpu(
            cfg, run[0], lambda: sum(stage["operations"] for stage in plan.rows(cfg.plan, run))
        )
    if arguments:
        write_params({"scale": scale, "overrides": overrides} | lists(cfg, overrides))
    return cfg


def _names_scale(argument: str) -> bool:
    return argument.startswith("scale=") or not set(argument) & {"=", "~"}


def check_inside(cfg: DictConfig) -> None:
    """Raises ValueError for a folder of the run that DVC cannot reach."""
    folders = [Path(cfg.paths[key]) for key in cfg.paths if f"paths.{key}" not in ANYWHERE]
    outside = [path for path in folders if not path.resolve().is_relative_to(Path.cwd())]
    if outside and not Config(str(Path(".dvc").resolve()))["core"].get("no_scm"):
        raise ValueError(
            f"{outside[0]} leads out of the project, to {outside[0].resolve()}, where DVC does not "
            f"follow beside git: work in a copy of the project on that disk, or let DVC do without "
            f"git (dvc config --local core.no_scm true)"
        )


def checked() -> DictConfig:
    """Composes the choice of params.yaml.

    Raises ValueError if apps would have another scale or list than DVC.
    """
    params = OmegaConf.create(read_params())
    cfg = chosen(params.scale, params.overrides)
    ours, of_dvc = (
        {key: str(OmegaConf.select(config, key)).replace("'", "") for key in ("scale", *STAGE_AXES)}
        for config in (cfg, params)
    )
    if others := {key: value for key, value in ours.items() if value != of_dvc[key]}:
        key, value = next(iter(others.items()))
        options = "".join(f" -S '{key}={value}'" for key, value in others.items() if key != "scale")
        raise ValueError(
            f"{key} is {value} at scale={cfg.scale} and {of_dvc[key]} in {PARAMS_FILE}, which DVC "
            f"reads: make repro SCALE={cfg.scale} writes all there; to dvc exp run give "
            f"-S scale={cfg.scale}{options}"
        )
    return cfg


def chosen(scale: str, overrides: Sequence[str]) -> DictConfig:
    """Composes the values of all stages. Raises ValueError for values that DVC cannot pass on."""
    for override in overrides:
        if (key := override.lstrip("+~").partition("=")[0]) in CELLS:
            reason = "every stage makes its own choice: give it to an app alone"
        elif key.startswith("paths.") and key not in ANYWHERE:
            reason = "DVC keeps a run in its folder: work in a copy of the project on another disk"
        else:
            continue
        raise ValueError(f"{override} is not for a run of all stages; {reason}")
    return composed("plan", [f"scale={scale}", *overrides])


def lists(cfg: DictConfig, overrides: Sequence[str]) -> dict[str, list[str]]:
    """Returns the lists that make stages: those of overrides, the scale, or else params.yaml.

    `REPLACED` stores a list of params.yaml that another replaces, so that the next choice can
    restore it.
    """
    params, of_scale = OmegaConf.create(read_params()), values_of_scale(cfg.scale)
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    replaced = load_json(REPLACED, remedy="remove it") if REPLACED.exists() else {}
    of_overrides = {text.lstrip("+").partition("=")[0] for text in overrides}
    for key in STAGE_AXES:
        before[key] = list(OmegaConf.select(params, key))
        written, there = replaced.get(key, (None, None))
        if written == before[key]:
            before[key] = there
        after[key] = (
            list(OmegaConf.select(cfg, key))
            if key in of_overrides
            else of_scale.get(key, before[key])
        )
    notes = {key: [after[key], before[key]] for key in STAGE_AXES if after[key] != before[key]}
    if notes != replaced:
        write_json(REPLACED, notes)
    return after


def write_params(values: Mapping[str, Any]) -> None:
    """Writes values that differ into params.yaml, as DVC would, and prints them."""
    params = parse_yaml_for_update(Path(PARAMS_FILE).read_text(encoding="utf-8"), PARAMS_FILE)
    changes = []
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        place = params[section] if section else params
        if place[name] != value:
            place[name] = value
            changes.append(f"{key} {json.dumps(value)}")
    if changes:
        write_text(PARAMS_FILE, dumps_yaml(params))
        print(f"{PARAMS_FILE} now has {', '.join(changes)}", flush=True)


def to_run(cfg: DictConfig, targets: Sequence[str]) -> Iterator[str]:
    """Yields a line for each stage that has changed or comes after one that has.

    The lines have the minutes that the published run of the scale took. DVC first makes the
    fingerprints, which decide about all other stages. Raises ValueError for targets without a stage
    at this scale.
    """
    published = Path(cfg.paths.results, cfg.scale, TIMES)
    seconds = load_json(published, remedy="restore it") if published.exists() else {}
    with refusals_of_dvc():
        if not needed(Repo(), targets):  # dvc repro would run all stages
            raise ValueError(
                f"scale={cfg.scale} has no stage {' '.join(targets)}; stages are made of the lists "
                f"{', '.join(STAGE_AXES)} of {PARAMS_FILE}"
            )
        Repo(_wait_for_lock=True).reproduce("fingerprints", single_item=True)
        repo = Repo(_wait_for_lock=True)
        needs = needed(repo, targets)
        with repo.lock:
            changed = {stage for stage in needs if stage.status()}
    names = [stage.addressing for stage, needs_of in needs.items() if needs_of & changed]
    minutes = sum(seconds.get(name, 0.0) for name in names) / 60
    yield (
        f"{len(names)} of {len(needs)} stages will run"
        f"{f', about {minutes:.0f} minutes' if minutes else ''}"
    )
    for name in names:
        yield f"  {name}" + (f", {seconds[name] / 60:.1f} minutes" if name in seconds else "")


def needed(repo: Repo, targets: Sequence[str]) -> dict[PipelineStage, set[PipelineStage]]:
    """Returns the stages of targets and all that they need, each with itself and its needs."""
    stages, graph = repo.index.stages, repo.index.graph
    ends = [end for target in targets for end in repo.stage.collect(target, glob=True)]
    needs = {stage: {stage, *descendants(graph, stage)} for stage in stages}
    asked = set().union(*(needs[stage] for stage in (ends if targets else stages)))
    return {stage: needs[stage] for stage in stages if stage in asked}


@contextmanager
def refusals_of_dvc() -> Iterator[None]:
    """Turns errors of DVC and git into a ValueError that names the file and a remedy."""
    try:
        yield
    except NotDvcRepoError:
        raise ValueError(f"{Path.cwd()} has no .dvc: git checkout .dvc, or dvc init") from None
    except SCMError as error:  # as in an unpacked ZIP
        raise ValueError(
            f"{error}: run git init, or dvc config --local core.no_scm true, as make repro does"
        ) from None
    except (DvcException, GitError) as error:
        reasons = dict.fromkeys(one_line(e) for e in (error, error.__cause__) if e)
        remedy = (
            "once what is said above is put right, the same command goes on from there"
            if isinstance(error, ReproductionError)
            else "git status names the files that have changed"
        )
        raise ValueError(f"DVC: {': '.join(reasons)}; {remedy}") from None


if __name__ == "__main__":
    ArgumentParser(
        usage="python -m pipelines.scale [SCALE] [overrides] [-- stages]",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    ).parse_known_args()  # for --help alone
    main()
