"""Runs apps in this process, and catches the line with which they refuse a command."""

import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from altair.utils.schemapi import debug_mode
from hydra._internal.hydra import Hydra

from tests.training.processes import save_tokenizer, write_tokens
from value_aware_attention.kernels import Elu
from value_aware_attention.models import CausalLanguageModel

ROOT = Path(__file__).parents[1]


def run_app(command: str, folder: Path) -> None:
    """Runs an app as the command line would: below `folder`, at smoke scale, without a logger.

    Altair then checks each chart once, as it is written, and not each part as it is made. Hydra
    does not compose the config a first time to read `hydra.mode`, which no config sets.
    """
    name, *given = command.split()
    options = [f"paths.root={folder}", "trainer.accelerator=cpu"]
    for key, value in (("logger", "none"), ("scale", "smoke")):
        if not any(one.startswith(f"{key}=") for one in given):
            options.append(f"{key}={value}")
    arguments = sorted([*options, *given], key=lambda argument: not argument.startswith("-"))
    with debug_mode(False), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        patch.setattr(sys, "argv", [f"pipelines.{name}", *arguments])
        import_module(f"pipelines.{name}").main()


def refusal(command: str, folder: Path) -> str:
    """Returns the one line that an app ends with, and checks that nothing half written is left."""
    with pytest.raises(SystemExit) as stop:
        run_app(command, folder)
    line = str(stop.value)
    assert line.startswith("error: ") and "\n" not in line
    assert not list(folder.rglob("*.partial"))
    return line


def write_run(root: Path) -> Path:
    """Writes random tokens and a model with random weights, as a run leaves them."""
    write_tokens(root)
    torch.manual_seed(0)
    model = CausalLanguageModel(
        vocabulary_size=60, layers=2, width=64, heads=1, feedforward=64, kernel=Elu(), dropout=0.0
    )  # fmt: skip
    model.save_pretrained(root / "outputs/smoke/models/causal_elu")
    save_tokenizer(root / "outputs/smoke/models/causal_elu")
    return root


def copy_of_the_project(folder: Path, *names: str) -> Path:
    """Copies files and folders of the project without compiled code."""
    for name in names:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    return folder
