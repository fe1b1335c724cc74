"""The benchmark of every method at every length: memory first, then times, all kept on disk."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from value_aware_attention.measurement.store import RecordCache
from value_aware_study.benchmarking.passes import (
    PASSES,
    Setting,
    Subject,
    prepare,
)
from value_aware_study.benchmarking.process import (
    RESET,
    import_once,
    in_fresh_process,
    peak_memory,
    reported_mib,
    summary,
    times,
)

Cell = dict[str, Any]
SHARE_OF_MEMORY = 0.8
"""Share of the free memory that a pass may be predicted to need."""

MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Plan:
    """Says which passes run at which lengths, and for how long.

    Each pass is timed for `seconds`, all lengths together, and for six rounds at least. Passes
    predicted (from the previous length) to exceed `slowest` seconds are skipped and recorded as
    skipped.
    """

    lengths: Mapping[str, Sequence[int]]
    seconds: float
    slowest: float

    def __post_init__(self) -> None:
        for name, lengths in self.lengths.items():
            if name not in PASSES:
                raise ValueError(f"the pass is {name!r}; it must be one of {', '.join(PASSES)}")
            for length in lengths:
                if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                    raise ValueError(f"a length is {length!r}; it must be an integer >= 1")
        if not any(self.lengths.values()):
            raise ValueError("no lengths given; at least one pass must have a length")

    def passes(self) -> dict[str, list[int]]:
        """Returns the lengths of every pass, shortest first."""
        return {name: sorted(set(lengths)) for name, lengths in self.lengths.items() if lengths}

    def shortest(self) -> int:
        """Returns the length of the pass that warms a process up."""
        return min(min(lengths) for lengths in self.passes().values())


def measure(
    subjects: Sequence[Subject], plan: Plan, setting: Setting, cache: RecordCache
) -> list[Cell]:
    """Measures a cell per pass, length and method: time and peak memory, or why it is skipped."""
    if not setting.device.startswith("cuda") and not RESET.exists():
        raise ValueError(f"peak memory is read from {RESET}: it needs Linux, or a CUDA device")
    check(subjects, plan.shortest(), setting)
    import_once({subject.module_name for subject in subjects})
    passes = plan.passes()
    count = sum(len(lengths) * len(subjects) + 1 for lengths in passes.values())
    cells: list[Cell] = []
    with tqdm(total=count, unit="measurement", disable=None) as progress:
        for name, lengths in passes.items():
            run = _Pass(name, lengths, subjects, plan, setting, cache)
            cells.extend(run.cells(progress))
    return cells


def check(subjects: Sequence[Subject], length: int, setting: Setting) -> None:
    """Runs every method once at the shortest length, to refuse before any work what cannot run."""
    here = replace(setting, device="cpu", batch=1)
    for subject in subjects:
        try:
            prepare("attention", subject, length, here)()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{subject.name} at length {length}: {error}") from error


@dataclass(frozen=True)
class _Pass:
    """Measures one pass of all methods at all its lengths."""

    name: str
    lengths: Sequence[int]
    subjects: Sequence[Subject]
    plan: Plan
    setting: Setting
    cache: RecordCache

    def cells(self, progress: tqdm) -> Iterator[Cell]:
        memory = {
            subject.name: self._memory_by_length(subject, progress) for subject in self.subjects
        }
        runs = [
            (subject, length)
            for subject in self.subjects
            for length in self.lengths
            if "left_out" not in memory[subject.name][length]
        ]
        progress.set_postfix_str(f"time, {self.name}, {len(runs)} methods and lengths")
        timed = self._times(runs) if runs else []
        progress.update()
        time = {
            (run[0].name, run[1]): {"time": found} for run, found in zip(runs, timed, strict=True)
        }
        for length in self.lengths:
            for subject in self.subjects:
                measured = memory[subject.name][length]
                yield {
                    "pass": self.name,
                    "length": length,
                    "method": subject.name,
                    "arguments": subject.arguments(length),
                    **{key: measured[key] for key in measured if key != "seconds"},
                    **time.get((subject.name, length), {}),
                }

    def _key(self, what: str) -> dict[str, Any]:
        return {"what": what, "pass": self.name} | asdict(self.setting)

    def _memory_by_length(self, subject: Subject, progress: tqdm) -> dict[int, Cell]:
        found: dict[int, Cell] = {}
        for before, length in zip([None, *self.lengths], self.lengths, strict=False):
            progress.set_postfix_str(f"memory, {self.name}, L = {length}, {subject.name}")
            reason = self._too_much(subject, before, length, found) if before else None
            found[length] = {"left_out": reason} if reason else self._memory(subject, length)
            progress.update()
        return found

    def _memory(self, subject: Subject, length: int) -> Cell:
        small = min(self.plan.shortest(), length)

        def compute() -> Cell:
            given = (self.name, subject, length, small, self.setting)
            try:
                peak, seconds = in_fresh_process(peak_memory, *given)
            except MemoryError as error:
                return {"left_out": str(error)}
            except ValueError as error:
                raise ValueError(f"{subject.name} at length {length}: {error}") from error
            return {"peak_mib": round(peak, 3), "seconds": seconds}

        key = self._key("memory") | {"length": length, "subject": subject.key()}
        return self.cache.get(key, compute)

    def _times(self, runs: Sequence[tuple[Subject, int]]) -> list[dict[str, Any]]:
        def compute() -> dict[str, list[dict[str, Any]]]:
            given = (self.name, runs, self.plan.seconds, self.setting)
            return {"runs": [summary(rounds) for rounds in in_fresh_process(times, *given)]}

        named = [(subject.key(), length) for subject, length in runs]
        key = self._key("time") | {"runs": named, "seconds": self.plan.seconds}
        return self.cache.get(key, compute)["runs"]

    def _too_much(
        self, subject: Subject, before: int, length: int, found: Mapping[int, Cell]
    ) -> str | None:
        """Says why a length is skipped, predicted from the length before; None = it is not."""
        last = found[before]
        if "left_out" in last:
            return last["left_out"]
        growth = self._growth(subject, before, length)
        seconds = growth * last["seconds"]
        if seconds > self.plan.slowest:
            return (
                f"expected to take up to {seconds:.0f} s, more than slowest = {self.plan.slowest:g}"
            )
        mib, free = growth * last["peak_mib"], available_mib(self.setting.device)
        if mib > SHARE_OF_MEMORY * free:
            return f"expected to need up to {mib / 1024:.0f} GiB of memory"
        return None

    def _growth(self, subject: Subject, shorter: int, length: int) -> float:
        """Predicts the growth of work from a shorter length: as counted, else quadratic."""
        counts = [subject.multiply_adds(n, self.setting) for n in (shorter, length)]
        ratio = length / shorter
        if counts[0] is None or counts[1] is None:
            return ratio**2
        return max(ratio, counts[1] / counts[0])


def available_mib(device: str) -> float:
    """Reads the free memory in MiB."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0] / 2**20
    return reported_mib(MEMORY, "MemAvailable")


def training_times(cells: Sequence[Cell]) -> dict[str, float]:
    """Returns milliseconds of forward + backward at the longest length, by method."""
    timed = (cell for cell in cells if cell["pass"] == "forward_backward" and "time" in cell)
    return {cell["method"]: cell["time"]["milliseconds"] for cell in timed}
