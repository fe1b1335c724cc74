"""Runs stages at smoke scale in processes that can be killed, and lists their files."""

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from checks.processes import SERVER, app_process

STAGES = {
    "corpus": "corpus",
    "tokens": "tokens",
    "train_causal": "train_causal causal.steps=30 causal.dropout=0.1 training.checkpoint_every=2",
    "train_masked": "train_masked length=short training.checkpoint_every=1",
    "train_masked, long": "train_masked length=long training.checkpoint_every=1",
    "evaluate, causal": "evaluate",
    "evaluate, masked": "evaluate model=masked",
    "survey": "survey model=masked",
    "report": "report",
    "publish": "publish",
}
"""Stage -> its command, in an order in which the inputs of each exist"""
LOGS = "logs"
"""Folder that is not compared: Hydra writes times there"""
PROCESS_LIMIT = 200.0
"""Seconds after which a process counts as one that does not end"""
Tree = Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """The exit code of a process (negative: a signal's), its output and its seconds."""

    code: int | None
    output: str
    seconds: float

    @property
    def summary(self) -> str:
        """Describes the end in a few words, for the list of failures."""
        last = self.output.strip().splitlines()[-1:] or [""]
        traceback = ", a traceback" if "Traceback" in self.output else ""
        return f"exit code {self.code}{traceback}: {last[0][:200]}"


class Running:
    """Runs a stage's app in a separate process, at the repository's root, on one thread."""

    def __init__(self, stage: str, root: Path) -> None:
        self.output = root.with_name(f"output_{time.monotonic_ns()}")
        self.began = time.perf_counter()
        app, *overrides = STAGES[stage].split()
        self.process = app_process(app, overrides, root, self.output)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, number)

    def end(self) -> Ended:
        """Waits for the process; one that exceeds the limit is killed, its code None."""
        self.process.join(PROCESS_LIMIT)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        output = self.output.read_text(errors="replace") if self.output.exists() else ""
        self.output.unlink(missing_ok=True)
        return Ended(code, output, self.seconds)


def tree(root: Path) -> dict[str, str]:
    """Returns every file below a folder with its sha256, hidden files and folders included."""
    paths = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*"))}
    return {
        name: sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for name, path in paths.items()
        if name.split("/")[0] != LOGS
    }


def difference(disturbed: Tree, right: Tree) -> str:
    """Names files that are added, missing or different; empty for equal trees."""
    both = sorted(set(disturbed) & set(right))
    kinds = {
        "left behind": sorted(set(disturbed) - set(right)),
        "missing": sorted(set(right) - set(disturbed)),
        "other bytes": [name for name in both if disturbed[name] != right[name]],
    }
    return "; ".join(f"{kind}: {', '.join(names[:4])}" for kind, names in kinds.items() if names)


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed run of stages: the folder before and after each stage, and its seconds.

    Every case runs in `root`, as this run did, because some hashes contain paths.
    """

    root: Path
    copies: Path
    seconds: Mapping[str, float]

    def trees(self, stage: str) -> tuple[Tree, Tree]:
        """Returns the trees before and after a stage."""
        number = self._number(stage)
        return tree(self.copies / str(number)), tree(self.copies / str(number + 1))

    def restore(self, stage: str, *, after: bool) -> None:
        """Makes the folder as it was before a stage, or after it."""
        shutil.rmtree(self.root)
        shutil.copytree(self.copies / str(self._number(stage) + after), self.root)

    def _number(self, stage: str) -> int:
        return list(self.seconds).index(stage)


def undisturbed(folder: Path, stages: Sequence[str] = tuple(STAGES)) -> Undisturbed:
    """Runs stages, one after the other. Raises RuntimeError if one fails."""
    root, copies, seconds = folder / "run", folder / "copies", {}
    root.mkdir()
    shutil.copytree(root, copies / "0")
    first = SERVER.Process()  # imports first, so that no stage's seconds include them
    first.start()
    first.join()
    for number, stage in enumerate(stages, start=1):
        ended = Running(stage, root).end()
        if ended.code:
            raise RuntimeError(f"{stage} failed undisturbed: {ended.summary}")
        seconds[stage] = ended.seconds
        shutil.copytree(root, copies / str(number), ignore=shutil.ignore_patterns(LOGS))
    return Undisturbed(root, copies, seconds)
