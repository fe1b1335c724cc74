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
CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("torch", "transformers", "pytorch-lightning", "datasets", "numpy")


def run_on() -> dict[str, Any]:
    """Hardware and versions, without anything that names a machine or a time."""
    used = processor()
    return {
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else cores_of(used),
        "processor": used,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
    }


def processor(cpuinfo: Path = CPUINFO) -> dict[str, str | None]:
    """The CPU's name, family and model, and the instruction set that PyTorch's vectors use.

    Processors of one name can differ in the others, and sums in vectors of another width round
    otherwise. What the system does not tell is None.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = (line.partition(":") for line in reversed(lines))  # the first core's come last
    told = {name.strip(): value.strip() for name, _, value in fields}
    return {
        "name": told.get("model name") or platform.processor() or platform.machine(),
        "family": told.get("cpu family"),
        "model": told.get("model"),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def cores_of(used: dict[str, str | None]) -> str:
    """How many cores this process may use, and of what: "2 cores of AMD EPYC (family 25, ...)"."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kind = [f"{name} {used[name]}" for name in ("family", "model") if used[name]]
    return f"{cores} cores of {used['name']} ({', '.join([*kind, str(used['vectors'])])})"


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
