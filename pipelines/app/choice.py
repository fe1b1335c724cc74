"""The choice of a run, which params.yaml holds for DVC and every app: scale, axes and overrides."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from dvc.config import Config
from omegaconf import DictConfig, OmegaConf

from pipelines.app import composed
from pipelines.app.values import PARAMS_FILE, edited_params, read_params, values_of_scale
from value_aware_attention.files import write_text

AXES = (
    *("grid.kernel", "grid.length", "grid.replicates", "survey.trained"),
    *("in_context.task", "in_context.replicates"),
)
"""Lists of params.yaml that dvc.yaml makes stages of."""
CELLS = ("kernel", "length", "replicate", "attention", "task", "model", "texts", "measured")
"""Config groups in which every stage makes its own choice."""
ANYWHERE = ("paths.cache", "paths.logs", "paths.results", "paths.seeds")
"""Folders that dvc.yaml does not name, so that they may lie outside of the project."""


def choose(given: Sequence[str]) -> DictConfig:
    """Writes a scale, axes and overrides into params.yaml; returns the config that they make.

    Nothing given means the choice that is there. Raises ValueError, with the file as it was, for a
    run that cannot be.
    """
    before = Path(PARAMS_FILE).read_text(encoding="utf-8")
    pairs = [one.partition("=") for one in given]
    try:
        axes = {key: yaml.safe_load(value) for key, _, value in pairs if key in AXES}
    except yaml.YAMLError:
        raise ValueError(
            f"{' '.join(given)} is no YAML; a list is written [second,third]"
        ) from None
    try:
        write(axes)
        return _chosen(["".join(pair) for pair in pairs if pair[0] not in AXES])
    except ValueError:
        if Path(PARAMS_FILE).read_text(encoding="utf-8") != before:
            write_text(PARAMS_FILE, before)
        raise


def _chosen(given: Sequence[str]) -> DictConfig:
    """Writes a scale, its axes and overrides, where any are given."""
    params = read_params()
    scales = [params["scale"], *(one[6:] for one in given if one.startswith("scale="))]
    overrides = [one for one in given if not one.startswith("scale=")]
    cfg = chosen(scales[-1], overrides) if given else checked()
    outside = [
        folder
        for key, folder in cfg.paths.items()
        if f"paths.{key}" not in ANYWHERE and not Path(folder).resolve().is_relative_to(Path.cwd())
    ]
    if outside and not Config(str(Path(".dvc").resolve()))["core"].get("no_scm"):
        raise ValueError(
            f"{outside[0]} leads out of the project, to {Path(outside[0]).resolve()}, where DVC "
            f"does not follow beside git: work in a copy of the project on that disk, or let DVC "
            f"do without git (dvc config --local core.no_scm true)"
        )
    if cfg.trainer.accelerator == "gpu":
        from pipelines import plan  # which imports torch
        from pipelines.app.training import check_gpu

        every = [f"scale={cfg.scale}", *(overrides if given else params["overrides"])]
        check_gpu(cfg, every[0], lambda: plan.total_operations(plan.rows(cfg.plan, every)))
    if given:
        of_scale = values_of_scale("laptop") | values_of_scale(cfg.scale)
        axes = {
            key: of_scale[key] for key in AXES if key in of_scale and key not in edited_params()
        }
        write({"scale": cfg.scale, "overrides": overrides} | axes)
    return cfg


def checked() -> DictConfig:
    """Composes the choice of params.yaml.

    Raises ValueError where apps would have another scale or axis than the one that DVC reads.
    """
    params = OmegaConf.create(read_params())
    cfg = chosen(params.scale, params.overrides)
    ours, of_dvc = (
        {key: str(OmegaConf.select(of, key)).replace("'", "") for key in ("scale", *AXES)}
        for of in (cfg, params)
    )
    if others := {key: found for key, found in ours.items() if found != of_dvc[key]}:
        key, found = next(iter(others.items()))
        given = "".join(f" -S '{key}={found}'" for key, found in others.items() if key != "scale")
        raise ValueError(
            f"{key} is {found} at scale={cfg.scale} and {of_dvc[key]} in {PARAMS_FILE}, which DVC "
            f"reads: make repro SCALE={cfg.scale} writes all there; to dvc exp run give "
            f"-S scale={cfg.scale}{given}"
        )
    return cfg


def chosen(scale: str, overrides: Sequence[str]) -> DictConfig:
    """Composes the values of all stages. Raises ValueError for what cannot pass through DVC."""
    for one in overrides:
        key = one.lstrip("+~").partition("=")[0]
        if key in AXES:
            reason = f"DVC reads {key} from {PARAMS_FILE}: set it there"
        elif key in CELLS:
            reason = "every stage makes its own choice: give it to an app alone"
        elif key.startswith("paths.") and key not in ANYWHERE:
            reason = "DVC keeps a run in its folder: work in a copy of the project on another disk"
        else:
            continue
        raise ValueError(f"{one} is not for a run of all stages; {reason}")
    return composed("plan", [f"scale={scale}", *overrides])


def write(values: Mapping[str, Any]) -> None:
    """Writes values into params.yaml where they are others, and says so."""
    before = text = Path(PARAMS_FILE).read_text(encoding="utf-8")
    for key, value in values.items():
        text = with_value(text, key, value)
    if text != before:
        write_text(PARAMS_FILE, text)
        said = ", ".join(f"{key} {json.dumps(value)}" for key, value in values.items())
        if "scale" in values:
            said = f"scale {values['scale']} and {' '.join(values['overrides']) or 'no overrides'}"
        print(f"{PARAMS_FILE} now has {said}", flush=True)


def with_value(text: str, key: str, value: Any) -> str:
    """Returns a text of params.yaml with another value of a key; comments and layout stay."""
    node = yaml.compose(text)
    for name in key.split("."):
        node = next(inner for own, inner in node.value if own.value == name)
    start, end = node.start_mark.index, node.end_mark.index
    if yaml.safe_load(text[start:end]) == value:
        return text
    end = start + len(text[start:end].rstrip())  # a block ends where the next key starts
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{text[:start]}{written}{text[end:]}"
