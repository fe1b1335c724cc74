"""Every method at every length: memory first, then times, with what was measured kept on disk."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from value_aware_attention.benchmarking.passes import (
    PASSES,
    Setting,
    Subject,
    prepare,
)
from value_aware_attention.benchmarking.process import (
    RESET,
    import_once,
    in_fresh_process,
    peak_memory,
    summary,
    times,
)

__all__ = ["MeasurementCache", "Plan", "measure"]

Cell = dict[str, Any]
SHARE_OF_MEMORY = 0.8
MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Plan:
    """Which passes at which lengths, and how long to go on.

    `seconds`: of timing for each pass and length. `slowest`: a pass that the next length is
    expected to bring above this many seconds is left out, and said to be.
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

    def steps(self) -> list[tuple[str, int]]:
        """(pass, length), short ones first in each pass."""
        return [(name, n) for name, lengths in self.lengths.items() for n in sorted(set(lengths))]

    def shortest(self) -> int:
        """What warms a process up."""
        return min(length for _, length in self.steps())


class MeasurementCache:
    """Measurements as JSON files, named by a hash of everything that decides them."""

    def __init__(self, folder: Path | str, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = dict(identity)

    def get(self, key: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """The measurement, found again or made and then kept."""
        text = json.dumps(self.identity | dict(key), sort_keys=True)
        path = self.folder / f"{sha256(text.encode()).hexdigest()}.json"
        if path.exists():
            return json.loads(path.read_text())
        result = compute()
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(result))
        partial.replace(path)
        return result


def measure(
    subjects: Sequence[Subject], plan: Plan, setting: Setting, cache: MeasurementCache
) -> list[Cell]:
    """One cell per pass, length and method: time and peak memory, or why there is none."""
    if not setting.device.startswith("cuda") and not RESET.exists():
        raise ValueError(f"peak memory is read from {RESET}: it needs Linux, or a CUDA device")
    check(subjects, plan.shortest(), setting)
    import_once({subject.module_name for subject in subjects})
    cells: list[Cell] = []
    with tqdm(total=len(plan.steps()) * (len(subjects) + 1), unit="measurement") as progress:
        for name, length in plan.steps():
            run = _Step(name, length, subjects, plan, setting, cache, cells)
            cells.extend(run.cells(progress))
    return cells


def check(subjects: Sequence[Subject], length: int, setting: Setting) -> None:
    """Runs every method once at the shortest length: what cannot run is said before any work."""
    here = replace(setting, device="cpu", batch=1)
    for subject in subjects:
        try:
            prepare("attention", subject, length, here)()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{subject.name} at length {length}: {error}") from error


@dataclass(frozen=True)
class _Step:
    """One pass at one length, of all methods."""

    name: str
    length: int
    subjects: Sequence[Subject]
    plan: Plan
    setting: Setting
    cache: MeasurementCache
    before: Sequence[Cell]
    """What was measured so far, from which the cost of this step is foreseen."""

    def cells(self, progress: tqdm) -> Iterator[Cell]:
        memory: dict[str, Cell] = {}
        for subject in self.subjects:
            progress.set_postfix_str(f"memory, {self.name}, L = {self.length}, {subject.name}")
            memory[subject.name] = self._memory(subject)
            progress.update()
        running = [s for s in self.subjects if "left_out" not in memory[s.name]]
        progress.set_postfix_str(f"time, {self.name}, L = {self.length}, {len(running)} methods")
        timed = self._times(running) if running else {}
        progress.update()
        for subject in self.subjects:
            yield {
                "pass": self.name,
                "length": self.length,
                "method": subject.name,
                "arguments": subject.arguments(self.length),
                **memory[subject.name],
                **({"time": timed[subject.name]} if subject.name in timed else {}),
            }

    def _key(self, what: str, subjects: Sequence[Subject]) -> dict[str, Any]:
        key = {"what": what, "pass": self.name, "length": self.length}
        return key | asdict(self.setting) | {"subjects": [s.key() for s in subjects]}

    def _memory(self, subject: Subject) -> Cell:
        reason = self._too_much(subject)
        if reason:
            return {"left_out": reason}
        small = min(self.plan.shortest(), self.length)

        def compute() -> Cell:
            given = (self.name, subject, self.length, small, self.setting)
            try:
                return {"peak_mib": round(in_fresh_process(peak_memory, *given), 3)}
            except MemoryError as error:
                return {"left_out": str(error)}
            except ValueError as error:
                raise ValueError(f"{subject.name} at length {self.length}: {error}") from error

        return self.cache.get(self._key("memory", [subject]), compute)

    def _times(self, subjects: Sequence[Subject]) -> dict[str, Any]:
        def compute() -> dict[str, Any]:
            given = (self.name, subjects, self.length, self.plan.seconds, self.setting)
            spent = in_fresh_process(times, *given)
            return {name: summary(seconds) for name, seconds in spent.items()}

        key = self._key("time", subjects) | {"seconds": self.plan.seconds}
        return self.cache.get(key, compute)

    def _too_much(self, subject: Subject) -> str | None:
        """Why this method is not measured here, going by the last length that it was."""
        earlier = [c for c in self.before if (c["pass"], c["method"]) == (self.name, subject.name)]
        if not earlier:
            return None
        last = earlier[-1]
        if "left_out" in last:
            return last["left_out"]
        growth = self._growth(subject, last["length"])
        seconds = growth * last["time"]["milliseconds"] / 1000
        if seconds > self.plan.slowest:
            return (
                f"expected to take up to {seconds:.0f} s, more than slowest = {self.plan.slowest:g}"
            )
        mib, free = growth * last["peak_mib"], available_mib(self.setting.device)
        if mib > SHARE_OF_MEMORY * free:
            return f"expected to need up to {mib / 1024:.0f} GiB of memory"
        return None

    def _growth(self, subject: Subject, shorter: int) -> float:
        """How much more work than at a shorter length: as counted, else that of all pairs."""
        counts = [subject.multiply_adds(n, self.setting) for n in (shorter, self.length)]
        ratio = self.length / shorter
        if counts[0] is None or counts[1] is None:
            return ratio**2
        return max(ratio, counts[1] / counts[0])


def available_mib(device: str) -> float:
    """Memory that is free now."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0] / 2**20
    lines = MEMORY.read_text().splitlines()
    return int(next(x.split()[1] for x in lines if x.startswith("MemAvailable"))) / 1024
