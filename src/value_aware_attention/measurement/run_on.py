"""Describes the hardware and the versions behind a measured number, and shows its progress."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tqdm import tqdm

from value_aware_attention.approximations.closest_combination import engine
from value_aware_attention.distributed import processes
from value_aware_attention.records.record import RunOn


def run_on(device: str = "cpu") -> RunOn:
    """Describes hardware and versions, without naming a machine or a time.

    `device` is the one that computes; the description names its solver's engine.
    """
    used = processor()
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "pytorch-lightning", "datasets", "numpy"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return RunOn(
        hardware=torch.cuda.get_device_name() if torch.cuda.is_available() else cores_of(used),
        processor=used,
        threads=torch.get_num_threads(),
        versions=versions,
        engine=engine(device),
        processes=processes(),
    )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str | None]:
    """Finds the CPU's name, family and model, and the instruction set of PyTorch's vectors.

    Processors of one name can differ in the rest, and sums over vectors of another width round
    differently. None stands for an unknown fact.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    # so that the first core wins
    told = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in reversed(lines))
    }
    return {
        "name": told.get("model name") or platform.processor() or platform.machine(),
        "family": told.get("cpu family"),
        "model": told.get("model"),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def cores_of(used: dict[str, str | None]) -> str:
    """Names the cores that this process may use: "2 cores of AMD EPYC (family 25, ...)"."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kind = [f"{name} {used[name]}" for name in ("family", "model") if used[name]]
    return f"{cores} cores of {used['name']} ({', '.join([*kind, str(used['vectors'])])})"


class Progress(tqdm):
    """Draws a bar on a terminal; elsewhere it writes a line after every tenth of the work."""

    tenths = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draws the bar, or writes a line where another tenth of `total` is done.

        Returns whether there is a bar, which is cleared at the end.
        """
        if self.fp.isatty():
            return bool(super().display(msg, pos))
        tenths = int(10 * self.n / self.total + 1e-9)
        if tenths > self.tenths:
            self.tenths = tenths
            left = self.format_dict["elapsed"] * max(self.total / self.n - 1, 0)
            end = f"; {self.postfix}" if self.postfix else ""
            self.fp.write(f"{10 * tenths}% measured, {self.format_interval(left)} left{end}\n")
        return False
