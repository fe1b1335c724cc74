"""Runs every kind of fault and writes the page of outcomes."""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from checks import faults
from checks.faults.apps import Undisturbed, undisturbed
from checks.faults.case import CONCURRENT, DAMAGED, FOREIGN, FULL, KILLED, FaultCase, Trial
from checks.faults.concurrent_starts import concurrent_starts
from checks.faults.damage import damages
from checks.faults.foreign_files import foreign_files
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
    FOREIGN: foreign_files,
}
TRIED = {
    KILLED: "A signal (SIGKILL, some SIGTERM) at a random moment of a stage, with outputs of an "
    "earlier run or without; then the same command again.",
    FULL: "A disk in memory with less room than the largest file that the stage writes; then the "
    "same command with room.",
    CONCURRENT: "The same command twice, at once and the second at a random moment of the first.",
    DAMAGED: "A file cut at a random byte, or one random bit of it changed; then the stage that "
    "reads it.",
    FOREIGN: "A file of somebody else in the folder that a stage writes.",
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
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = undisturbed(Path(folder))
        trials = [t for kind in given.kinds for t in KINDS[kind](run, numbers(given.seed, kind))]
        cases = [trial() for trial in tqdm(trials[:: QUICK if given.quick else 1], unit="case")]
    record = header("faults") | {
        "seed": given.seed,
        "seconds": round(time.monotonic() - began),
        "cases": [asdict(case) for case in cases],
    }
    keep = not given.quick and set(given.kinds) == set(KINDS)
    finish("faults", record, page(record), keep=keep)
    if any(case.wrong for case in cases):
        sys.exit("error: not every case came out right")


def numbers(seed: int, kind: str) -> random.Random:
    """Returns the random numbers of one kind, equal whether it runs alone or with others."""
    return random.Random(f"{seed}, {kind}")


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    cases = [FaultCase(**case) for case in record["cases"]]
    parts = [f"## {kind.capitalize()}\n\n{TRIED[kind]}\n\n{_table(cases, kind)}" for kind in KINDS]
    wrong = [
        f"- {case.kind}, {case.stage}, {case.fault}: {case.wrong}" for case in cases if case.wrong
    ]
    listed = "\n".join(wrong) if wrong else "None."
    total = Counter("wrong" if case.wrong else "right" for case in cases)
    return (
        f"# Faults: {total['right']} of {len(cases)} cases right\n\n{RIGHT}\n\n{setting(record)} "
        f"Seed {record['seed']}, {record['seconds']} s.\n\n"
        + "\n\n".join(parts)
        + f"\n\n## Wrong\n\n{listed}\n"
    )


def _table(cases: Sequence[FaultCase], kind: str) -> str:
    """Renders counts by stage and outcome."""
    some = [case for case in cases if case.kind == kind]
    outcomes = list(dict.fromkeys(_outcome(case) for case in some))
    rows = []
    for stage in dict.fromkeys(case.stage for case in some):
        counts = Counter(_outcome(case) for case in some if case.stage == stage)
        rows.append([stage, *(counts[outcome] or "" for outcome in outcomes)])
    totals = Counter(_outcome(case) for case in some)
    rows.append(["all", *(totals[outcome] for outcome in outcomes)])
    return markdown(["stage", *outcomes], rows)


def _outcome(case: FaultCase) -> str:
    return "**wrong**" if case.wrong else case.outcome
