"""Peak memory of a call as Linux counts it, and processes in which nothing ran before."""

import ctypes
import gc
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """Runs function(*arguments), both of which can be pickled, in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def resident_peak(work: Callable[[], object]) -> float:
    """Measures the peak MiB of a call beyond what this process holds now, compiled code included.

    A call before it may leave freed blocks that hide what this one needs: use a fresh process.
    """
    gc.collect()
    # glibc returns freed blocks to the system, which would hide what the call needs
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = _reported_mib("VmRSS")
    work()
    return max(0.0, _reported_mib("VmHWM") - before)


def _reported_mib(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) / 1024
