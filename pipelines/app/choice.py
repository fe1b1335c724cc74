"""The choice of a run, which params.yaml holds for DVC and every app: scale, axes and overrides."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dvc.config import Config
from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update
from omegaconf import DictConfig, OmegaConf

from pipelines.app import composed
from pipelines.app.values import PARAMS_FILE, committed, leaves, read_params, values_of_scale
from value_aware_attention.files import write_text

AXES = (
    *("grid.kernel", "grid.length", "grid.replicates", "survey.trained"),
    *("grid.pretrained", "grid.extent", "grid.prompts", "grid.joint_prompts"),
)
"""Lists of params.yaml that dvc.yaml makes stages of."""
CELLS = (*("kernel", "length", "replicate", "attention", "model", "pretrained", "extent"),)
"""Config groups in which every stage makes its own choice."""
ANYWHERE = ("paths.cache", "paths.logs", "paths.results", "paths.seeds")
"""Folders that dvc.yaml does not name, so that they may lie outside of the project."""


def choose(arguments: Sequence[str]) -> DictConfig:
    """Writes a scale, axes and overrides into params.yaml; returns the config that they make.

    Without arguments the choice is the one that is there. Raises ValueError, with the file as it
    was, for a run that cannot be.
    """
    params = read_params()
    scales = [text[6:] for text in arguments if text.startswith("scale=")]
    axes = [text for text in arguments if text.partition("=")[0] in AXES]
    overrides = [text for text in arguments if text not in axes and not text.startswith("scale=")]
    if not scales and not overrides:
        overrides = params["overrides"]
    cfg = chosen([params["scale"], *scales][-1], overrides, axes) if arguments else checked()
    check_inside(cfg)
    if cfg.trainer.accelerator == "gpu":
        from pipelines import plan  # which imports torch
        from pipelines.app.training import check_gpu

        run = [f"scale={cfg.scale}", *overrides]
        check_gpu(cfg, run[0], lambda: plan.total_operations(plan.rows(cfg.plan, run)))
    if arguments:
        of_scale, before = values_of_scale(cfg.scale), values_of_scale(params["scale"])
        head, ours = committed(Path.cwd()) or {}, dict(leaves(params))
        lists = {
            key: of_scale.get(key, head.get(key))
            for key in AXES
            if key in of_scale or (key in head and ours[key] == before.get(key))
        }
        for text in axes:
            key = text.partition("=")[0]
            lists[key] = list(OmegaConf.select(cfg, key))
        write({"scale": cfg.scale, "overrides": overrides} | lists)
    return cfg


def check_inside(cfg: DictConfig) -> None:
    """Raises ValueError for a folder of the run to which DVC does not follow."""
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

    Raises ValueError where apps would have another scale or axis than the one that DVC reads.
    """
    params = OmegaConf.create(read_params())
    cfg = chosen(params.scale, params.overrides)
    ours, of_dvc = (
        {key: str(OmegaConf.select(config, key)).replace("'", "") for key in ("scale", *AXES)}
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


def chosen(scale: str, overrides: Sequence[str], axes: Sequence[str] = ()) -> DictConfig:
    """Composes the values of all stages. Raises ValueError for what cannot pass through DVC."""
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in AXES:
            reason = f"DVC reads {key} from {PARAMS_FILE}: set it there"
        elif key in CELLS:
            reason = "every stage makes its own choice: give it to an app alone"
        elif key.startswith("paths.") and key not in ANYWHERE:
            reason = "DVC keeps a run in its folder: work in a copy of the project on another disk"
        else:
            continue
        raise ValueError(f"{override} is not for a run of all stages; {reason}")
    return composed("plan", [f"scale={scale}", *axes, *overrides])


def write(values: Mapping[str, Any]) -> None:
    """Writes values into params.yaml where they are others, as DVC would, and prints these."""
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
