"""Runs stages on a full disk: one line, old outputs whole, and success once there is room."""

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import disk_usage

from checks.faults.apps import (
    CACHE,
    FULL,
    SKIPPED,
    STAGES,
    FaultCase,
    Tree,
    Trial,
    Undisturbed,
    difference,
    run,
    tree,
)
from checks.faults.kills import begin, wrong_after

ROOMY, PAGE = 1 << 30, 4096
OVER, ANEW, BEGUN = "over earlier outputs", "anew", "a training that had begun"


def full_disks(run_: Undisturbed, numbers: random.Random) -> list[Trial]:
    """Runs each stage over the outputs of an earlier run, with no room for the largest.

    Stages that keep cells run without kept cells too, and trainings go on from a checkpoint.
    """
    cases = [(stage, start) for stage in STAGES for start in starts(stage)]
    return [partial(on_small_disk, run_, *case, numbers.random()) for case in cases]


def on_small_disk(run_: Undisturbed, stage: str, start: str, share: float) -> FaultCase:
    """Runs a stage with too little room, then with enough; skipped where none can be mounted."""
    case = partial(FaultCase, kind=FULL, stage=stage, fault=start)
    with small_disk(run_.root) as mounted:
        if not mounted:
            return case(outcome=f"{SKIPPED}: no tmpfs may be mounted")
        _, after = run_.trees(stage)
        earlier = prepared(run_, stage, start)
        limit(run_.root, disk_usage(run_.root).used + room(run_, stage, share))
        ended = run(stage, run_.root)
        wrong = wrong_refusal(ended.refusal, run_.root) or changed(tree(run_.root), earlier)
        limit(run_.root, ROOMY)
        wrong = f"{wrong} ({ended.told})" if wrong else wrong_after(run_, stage, after)
        return case(outcome="refused in one line, then made whole", wrong=wrong)


def starts(stage: str) -> tuple[str, ...]:
    """Returns the states of the folder in which the disk is full."""
    if stage.startswith("train"):
        return (OVER, BEGUN)
    return (OVER, ANEW) if stage.startswith(("evaluate", "survey")) else (OVER,)


def prepared(run_: Undisturbed, stage: str, start: str) -> Tree:
    """Fills the folder; a training that had begun is one that was killed behind a checkpoint."""
    if start == OVER:
        return run_.after(stage)
    begin(run_, stage) if start == BEGUN else run_.before(stage)
    return tree(run_.root)


def room(run_: Undisturbed, stage: str, share: float) -> int:
    """Returns room in whole pages, less than the stage's largest file takes, cells left out."""
    written = run_.written(stage).items()
    largest = max(size for name, size in written if not name.startswith(CACHE))
    return int(share * largest) // PAGE * PAGE


def wrong_refusal(line: str | None, root: Path) -> str:
    if line is None:
        return "not refused in one line"
    return "" if str(root) in line else f"the line names no path: {line}"


def changed(later: Tree, earlier: Tree) -> str:
    """Describes changes by a refused run; it may add whole cells, checkpoints and empty folders.

    It may remove files that a killed run had left.
    """
    allowed = {
        name
        for name, digest in later.items()
        if name not in earlier and not is_hidden(name)
        if digest == "folder" or name.startswith(CACHE)
    }
    lasting = {name: digest for name, digest in earlier.items() if not is_hidden(name)}
    return difference({n: d for n, d in later.items() if n not in allowed}, lasting)


def is_hidden(name: str) -> bool:
    return Path(name).name.startswith(".") and name != CACHE


@contextmanager
def small_disk(root: Path) -> Iterator[bool]:
    """Mounts a file system in memory at `root`; False where that is not allowed."""
    mounted = mount("-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs", str(root))
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(root)], check=True)


def mount(*arguments: str) -> bool:
    try:
        ended = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    except FileNotFoundError:  # no such program
        return False
    return not ended.returncode


def limit(root: Path, size: int) -> None:
    """Sets the size of the small disk in bytes."""
    if not mount("-o", f"remount,size={size}", str(root)):
        raise OSError(f"{root} cannot be given the size {size}")
