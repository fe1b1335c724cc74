"""What a number was made from and measured on."""

import os
import platform
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

MODEL_CARD = "README.md"
PACKAGES = ("torch", "transformers", "pytorch-lightning", "datasets", "numpy")


def run_on() -> dict[str, Any]:
    """Hardware and versions, without anything that names a machine or a time."""
    return {
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
    }


def processor() -> str:
    """The CPU's model name and the number of cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{cores} cores of {names[0] if names else platform.processor() or platform.machine()}"


def file_hash(paths: Iterable[Path | str]) -> str:
    """sha256 over the bytes of files and of every file below folders, in order of their names.

    A model's card is left out: no number depends on it.
    """
    digest = sha256()
    for path in map(Path, paths):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files = [file for file in files if file.name != MODEL_CARD]
        for file in files:
            digest.update(file.name.encode() + b"\0")
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()
