"""The benchmark of every method at every length: peak memory and time, all kept on disk."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Measurement, Timer
from tqdm import tqdm

from value_aware_attention.measurement.store import RecordCache, defining_module, source_hash
from value_aware_study.benchmarking.passes import PASSES, Setting, Subject, Work

Cell = dict[str, Any]
HOW = (
    "Time: torch.utils.benchmark.Timer, median over rounds in which every method runs at one "
    "length in turn, warm-up not counted; bars are quartiles. Memory: the largest sum of tensors "
    "that PyTorch holds at once during one pass (torch.profiler), above those that stay: weights, "
    "inputs, the layout of a pattern."
)
ROUNDS = 6
"""A 95% interval of a median takes six."""
SHARE_OF_MEMORY = 0.7
"""Share of the memory that a pass may be predicted to need."""
# The profiler's C++ library announces every start and end on stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@dataclass(frozen=True)
class Benchmark:
    """Measures methods in one setting.

    Each pass is timed for about `seconds`, all lengths together, in six rounds. Methods that are
    predicted (from the previous length) to exceed `slowest` seconds are left out.
    """

    subjects: Sequence[Subject]
    setting: Setting
    seconds: float
    slowest: float
    cache: RecordCache

    def cells(self, lengths: Mapping[str, Sequence[int]]) -> Iterator[Cell]:
        """Yields a cell per pass, length and method: time and peak memory, or why it is left out.

        Raises ValueError, before any work, for a method that cannot run at the shortest length.
        """
        self.check(min(min(sizes) for sizes in lengths.values()))
        for name, sizes in lengths.items():
            before: dict[str, Cell] = {}
            for length in tqdm(sorted(set(sizes)), desc=name, disable=None):
                cells = self._at_length(name, length, self.seconds / len(sizes), before)
                before = {cell["method"]: cell for cell in cells}
                yield from cells

    def check(self, length: int) -> None:
        """Runs every method once, to refuse before any work what cannot run."""
        here = replace(self.setting, device="cpu", batch=1)
        for subject in self.subjects:
            try:
                PASSES["attention"](subject, length, here)()
            except (ValueError, TypeError) as error:
                raise ValueError(f"{subject.name} at length {length}: {error}") from error

    def _at_length(
        self, name: str, length: int, seconds: float, before: Mapping[str, Cell]
    ) -> list[Cell]:
        """Measures the methods that are not left out, or finds their cells again."""
        left_out = {method: self._too_much(length, cell) for method, cell in before.items()}
        subjects = [subject for subject in self.subjects if not left_out.get(subject.name)]
        key = {"pass": name, "length": length, "seconds": seconds} | asdict(self.setting)
        key["methods"] = {subject.name: subject.config for subject in subjects}
        measured = self.cache.get(key, lambda: self._measured(name, length, seconds, subjects))
        return [
            {"pass": name, "length": length, "method": subject.name}
            | {"arguments": subject.arguments(length)}
            | measured.get(subject.name, {"left_out": left_out.get(subject.name)})
            for subject in self.subjects
        ]

    def _measured(
        self, name: str, length: int, seconds: float, subjects: Sequence[Subject]
    ) -> dict[str, Cell]:
        torch.set_num_threads(self.setting.threads)
        cells: dict[str, Cell] = {}
        timers: dict[str, Timer] = {}
        for subject in subjects:
            work = PASSES[name](subject, length, self.setting)
            try:
                cells[subject.name] = {"peak_mib": round(peak_mib(work, self.setting.device), 3)}
            except RuntimeError as error:  # out of memory has no class of its own on a CPU
                if "memory" not in str(error):
                    raise
                cells[subject.name] = {"left_out": str(error).partition("\n")[0]}
            else:
                timers[subject.name] = Timer(
                    "work()", globals={"work": work}, num_threads=self.setting.threads
                )
        turns = in_turn(timers, seconds)
        return {
            method: cell | ({"time": summary(turns[method])} if method in turns else {})
            for method, cell in cells.items()
        }

    def _too_much(self, length: int, before: Cell) -> str | None:
        """Says why a length is left out, predicted from the length before; None = it is not.

        Work grows as the method counts it, or else with the square of the length.
        """
        if "left_out" in before:
            return before["left_out"]
        subject = next(x for x in self.subjects if x.name == before["method"])
        short, long = (subject.multiply_adds(n, self.setting) for n in (before["length"], length))
        ratio = length / before["length"]
        growth = max(ratio, long / short) if short and long else ratio**2
        seconds = growth * before["time"]["milliseconds"] / 1000
        if seconds > self.slowest:
            return f"expected to take up to {seconds:.0f} s, more than slowest = {self.slowest:g}"
        mib = growth * before["peak_mib"]
        if mib > SHARE_OF_MEMORY * memory_mib(self.setting.device):
            return f"expected to need up to {mib / 1024:.0f} GiB of memory"
        return None


def peak_mib(work: Work, device: str) -> float:
    """Measures the largest MiB of tensors that a call holds beyond those that were there before.

    A call before it makes what stays, like the layout of a pattern for this length.
    """
    work()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    in_order = sorted(changes, key=lambda change: change[0])
    return max(accumulate((count for _, count in in_order), initial=0)) / 2**20


def in_turn(timers: Mapping[str, Timer], seconds: float) -> dict[str, list[Measurement]]:
    """Times for about `seconds` in rounds of all timers, so that a slow spell falls on them all."""
    turn = seconds / ROUNDS / max(1, len(timers))
    rounds = [
        {name: timer.blocked_autorange(min_run_time=turn) for name, timer in timers.items()}
        for _ in range(ROUNDS)
    ]
    return {name: [measured[name] for measured in rounds] for name in timers}


def summary(turns: Sequence[Measurement]) -> Cell:
    """Computes median and quartiles in milliseconds, the number of passes, each round's median."""
    milliseconds = [1000 * second for turn in turns for second in turn.times]
    low, middle, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    ends = {"milliseconds": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}
    passes = sum(turn.number_per_run * len(turn.times) for turn in turns)
    return ends | {"passes": passes, "rounds": [round(1000 * turn.median, 4) for turn in turns]}


def memory_mib(device: str) -> float:
    """Returns the free MiB of a GPU, or the MiB of this machine."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0] / 2**20
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20


def source_of(subjects: Sequence[Subject]) -> str:
    """Hashes the code that is timed and the code that times it."""
    timed = {defining_module(subject.config["build"]["_target_"]) for subject in subjects}
    return source_hash(Benchmark.__module__, *sorted(timed))


def training_times(cells: Sequence[Cell]) -> dict[str, float]:
    """Returns milliseconds of forward + backward at the longest length, by method."""
    timed = (cell for cell in cells if cell["pass"] == "forward_backward" and "time" in cell)
    return {cell["method"]: cell["time"]["milliseconds"] for cell in timed}
