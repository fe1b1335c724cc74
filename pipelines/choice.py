"""The choice of a run, which params.yaml holds for DVC and every app: scale, axes and overrides."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from pipelines.app import composed
from pipelines.values import PARAMS_FILE, read_params
from value_aware_attention.storage import write_text

AXES = ("grid.kernel", "grid.length", "grid.replicates", "survey.trained", "in_context.task")
"""Lists of params.yaml that dvc.yaml makes stages of."""
CELLS = ("kernel", "length", "replicate", "attention", "task", "model", "texts")
"""Config groups in which every stage makes its own choice."""
ANYWHERE = ("paths.cache", "paths.logs", "paths.results")
"""Folders that dvc.yaml does not name, so that they may lie outside of the project."""


def choose(given: Sequence[str]) -> DictConfig:
    """Writes a scale, its axes and overrides into params.yaml; returns the config that they make.

    Nothing given means the choice that is there. Raises ValueError, with the file as it was, for a
    run that cannot be.
    """
    if not given:
        return checked()
    params = read_params()
    scales = [one.removeprefix("scale=") for one in given if one.startswith("scale=")]
    overrides = [one for one in given if not one.startswith("scale=")]
    check_overrides(overrides)
    cfg = composed("plan", [f"scale={[params['scale'], *scales][-1]}", *overrides])
    wanted = {"scale": cfg.scale, "overrides": overrides}
    wanted |= {key: list(OmegaConf.select(cfg, key)) for key in AXES}
    before = text = Path(PARAMS_FILE).read_text(encoding="utf-8")
    for key, value in wanted.items():
        text = with_value(text, key, value)
    if text != before:
        write_text(PARAMS_FILE, text)
        said = " ".join(overrides) or "no overrides"
        print(f"{PARAMS_FILE}, which DVC reads, has scale {cfg.scale} now and {said}", flush=True)
    return cfg


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


def checked() -> DictConfig:
    """Composes what params.yaml chooses.

    Raises ValueError where apps would have another scale or axis than the one that DVC reads, or an
    override cannot pass through DVC.
    """
    params = OmegaConf.create(read_params())
    check_overrides(params.overrides)
    cfg = composed("plan", [f"scale={params.scale}", *params.overrides])
    for key in ("scale", *AXES):
        ours, of_dvc = OmegaConf.select(cfg, key), OmegaConf.select(params, key)
        if ours != of_dvc:
            found = str(ours).replace("'", "")
            raise ValueError(
                f"{key} is {found} at scale={cfg.scale} and {of_dvc} in {PARAMS_FILE}, which DVC "
                f"reads: make repro SCALE={cfg.scale} writes both there; to dvc exp run give "
                f"-S scale={cfg.scale} -S '{key}={found}'"
            )
    return cfg


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ValueError for an override of all stages that cannot pass through DVC."""
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
