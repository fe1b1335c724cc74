"""Runs every case and writes the page of outcomes."""

import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from checks import kills as check
from checks.kills.killing import KILLED, KillCase, kills
from checks.kills.stages import undisturbed

COUNT = 30
"""Number of signals, not counting those of the one training"""
QUICK = 6
"""--quick tries one of `QUICK` cases"""
RIGHT = (
    "A signal (SIGKILL, some SIGTERM) at a random moment of a stage, with outputs of an earlier "
    "run or without; then the same command again. Right is: what has its own name is whole at any "
    "time; the same command ends with the files of an undisturbed run, byte for byte, and leaves "
    "no other behind, hidden ones included."
)


def main() -> None:
    parser = options(check.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of stages and moments")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trials = kills(undisturbed(Path(folder)), numbers(args.seed), COUNT)
        cases = [trial() for trial in tqdm(trials[:: QUICK if args.quick else 1], unit="case")]
    record = header("kills") | {
        "seed": args.seed,
        "seconds": round(time.monotonic() - began),
        "cases": [asdict(case) for case in cases],
    }
    finish("kills", record, page(record), keep=not args.quick)
    if any(case.wrong for case in cases):
        sys.exit("error: not every case came out right")


def numbers(seed: int) -> random.Random:
    """Returns the random numbers of stages, signals and moments."""
    return random.Random(f"{seed}, {KILLED}")


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    cases = [KillCase(**case) for case in record["cases"]]
    wrong = [f"- {case.stage}, {case.fault}: {case.wrong}" for case in cases if case.wrong]
    listed = "\n".join(wrong) if wrong else "None."
    return (
        f"# Kills: {len(cases) - len(wrong)} of {len(cases)} cases right\n\n{RIGHT}\n\n"
        f"{setting(record)} Seed {record['seed']}.\n\n{_table(cases)}\n\n## Wrong\n\n{listed}\n"
    )


def _table(cases: list[KillCase]) -> str:
    """Renders counts by stage and outcome."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        counts[case.stage]["**wrong**" if case.wrong else case.outcome] += 1
    total = sum(counts.values(), Counter())
    rows = [[stage, *(count[o] or "" for o in total)] for stage, count in counts.items()]
    return markdown(["stage", *total], [*rows, ["all", *total.values()]])
