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

from benchmarks.record import FOLDER, finish, header, markdown, setting
from checks import values
from checks.values.cases import CALL, NEW, ValueCase, cases

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 3.0
"""CPU seconds, imports included, in which a process must refuse a wrong value"""
LINE, OTHER_LINE = "one line that names it", "one line that does not"
MORE, ACCEPTED, NO_END = "a traceback, or more lines", "accepted", "no end in a minute"
RIGHT = "accepted, as it should be"
OUTCOMES = (LINE, OTHER_LINE, MORE, ACCEPTED, NO_END, RIGHT)
LEFT, SOON = "of all: changed a file", f"of all: refused within {SECONDS:g} s"
Outcome = Mapping[str, Any]


def main() -> None:
    parser = ArgumentParser(description=values.__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--before", type=Path, help="an older checkout to run the cases in")
    parser.add_argument("--every", type=int, default=1, help="one new case in EVERY; default 1")
    parser.add_argument("--having", default="", help="only cases with this text; writes nothing")
    given = parser.parse_args()
    some = [case for case in sample(given.every) if given.having in f"{case.name} {case.line}"]
    file = FOLDER / "values.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    found = of_checkout(given.before or Path(), some)
    if given.before:
        record = header("values") | {key: earlier[key] for key in ("now",) if key in earlier}
        record |= {"before": found | {"commit": commit_of(given.before), "every": given.every}}
        record["command"] = record["command"].replace(str(given.before), "FOLDER")
    else:
        record = header("values") | {key: earlier[key] for key in ("before",) if key in earlier}
        record |= {"now": found}
    whole = bool(given.before) or given.every == 1
    finish("values", record, page(record), keep=whole and not given.having)
    if not given.before and any(wrong(case, found) for case in some):
        sys.exit("error: not every case came out right")


def sample(every: int) -> list[ValueCase]:
    """Returns every case that somebody found, and one of `every` of the others."""
    new = [case for case in cases() if case.found == NEW]
    return [case for case in cases() if case.found != NEW] + new[::every]


def commit_of(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def of_checkout(checkout: Path, some: Sequence[ValueCase]) -> dict[str, Any]:
    """Returns the seconds of the imports, and the outcome of every case by name."""
    with tempfile.TemporaryDirectory() as folder:
        lines = tqdm(outcomes(checkout, some, Path(folder)), total=len(some) + 1, unit="case")
        first, *found = [json.loads(line) for line in lines]
    if len(found) < len(some):
        raise RuntimeError(f"{checkout}: {len(found)} of {len(some)} cases came to an end")
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


def outcomes(checkout: Path, some: Sequence[ValueCase], folder: Path) -> Iterator[str]:
    """Yields the worker's lines."""
    asked = json.dumps(
        [{"given": case.command, "edit": case.edit, "setup": case.setup} for case in some]
    )
    command = [sys.executable, str(WORKER), str(folder)]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen(command, cwd=checkout, env=without, **options) as worker:
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
    columns = {
        f"{name}, {group}": counts(record[name], is_new=group == NEW)
        for name in ("before", "now")
        if name in record
        for group in ("found earlier", NEW)
    }
    rows = [
        [what, *(column[what] or "" for column in columns.values())]
        for what in (*OUTCOMES, "all", LEFT, SOON)
    ]
    sides = {name: record[name] for name in ("before", "now") if name in record}
    now = record.get("now")
    bad = [f"- `{c.name}`: {why}" for c in cases() if now and (why := known_wrong(c, now))]
    return (
        f"# Wrong values\n\n{setting(record)}\n\nA case is a command line or an edit of "
        f"params.yaml, from [the table](../../checks/values/cases.tsv). {said(record)}\n\n"
        f"{markdown(['outcome', *columns], rows)}\n\n## Wrong, by what was found\n\n"
        f"{markdown(['found', 'cases', *sides], by_found(sides))}\n\n"
        "## Not as the table says, now\n\n" + ("\n".join(bad) if bad else "None.") + "\n"
    )


def by_found(sides: Mapping[str, Any]) -> list[list[Any]]:
    """Counts cases and wrong outcomes by finding."""
    kinds = Counter(case.found for case in cases())
    return [
        [
            kind,
            kinds[kind],
            *(
                sum(bool(known_wrong(case, found)) for case in cases() if case.found == kind)
                for found in sides.values()
            ),
        ]
        for kind in sorted(kinds, key=lambda kind: (kind == NEW, kind))
    ]


def known_wrong(case: ValueCase, found: Mapping[str, Any]) -> str:
    return wrong(case, found) if case.name in found["outcomes"] else ""


def said(record: Mapping[str, Any]) -> str:
    """Explains the columns."""
    text = "Seconds are those of a processor from the start of a process, imports included."
    if before := record.get("before"):
        some = f", one of {before['every']} of the new cases" if before["every"] > 1 else ""
        text += f" Before is commit {before['commit'][:12]}{some}."
    return text


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
