"""Keeps a result with its date, its machine, and the hash of the measured code."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.rounds import EQUAL
from value_aware_attention.files import to_json
from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.measurement.store import source_hash

FOLDER = Path("results/benchmarks")
PACKAGES = ("benchmarks", "checks", "pipelines", "value_aware_attention", "value_aware_study")
PAIRED = (
    "Ratios are taken round by round: the median and, in brackets, its 99% interval (sign test; "
    "from 8 rounds on)."
)
HOW = (
    f"{PAIRED} Rounds went on until the verdict was clear or the time was up: faster or "
    f"slower where the interval leaves 1 out, equal where it lies within {1 / EQUAL:.2f} to "
    f"{EQUAL:g}, else undecided."
)


def module_of(name: str) -> str:
    """Returns the module that writes a record: a check, or else a benchmark."""
    return f"{'checks' if find_spec(f'checks.{name}') else 'benchmarks'}.{name}"


def source_of(name: str) -> str:
    """Hashes the code of a benchmark or check and of everything that it measures."""
    return source_hash(module_of(name), packages=PACKAGES)


def header(name: str) -> dict[str, Any]:
    """Returns the first keys of every record; `sys.argv` has the options of the command."""
    return {
        "command": " ".join([f"python -m {module_of(name)}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "source": source_of(name),
        "run_on": asdict(run_on()),
    }


def setting(record: Mapping[str, Any]) -> str:
    """Tells the date, machine and code of a record in two sentences for the page."""
    on = record["run_on"]
    versions = ", ".join(f"{name} {number}" for name, number in on["versions"].items())
    return (
        f"Measured on {record['date']} by `{record['command']}`: {on['hardware']}, "
        f"{on['threads']} threads; {versions}. Code {record['source'][:12]}; `python -m benchmarks`"
        " says whether it is still the present one."
    )


def options(text: str | None, limit: float | None = None) -> argparse.ArgumentParser:
    """Returns a parser of --quick, and of --seconds if rounds have a `limit`."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes nothing")
    if limit is not None:
        help_text = f"limit of a comparison's rounds; default {limit:g}"
        parser.add_argument("--seconds", type=float, default=limit, help=help_text)
    return parser


def finish(name: str, record: Mapping[str, Any], page: str, *, keep: bool) -> None:
    """Prints the page; with `keep`, writes it and the record."""
    print(page)
    if keep:
        write(name, record, page, FOLDER)


def write(name: str, record: Mapping[str, Any], page: str, folder: Path) -> None:
    """Writes <folder>/<name>.json and .md, and the folder's overview."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(to_json(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(page)
    (folder / "README.md").write_text(overview(folder))


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]], names: int = 1) -> str:
    """Renders a table whose first `names` columns are words and whose others are numbers."""
    cells = [[str(cell) for cell in row] for row in rows]
    sides = ["left" if place < names else "right" for place in range(len(headers))]
    return tabulate(cells, headers, tablefmt="pipe", disable_numparse=True, colalign=sides)


def overview(folder: Path) -> str:
    """Lists every result, and whether its code is still the present one."""
    rows = []
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text())
        source = record.get("source")
        parts = record.get("parts", {}).values()  # each has its own code
        sources = {part.get("source", source) for part in parts} | {source}
        state = "current" if sources == {source_of(file.stem)} else "of older code"
        command = record.get("command", f"python -m {module_of(file.stem)}")
        link = f"[{file.stem}]({file.stem}.md)"
        rows.append((link, state, record.get("date", ""), (source or "")[:12], f"`{command}`"))
    return (
        "# Benchmarks\n\nWritten with every result, and by `python -m benchmarks`, which looks "
        "again. A result is of older code once any code that its benchmark imports has changed, "
        "but for comments and docstrings; its command renews it.\n\n"
        f"{markdown(['result', 'code', 'date', 'hash', 'command'], rows, names=5)}\n"
    )
