"""Runs every kind of fault and writes the page of outcomes."""

import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from checks import faults
from checks.faults.apps import (
    CONCURRENT,
    DAMAGED,
    FULL,
    KILLED,
    SKIPPED,
    FaultCase,
    Trial,
    Undisturbed,
    undisturbed,
)
from checks.faults.concurrent_starts import concurrent_starts
from checks.faults.damage import damages
from checks.faults.full_disk import full_disks
from checks.faults.kills import kills

KILLS = 30
QUICK = 6
"""--quick tries one of `QUICK` cases"""
KINDS: dict[str, Callable[[Undisturbed, random.Random], list[Trial]]] = {
    KILLED: lambda run, numbers: kills(run, numbers, KILLS),
    FULL: full_disks,
    CONCURRENT: concurrent_starts,
    DAMAGED: damages,
}
TRIED = {
    KILLED: "A signal (SIGKILL, some SIGTERM) at a random moment of a stage, with outputs of an "
    "earlier run or without; then the same command again.",
    FULL: "A disk in memory with less room than the largest file that the stage writes; then the "
    "same command with room.",
    CONCURRENT: "The same command twice, at once and the second at a random moment of the first.",
    DAMAGED: "A file cut at a random byte, or one random bit of it changed; then the stage that "
    "reads it.",
}
RIGHT = (
    "Right is: what has its own name is whole at any time; the same command ends with the files of "
    "an undisturbed run, byte for byte, and leaves no other behind, hidden ones included; what "
    "cannot be done is refused in one line that names the file or folder, and changes nothing."
)


def main() -> None:
    parser = options(faults.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of moments, places and bits")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = undisturbed(Path(folder))
        trials = [t for kind in args.kinds for t in KINDS[kind](run, numbers(args.seed, kind))]
        cases = [trial() for trial in tqdm(trials[:: QUICK if args.quick else 1], unit="case")]
    record = header("faults") | {
        "seed": args.seed,
        "seconds": round(time.monotonic() - began),
        "cases": [asdict(case) for case in cases],
    }
    keep = not args.quick and set(args.kinds) == set(KINDS)
    finish("faults", record, page(record), keep=keep)
    if any(case.wrong for case in cases):
        sys.exit("error: not every case came out right")


def numbers(seed: int, kind: str) -> random.Random:
    """Returns the random numbers of one kind, equal whether it runs alone or with others."""
    return random.Random(f"{seed}, {kind}")


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    # an earlier record may hold kinds that are tried no longer
    cases = [FaultCase(**case) for case in record["cases"] if case["kind"] in KINDS]
    parts = [f"## {kind.capitalize()}\n\n{TRIED[kind]}\n\n{_table(cases, kind)}" for kind in KINDS]
    wrong = [
        f"- {case.kind}, {case.stage}, {case.fault}: {case.wrong}" for case in cases if case.wrong
    ]
    listed = "\n".join(wrong) if wrong else "None."
    tried = [case for case in cases if not case.outcome.startswith(SKIPPED)]
    right = sum(not case.wrong for case in tried)
    return (
        f"# Faults: {right} of {len(tried)} cases right\n\n{RIGHT}\n\n{setting(record)} "
        f"Seed {record['seed']}, {record['seconds']} s.\n\n"
        + "\n\n".join(parts)
        + f"\n\n## Wrong\n\n{listed}\n"
    )


def _table(cases: Sequence[FaultCase], kind: str) -> str:
    """Renders counts by stage and outcome."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        if case.kind == kind:
            counts[case.stage][_outcome(case)] += 1
    total = sum(counts.values(), Counter())
    rows = [[stage, *(count[o] or "" for o in total)] for stage, count in counts.items()]
    return markdown(["stage", *total], [*rows, ["all", *total.values()]])


def _outcome(case: FaultCase) -> str:
    return "**wrong**" if case.wrong else case.outcome
