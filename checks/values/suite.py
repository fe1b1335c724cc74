"""Runs every case of the table in a checkout and writes the page of outcomes."""

import json
import os
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
from checks.values.cases import ValueCase, cases

WORKER = Path(__file__).with_name("worker.py")
LINE, OTHER_LINE = "one line that names it", "one line that does not"
MORE, ACCEPTED, NO_END = "a traceback, or more lines", "accepted", "no end in a minute"
RIGHT = "accepted, as it should be"
OUTCOMES = (LINE, OTHER_LINE, MORE, ACCEPTED, NO_END, RIGHT)
Outcome = Mapping[str, Any]


def main() -> None:
    parser = ArgumentParser(description=values.__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--having", default="", help="only cases with this text; writes nothing")
    text = parser.parse_args().having
    chosen = [case for case in cases() if text in f"{case.kind} {case.name} {case.line}"]
    record = header("values") | {"outcomes": run(chosen)}
    finish("values", record, page(chosen, record), keep=not text)
    if any(wrong(case, record["outcomes"][case.name]) for case in chosen):
        sys.exit("error: not every case came out right")


def run(chosen: Sequence[ValueCase]) -> dict[str, Outcome]:
    """Returns the outcome of every case by its name."""
    with tempfile.TemporaryDirectory() as folder:
        lines = list(tqdm(outcomes(chosen, Path(folder)), total=len(chosen), unit="case"))
    if len(lines) < len(chosen):
        raise RuntimeError(f"{len(lines)} of {len(chosen)} cases came to an end")
    ended = zip(chosen, map(json.loads, lines), strict=True)
    return {case.name: judged(case, outcome) for case, outcome in ended}


def judged(case: ValueCase, outcome: Outcome) -> Outcome:
    """Returns what came of a case, with the line for the user in place of all output."""
    line = (errors_of(outcome) or [""])[-1]
    return {key: outcome[key] for key in ("code", "changed")} | {
        "outcome": came_out(case, outcome),
        "line": line,
    }


def outcomes(chosen: Sequence[ValueCase], folder: Path) -> Iterator[str]:
    """Runs the worker, and yields its lines."""
    asked = [{"given": case.command, "edit": case.edit, "setup": case.setup} for case in chosen]
    command = [sys.executable, str(WORKER), str(folder)]
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen(
        command, env=without, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin and worker.stdout
        worker.stdin.write(json.dumps(asked))
        worker.stdin.close()
        yield from worker.stdout


def came_out(case: ValueCase, outcome: Outcome) -> str:
    """Returns one of OUTCOMES; a line "names it" where it has the line of the table."""
    if outcome["code"] is None:
        return NO_END
    if outcome["code"] == 0:
        return ACCEPTED if case.exit else RIGHT
    errors = errors_of(outcome)
    if len(errors) != 1 or any(line.startswith("Traceback") for line in outcome["stderr"]):
        return MORE
    return LINE if case.line in errors[0] and case.exit == outcome["code"] else OTHER_LINE


def errors_of(outcome: Outcome) -> list[str]:
    return [line for line in outcome["stderr"] if line.startswith("error: ")]


def wrong(case: ValueCase, outcome: Outcome) -> str:
    """Describes the difference from the table; empty where there is none."""
    if outcome["outcome"] != (LINE if case.exit else RIGHT):
        line = f": {outcome['line']}" if outcome["outcome"] == OTHER_LINE else ""
        return f"{outcome['outcome']}{line}"
    return "changed a file" if case.exit and outcome["changed"] else ""


def page(chosen: Sequence[ValueCase], record: Mapping[str, Any]) -> str:
    """Renders the record as Markdown: how many cases had each outcome, and the wrong ones."""
    outcomes = record["outcomes"]
    counts = Counter(outcome["outcome"] for outcome in outcomes.values())
    rows = [[name, counts[name]] for name in OUTCOMES] + [["all", len(outcomes)]]
    bad = {case.name: wrong(case, outcomes[case.name]) for case in chosen}
    lines = [f"- `{name}`: {why}" for name, why in bad.items() if why]
    return (
        f"# Wrong values\n\n{setting(record)}\n\nA case is a command line or an edit of "
        f"params.yaml, from [the table](../../checks/values/cases.tsv).\n\n"
        f"{markdown(['outcome', 'cases'], rows)}\n\n"
        "## Not as the table says\n\n" + ("\n".join(lines) or "None.") + "\n"
    )
