"""Measures peak memory of a call, as PyTorch or Linux counts it, and starts fresh processes."""

import ctypes
import gc
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")
# The profiler writes a line to stderr whenever it starts and ends, below level 6.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """Runs function(*arguments), both of which can be pickled, in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def tensor_peak(work: Callable[[], object], device: str) -> float:
    """Measures the peak MiB of PyTorch's tensors during a call, beyond those held before it.

    A first, unmeasured call makes what stays in memory, such as the layout of a pattern.
    """
    work()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in changes), initial=0)) / 2**20


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
