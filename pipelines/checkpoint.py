"""The trained model that an app reads: is it there, whole, and of the scale that was asked for?"""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def check_checkpoint(cfg: DictConfig) -> None:
    """Refuses, before any work, a model that is missing, damaged or of other sizes than cfg.sizes.

    Raises FileNotFoundError or ValueError.
    """
    folder = Path(cfg.checkpoint)
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is missing: train the model first (dvc repro)")
    config = read_config(folder / CONFIG)
    for file in sorted({folder / WEIGHTS, *folder.glob("*.safetensors")}):
        check_weights(file)
    other = [name for name, size in cfg.sizes.items() if config.get(name) != size]
    if other:
        found, asked = (
            ", ".join(f"{name} {sizes.get(name)}" for name in other)
            for sizes in (config, dict(cfg.sizes))
        )
        raise ValueError(
            f"{folder} holds a model with {found}; scale={cfg.scale} asks for {asked}: train it at "
            f"this scale, or give the scale and values that it was trained with"
        )


def read_config(file: Path) -> dict[str, Any]:
    """A model's config.json; ValueError where it is no JSON object."""
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): train the model again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} does not describe a model: train the model again")
    return config


def check_weights(file: Path) -> None:
    """ValueError where a file is not there, is shorter than its header says, or has none."""
    if not file.exists():
        raise ValueError(f"{file} is missing: train the model again")
    try:
        with safe_open(file, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): train the model again") from None
