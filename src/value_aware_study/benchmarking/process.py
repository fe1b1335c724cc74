"""Measurements in fresh processes: the peak memory of one pass, and the times of several.

A process is forked from a server that has imported everything and computed nothing, so it is as
fresh as a new one without the seconds that importing torch takes.
"""

import ctypes
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from value_aware_study.benchmarking.passes import Setting, Subject, Work, prepare

# Imports a part of torch that takes half a second: here, before processes are forked.
torch.broadcast_shapes((1,), (1,))

TURN = 0.05
"""Seconds for which a short pass is repeated in a round."""
LEAST, MOST = 6, 30
"""Fewest and most rounds of timing; a 95% interval of a median takes six."""
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def import_once(modules: Iterable[str]) -> None:
    """Makes the server of processes import `modules`, so that no process has to."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *sorted(modules)])


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs function(*arguments) in a new process; MemoryError if the system or device ran out.

    Raises ValueError with the function's own words where it raised one.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments), daemon=True)
    # Every process would import the program's main module first: seconds, and nothing it needs.
    # The server does not take over sys.path and would preload another copy of the library, or none.
    with (
        patch.dict(sys.modules, {"__main__": ModuleType("__main__")}),
        patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}),
    ):
        process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        result = MemoryError(f"the process was ended with exit code {process.exitcode}")
    except KeyboardInterrupt:
        process.terminate()
        raise
    process.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _run(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    gc.freeze()  # collecting the server's objects would copy every page they are on
    try:
        sender.send(function(*arguments))
    except torch.OutOfMemoryError as error:
        sender.send(MemoryError(str(error).partition("\n")[0]))
    except RuntimeError as error:  # what the CPU allocator raises has no class of its own
        short = "allocate memory" in str(error)
        sender.send((MemoryError if short else RuntimeError)(str(error).partition("\n")[0]))
    except (MemoryError, ValueError, TypeError) as error:
        sender.send(type(error)(str(error)))


def peak_memory(
    name: str, subject: Subject, length: int, small: int, setting: Setting
) -> tuple[float, float]:
    """Measures the peak MiB of one pass beyond the weights and inputs that the process holds.

    A pass at the length `small` comes first, so that libraries have set themselves up. Also returns
    the seconds that the pass took, a first guess of its time.
    """
    torch.set_num_threads(setting.threads)
    prepare(name, subject, small, setting)()
    work = prepare(name, subject, length, setting)
    began = time.perf_counter()
    peak = _cuda_peak(work) if setting.device.startswith("cuda") else resident_peak(work)
    return peak, time.perf_counter() - began


def resident_peak(work: Work) -> float:
    """Measures the peak MiB of a call beyond what this process holds now, as Linux counts it."""
    gc.collect()
    # glibc returns freed blocks to the system, which would hide what the pass needs
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    RESET.write_text("5")  # the peak from here on
    before = reported_mib(STATUS, "VmRSS")
    work()
    return max(0.0, reported_mib(STATUS, "VmHWM") - before)


def _cuda_peak(work: Work) -> float:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def reported_mib(file: Path, name: str) -> float:
    """Reads a figure of memory in MiB from a file in which Linux reports KiB."""
    lines = file.read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1024


def times(
    name: str, runs: Sequence[tuple[Subject, int]], seconds: float, setting: Setting
) -> list[list[list[float]]]:
    """Times the passes of every (method, length), round by round, after one that is not counted.

    A round runs all in turn, so that a slow spell of the machine slows every method and length.
    There are at least LEAST rounds, more while `seconds` are not used up, at most MOST; every other
    round goes backwards. In its turn a pass is repeated until TURN is over.
    """
    torch.set_num_threads(setting.threads)
    works = [prepare(name, subject, length, setting) for subject, length in runs]
    spent: list[list[list[float]]] = [[] for _ in works]
    for work in works:
        work()
    started, rounds = time.perf_counter(), 0
    while rounds < LEAST or (rounds < MOST and time.perf_counter() - started < seconds):
        for place in range(len(works)) if rounds % 2 else reversed(range(len(works))):
            spent[place].append(_turn(works[place]))
        rounds += 1
    return spent


def _turn(work: Work) -> list[float]:
    """Times each pass of a turn."""
    spent: list[float] = []
    while sum(spent) < TURN:
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return spent


def summary(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Computes median and quartiles in milliseconds, the number of passes, each round's median."""
    seconds = [second for turn in rounds for second in turn]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    ends = {"milliseconds": middle, "low": low, "high": high}
    found = {key: round(1000 * value, 4) for key, value in ends.items()}
    medians = [round(1000 * statistics.median(turn), 4) for turn in rounds]
    return found | {"passes": len(seconds), "rounds": medians}
