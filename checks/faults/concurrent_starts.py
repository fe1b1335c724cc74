"""Starts an app twice at one folder: the second refuses in one line, or both end right."""

import random
import time
from functools import partial

from checks.faults.apps import STAGES, Ended, Running, Undisturbed, difference, tree
from checks.faults.case import CONCURRENT, FaultCase, Trial


def concurrent_starts(run_: Undisturbed, numbers: random.Random) -> list[Trial]:
    """Starts every stage twice at once, and a second time at a random moment of the first."""
    return [partial(two, run_, stage, part) for stage in STAGES for part in (0.0, numbers.random())]


def two(run_: Undisturbed, stage: str, part: float) -> FaultCase:
    """Starts a stage, and again `part` of its undisturbed seconds later."""
    _, after = run_.trees(stage)
    run_.before(stage)
    first = Running(stage, run_.root)
    time.sleep(part * run_.seconds[stage])
    second = Running(stage, run_.root)
    ends = [first.end(), second.end()]
    return FaultCase(
        kind=CONCURRENT,
        stage=stage,
        fault=f"the second at {part:.0%}",
        outcome="one refused" if any(end.code for end in ends) else "both right",
        wrong=wrong_ends(ends) or difference(tree(run_.root), after),
    )


def wrong_ends(ends: list[Ended]) -> str:
    """Describes a mistake in two ends, at least one of which must be a success."""
    if all(end.code for end in ends):
        return f"both failed: {ends[0].told}; {ends[1].told}"
    failed = [end for end in ends if end.code]
    lines = [end.refusal or "" for end in failed]
    wrong = [
        end.told
        for end, line in zip(failed, lines, strict=True)
        if "belongs to a" not in line or "still going" not in line
    ]
    return "; ".join(wrong)
