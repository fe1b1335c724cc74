"""Reads cases.tsv, the table of values that people may get wrong and of valid extremes."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("cases.tsv")
PARAMS, LATE = "params.yaml", "while it runs"
"""Kinds: an edit of the file; an error that the app finds only at files and devices"""


@dataclass(frozen=True, kw_only=True)
class ValueCase:
    """Holds arguments of `python -m pipelines.`, the exit code, and (a part of) the one line.

    `given` may begin with variables of the environment, as in a shell. `setup` is a shell command,
    run before it in the same folder.
    `found` says what the case did before its fix: data lost, silently wrong, accepted, a crash, a
    traceback, an unhelpful line; "new" for cases that test a rule.
    """

    kind: str
    found: str
    given: str
    exit: int
    line: str
    setup: str = ""

    @property
    def name(self) -> str:
        """Identifies the case."""
        return f"{self.setup}; {self.given}" if self.setup else self.given

    @property
    def command(self) -> str:
        """Returns the command line, without an edit of params.yaml."""
        return self.given.partition(f"; {PARAMS}: ")[0]

    @property
    def edit(self) -> tuple[str, str] | None:
        """Returns the text of params.yaml that is replaced, and its replacement."""
        text = self.given.partition(f"; {PARAMS}: ")[2]
        return tuple(json.loads(text)) if text else None


def cases() -> list[ValueCase]:
    """Reads every row of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restval="")
        return [ValueCase(**{**row, "exit": int(row["exit"])}) for row in rows]
