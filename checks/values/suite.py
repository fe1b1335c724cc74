"""Runs every case of the table in a checkout and writes the page of outcomes."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawTextHelpFormatter
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.record import finish, header, markdown, setting
from checks import values
from checks.values.cases import CALL, NEW, ValueCase, cases

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 3.0
"""CPU seconds, imports included, in which a process must refuse a wrong value"""
LINE, OTHER_LINE = "one line that names it", "one line that does not"
MORE, ACCEPTED, NO_END = "a traceback, or more lines", "accepted", "no end in a minute"
RIGHT = "accepted, as it should be"
OUTCOMES = (LINE, OTHER_LINE, MORE, ACCEPTED, NO_END, RIGHT)
SECONDS_OF = "Seconds are those of a processor from the start of a process, imports included."
LEFT, SOON = "of all: changed a file", f"of all: refused within {SECONDS:g} s"
Outcome = Mapping[str, Any]


def main() -> None:
    parser = ArgumentParser(description=values.__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="one new case in EVERY; default 1")
    parser.add_argument("--having", default="", help="only cases with this text; writes nothing")
    given = parser.parse_args()
    some = [case for case in sample(given.every) if given.having in f"{case.name} {case.line}"]
    record = header("values") | run(some)
    keep = given.every == 1 and not given.having
    finish("values", record, page(record), keep=keep)
    if any(wrong(case, record) for case in some):
        sys.exit("error: not every case came out right")


def sample(every: int) -> list[ValueCase]:
    """Returns every case that somebody found, and one of `every` of the others."""
    new = [case for case in cases() if case.found == NEW]
    return [case for case in cases() if case.found != NEW] + new[::every]


def run(some: Sequence[ValueCase]) -> dict[str, Any]:
    """Returns the seconds of the imports, and the outcome of every case by name."""
    with tempfile.TemporaryDirectory() as folder:
        lines = tqdm(outcomes(some, Path(folder)), total=len(some) + 1, unit="case")
        first, *found = [json.loads(line) for line in lines]
    if len(found) < len(some):
        raise RuntimeError(f"{len(found)} of {len(some)} cases came to an end")
    by_name = {case.name: kept(case, one) for case, one in zip(some, found, strict=True)}
    return {"imports": round(first["imports"], 2), "outcomes": by_name}


def kept(case: ValueCase, outcome: Outcome) -> dict[str, Any]:
    """Returns the kept part of an outcome; of its output the line for the user."""
    errors = errors_of(outcome)
    return {
        "outcome": came_out(case, outcome),
        "code": outcome["code"],
        "line": errors[-1] if errors else "",
        "seconds": round(outcome["seconds"], 1),
        "changed": outcome["changed"],
    }


def outcomes(some: Sequence[ValueCase], folder: Path) -> Iterator[str]:
    """Runs the worker, and yields its lines."""
    asked = json.dumps(
        [{"given": case.command, "edit": case.edit, "setup": case.setup} for case in some]
    )
    command = [sys.executable, str(WORKER), str(folder)]
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen(
        command, env=without, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin and worker.stdout
        worker.stdin.write(asked)
        worker.stdin.close()
        yield from worker.stdout


def came_out(case: ValueCase, outcome: Outcome) -> str:
    """Returns one of OUTCOMES; a line "names it" by the given key or all of the expected line."""
    if outcome["code"] is None:
        return NO_END
    if outcome["code"] == 0:
        return ACCEPTED if case.exit else RIGHT
    errors = errors_of(outcome)
    if len(errors) != 1 or any(line.startswith("Traceback") for line in outcome["stderr"]):
        return MORE
    named = case.line in errors[0] or (case.kind != CALL and name_of(case) in errors[0].lower())
    return LINE if named and case.exit else OTHER_LINE


def errors_of(outcome: Outcome) -> list[str]:
    return [line for line in outcome["stderr"] if line.startswith("error: ")]


def name_of(case: ValueCase) -> str:
    """Returns the last part of the last given key, or the file of an edit without a key."""
    if case.edit:
        return "params.yaml" if not case.edit[1].strip() else key_of(case.edit[1])
    return key_of(shlex.split(case.command)[-1].replace("=", ":").lstrip("+~").partition("@")[0])


def key_of(text: str) -> str:
    last = text.strip().splitlines()[-1]
    return last.partition(":")[0].rpartition(".")[2].strip().lower()


def wrong(case: ValueCase, found: Mapping[str, Any]) -> str:
    """Describes the difference from the table; empty where there is none."""
    outcome = found["outcomes"][case.name]
    if outcome["outcome"] != (LINE if case.exit else RIGHT):
        return str(outcome["outcome"])
    if case.exit and (outcome["code"] != 1 or case.line not in outcome["line"]):
        return f"another line: {outcome['line']}"
    return "changed a file" if case.exit and outcome["changed"] else ""


def page(record: Mapping[str, Any]) -> str:
    """Renders the record as Markdown."""
    earlier, new = (counts(record, is_new=is_new) for is_new in (False, True))
    rows = [
        [outcome, earlier[outcome] or "", new[outcome] or ""]
        for outcome in (*OUTCOMES, "all", LEFT, SOON)
    ]
    known = [case for case in cases() if case.name in record["outcomes"]]
    bad = {case: why for case in known if (why := wrong(case, record))}
    found, wrong_by_found = (Counter(case.found for case in some) for some in (cases(), bad))
    kinds = sorted(found, key=lambda kind: (kind == NEW, kind))
    by_found = [[kind, found[kind], wrong_by_found[kind]] for kind in kinds]
    lines = [f"- `{case.name}`: {why}" for case, why in bad.items()]
    return (
        f"# Wrong values\n\n{setting(record)}\n\nA case is a command line or an edit of "
        f"params.yaml, from [the table](../../checks/values/cases.tsv). {SECONDS_OF}\n\n"
        f"{markdown(['outcome', 'found earlier', NEW], rows)}\n\n## Wrong, by finding\n\n"
        f"{markdown(['found', 'cases', 'wrong'], by_found)}\n\n"
        "## Not as the table says\n\n" + ("\n".join(lines) or "None.") + "\n"
    )


def counts(found: Mapping[str, Any], *, is_new: bool) -> Counter[str]:
    """Counts the outcomes of the new cases, or of those that somebody found."""
    known = [case for case in cases() if case.name in found["outcomes"]]
    some = [case for case in known if (case.found == NEW) is is_new]
    of = {case.name: found["outcomes"][case.name] for case in some}
    counted = Counter(outcome["outcome"] for outcome in of.values())
    counted["all"] = len(some)
    refused = [of[case.name] for case in some if case.exit and of[case.name]["code"]]
    counted[LEFT] = sum(bool(outcome["changed"]) for outcome in refused)
    counted[SOON] = sum(outcome["seconds"] <= SECONDS for outcome in refused)
    return counted
