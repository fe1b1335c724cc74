"""Kills stages at random moments and starts them again: outputs must equal an undisturbed run's."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from checks.kills.stages import STAGES, Ended, Running, Tree, Undisturbed, difference, tree

KILLED = "killed"
"""`kind` of a case; records of other versions have more kinds"""
SIGTERM_SHARE = 0.2
"""The share of SIGTERM among the signals; the others are SIGKILL"""
MOMENTS = 5
"""Number of moments at which one training is killed, the first while it writes a checkpoint"""
TRAINING = "train_causal"


@dataclass(frozen=True, kw_only=True)
class KillCase:
    """The outcome of one case; `wrong` names the mistake, empty if there is none."""

    kind: str = KILLED
    stage: str
    fault: str
    outcome: str
    wrong: str = ""


def kills(run: Undisturbed, numbers: random.Random, count: int) -> list[partial[KillCase]]:
    """Draws `count` signals at moments uniform over stages' undisturbed seconds.

    Every stage gets its share; every other round runs over the outputs of an earlier run. After a
    signal, files under their final names must be whole. After the same command again, all must
    equal an undisturbed run. One training is also killed again and again.
    """
    names = list(STAGES)
    shares = names * (count // len(names)) + numbers.sample(names, count % len(names))
    parts = tuple(numbers.uniform(1 / 4, 1) for _ in range(MOMENTS - 1))
    cases = [partial(killed_again_and_again, run, parts)]
    for place, stage in enumerate(shares):
        number = signal.SIGTERM if numbers.random() < SIGTERM_SHARE else signal.SIGKILL
        over = place // len(names) % 2 == 1
        cases.append(partial(killed, run, stage, number, numbers.random(), over=over))
    return cases


def killed(
    run: Undisturbed, stage: str, number: signal.Signals, share: float, *, over: bool
) -> KillCase:
    """Kills a stage once, `share` of its undisturbed seconds after its start."""
    before, after = run.trees(stage)
    run.restore(stage, after=over)
    ended = stopped(Running(stage, run.root), number, after_seconds(share * run.seconds[stage]))
    wrong = torn(tree(run.root), before, after) or wrong_end(ended, number)
    return KillCase(
        stage=stage,
        fault=f"{number.name} at {share:.0%}" + (", over earlier outputs" if over else ""),
        outcome="had finished" if ended.code == 0 else "made whole by the same command",
        wrong=wrong or wrong_after(run, stage, after),
    )


def killed_again_and_again(run: Undisturbed, parts: Sequence[float]) -> KillCase:
    """Kills one training while it writes a checkpoint, at random moments, and at its model."""
    before, after = run.trees(TRAINING)
    run.restore(TRAINING, after=False)
    longest = run.seconds[TRAINING]
    moments = [
        once_there(run.root, ".cache/checkpoints/*/.last.ckpt.*"),
        *(after_seconds(share * longest) for share in parts),
        once_there(run.root, "outputs/smoke/models/.*.partial"),
    ]
    wrong, count = "", 0
    for moment in moments:
        ended = stopped(Running(TRAINING, run.root), signal.SIGKILL, moment)
        count += ended.code != 0
        wrong = wrong or torn(tree(run.root), before, after) or wrong_end(ended, signal.SIGKILL)
    return KillCase(
        stage=TRAINING,
        fault=f"SIGKILL {count} times, the first while a checkpoint was written",
        outcome="made whole by the same command",
        wrong=wrong or wrong_after(run, TRAINING, after),
    )


def stopped(running: Running, number: signal.Signals, moment: Callable[[Running], bool]) -> Ended:
    """Sends a signal at a moment, or none if the process ends earlier."""
    while running.is_alive() and not moment(running):
        time.sleep(0.0005)
    running.send(number)
    return running.end()


def after_seconds(seconds: float) -> Callable[[Running], bool]:
    return lambda running: running.seconds >= seconds


def once_there(root: Path, pattern: str) -> Callable[[Running], bool]:
    return lambda running: any(root.glob(pattern))


def torn(disturbed: Tree, *whole: Tree) -> str:
    """Names a file under its final name that is not whole; empty if there is none."""
    for name, digest in disturbed.items():
        hidden = any(folder.startswith(".") for folder in name.split("/"))
        if digest != "folder" and not hidden and digest not in {tree.get(name) for tree in whole}:
            return f"half-written after the signal: {name}"
    return ""


def wrong_end(ended: Ended, number: signal.Signals) -> str:
    """Describes an end that is neither by the signal nor a success."""
    right = (0, -number, 128 + number)  # on SIGTERM a training saves its step first
    return "" if ended.code in right else ended.summary


def wrong_after(run: Undisturbed, stage: str, after: Tree) -> str:
    """Starts the command again, undisturbed, and compares."""
    ended = Running(stage, run.root).end()
    return ended.summary if ended.code else difference(tree(run.root), after)
