"""Writes the record and page of checks/mutants.py, whose processes must not import the library."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

# What is mutated: imported so that the record's hash changes with it.
import value_aware_attention.approximations
import value_aware_attention.caches
import value_aware_attention.hugging_face.masks
import value_aware_attention.measurement.masking
import value_aware_attention.measurement.recorded  # noqa: F401
from benchmarks.record import header, markdown, setting

KEPT = ("file", "function", "line", "operator", "before", "after")
HOW_READ = (
    "Single changes of the library, drawn with a seed from all that `checks/mutants.py` makes "
    "(comparisons, signs, constants one up, swapped reductions and branches, lost masks, clamps, "
    "keywords and statements), each run against the tests of its file alone "
    "(`checks/mutants.yaml`). A survivor is a change that none of these tells from the code; "
    "why stands beside it."
)


def record(seed: int, mutants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Builds the record of all mutants."""
    fields = (*KEPT, "killed_by", "survived_at_first", "why")
    return header("mutants") | {
        "seed": seed,
        "mutants": [{name: mutant[name] for name in fields} for mutant in mutants],
    }


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown: score, survivors, and files."""
    mutants = record["mutants"]
    survivors = [mutant for mutant in mutants if not mutant["killed_by"]]
    written_for = [
        mutant for mutant in mutants if mutant["killed_by"] and mutant["survived_at_first"]
    ]
    files, alive = (Counter(mutant["file"] for mutant in some) for some in (mutants, survivors))
    rows = [(f"`{file}`", files[file] - alive[file], files[file]) for file in sorted(files)]
    first = len(mutants) - len(survivors) - len(written_for)
    return (
        f"# Mutants: {len(mutants) - len(survivors)} of {len(mutants)} are killed\n\n{HOW_READ}\n\n"
        f"{setting(record)}\n\n## Survivors\n\n{_table(survivors, 'why')}\n\n"
        f"## Killed since\n\nThe tests at first killed {first}; what the tests written then kill:"
        f"\n\n{_table(written_for, 'killed_by')}\n\n"
        f"## Files\n\n{markdown(['file', 'killed', 'mutants'], rows)}\n"
    )


def _table(mutants: Sequence[dict[str, Any]], last: str) -> str:
    rows = [
        (
            _code(f"{mutant['file']}:{mutant['line']}"),
            f"{_code(mutant['before'])} → {_code(mutant['after'])}",
            mutant[last],
        )
        for mutant in mutants
    ]
    return markdown(["place", "change", last.replace("_", " ")], rows, names=3) if rows else "None."


def _code(text: str) -> str:
    """Quotes code for a cell of a table, because a bare | would end the cell."""
    return "`" + text.replace("|", "\\|") + "`"
