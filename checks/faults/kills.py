"""Kills stages at random moments and starts them again: outputs must be as undisturbed."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from checks.faults.apps import (
    CHECKPOINTS,
    KILLED,
    STAGES,
    Ended,
    FaultCase,
    Running,
    Tree,
    Trial,
    Undisturbed,
    difference,
    run,
    tree,
)

ASKED = 0.2
"""The share of SIGTERM among the signals; the others are SIGKILL"""
MOMENTS = 5
"""Number of moments at which one training is killed, the first while it writes a checkpoint"""
TRAINING = "train_causal"


def kills(run_: Undisturbed, numbers: random.Random, count: int) -> list[Trial]:
    """Draws `count` signals at moments uniform over stages' undisturbed seconds.

    Every stage gets its share, every other round over the outputs of an earlier run. After a signal
    what has its own name must be whole; after the same command again all must be as undisturbed.
    On top, one training is killed again and again.
    """
    names = list(STAGES)
    shares = names * (count // len(names)) + numbers.sample(names, count % len(names))
    parts = tuple(numbers.uniform(1 / 4, 1) for _ in range(MOMENTS - 1))
    trials: list[Trial] = [partial(killed_again_and_again, run_, parts)]
    for place, stage in enumerate(shares):
        number = signal.SIGTERM if numbers.random() < ASKED else signal.SIGKILL
        over = place // len(names) % 2 == 1
        trials.append(partial(killed, run_, stage, number, numbers.random(), over=over))
    return trials


def killed(
    run_: Undisturbed, stage: str, number: signal.Signals, share: float, *, over: bool
) -> FaultCase:
    """Kills a stage once, `share` of its undisturbed seconds after its start."""
    before, after = run_.trees(stage)
    run_.after(stage) if over else run_.before(stage)
    ended = stopped(Running(stage, run_.root), number, after_seconds(share * run_.seconds[stage]))
    wrong = torn(tree(run_.root), before, after) or wrong_end(ended, number)
    outcome = "had finished" if ended.code == 0 else "made whole by the same command"
    fault = f"{number.name} at {share:.0%}" + (", over earlier outputs" if over else "")
    return FaultCase(
        kind=KILLED, stage=stage, fault=fault, outcome=outcome,
        wrong=wrong or wrong_after(run_, stage, after),
    )  # fmt: skip


def killed_again_and_again(run_: Undisturbed, parts: Sequence[float]) -> FaultCase:
    """Kills one training while it writes a checkpoint, at random moments, and at its model."""
    before, after = run_.trees(TRAINING)
    run_.before(TRAINING)
    longest = run_.seconds[TRAINING]
    moments = [
        once_there(run_.root, f"{CHECKPOINTS}/*/.last.ckpt.*"),
        *(after_seconds(share * longest) for share in parts),
        once_there(run_.root, "outputs/smoke/models/.*.partial"),
    ]
    wrong, count = "", 0
    for moment in moments:
        ended = stopped(Running(TRAINING, run_.root), signal.SIGKILL, moment)
        count += ended.code != 0
        wrong = wrong or torn(tree(run_.root), before, after)
        wrong = wrong or wrong_end(ended, signal.SIGKILL)
    return FaultCase(
        kind=KILLED, stage=TRAINING, outcome="made whole by the same command",
        fault=f"SIGKILL {count} times, the first while a checkpoint was written",
        wrong=wrong or wrong_after(run_, TRAINING, after),
    )  # fmt: skip


def stopped(running: Running, number: signal.Signals, moment: Callable[[Running], bool]) -> Ended:
    """Sends a signal at a moment, or none where the process ends earlier."""
    while running.is_alive() and not moment(running):
        time.sleep(0.0005)
    running.send(number)
    return running.end()


def begin(run_: Undisturbed, stage: str) -> None:
    """Starts a training anew and kills it once it has a checkpoint."""
    run_.before(stage)
    running = Running(stage, run_.root)
    stopped(running, signal.SIGKILL, once_there(run_.root, f"{CHECKPOINTS}/*/last.ckpt"))


def after_seconds(seconds: float) -> Callable[[Running], bool]:
    return lambda running: running.seconds >= seconds


def once_there(root: Path, pattern: str) -> Callable[[Running], bool]:
    return lambda running: any(root.glob(pattern))


def torn(disturbed: Tree, *whole: Tree) -> str:
    """Names a file under its final name that is not whole; empty where there is none."""
    for name, digest in disturbed.items():
        hidden = any(folder.startswith(".") for folder in name.split("/"))
        if digest != "folder" and not hidden and digest not in {tree.get(name) for tree in whole}:
            return f"half-written after the signal: {name}"
    return ""


def wrong_end(ended: Ended, number: signal.Signals) -> str:
    """Describes an end that is neither by the signal nor a success."""
    right = (0, -number, 128 + number)  # a training that was asked to end saves its step first
    return "" if ended.code in right else ended.told


def wrong_after(run_: Undisturbed, stage: str, after: Tree) -> str:
    """Starts the command again, undisturbed, and compares."""
    ended = run(stage, run_.root)
    return ended.told if ended.code else difference(tree(run_.root), after)
