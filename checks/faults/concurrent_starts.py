"""Starts an app twice at one folder: the second refuses in one line, or both end right."""

import random
import re
import time
from functools import partial

from checks.faults.apps import (
    CONCURRENT,
    STAGES,
    Ended,
    FaultCase,
    Running,
    Trial,
    Undisturbed,
    difference,
    tree,
)


def concurrent_starts(run_: Undisturbed, numbers: random.Random) -> list[Trial]:
    """Starts every stage twice at once, and a second time at a random moment of the first."""
    return [
        partial(two, run_, stage, share) for stage in STAGES for share in (0.0, numbers.random())
    ]


def two(run_: Undisturbed, stage: str, share: float) -> FaultCase:
    """Starts a stage, and again `share` of its undisturbed seconds later."""
    _, after = run_.trees(stage)
    run_.before(stage)
    first = Running(stage, run_.root)
    time.sleep(share * run_.seconds[stage])
    second = Running(stage, run_.root)
    ends = [first.end(), second.end()]
    return FaultCase(
        kind=CONCURRENT,
        stage=stage,
        fault=f"the second at {share:.0%}",
        outcome="one refused" if any(end.code for end in ends) else "both right",
        wrong=wrong_ends(ends) or difference(tree(run_.root), after),
    )


def wrong_ends(ends: list[Ended]) -> str:
    """Describes a mistake in two ends, at least one of which must be a success."""
    if all(end.code for end in ends):
        return f"both failed: {ends[0].told}; {ends[1].told}"
    failed = [end for end in ends if end.code]
    refused = re.compile("belongs to a .* still going")
    return "; ".join(end.told for end in failed if not refused.search(end.refusal or ""))
