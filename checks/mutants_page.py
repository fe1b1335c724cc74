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


def record(seed: int, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Builds the record of all mutants."""
    fields = (*KEPT, "killed_by", "survived_at_first", "why")
    return header("mutants") | {
        "seed": seed,
        "mutants": [{name: one[name] for name in fields} for one in found],
    }


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown: score, survivors, and files."""
    found = record["mutants"]
    survivors = [one for one in found if not one["killed_by"]]
    written_for = [one for one in found if one["killed_by"] and one["survived_at_first"]]
    files, alive = (Counter(one["file"] for one in some) for some in (found, survivors))
    rows = [(f"`{file}`", files[file] - alive[file], files[file]) for file in sorted(files)]
    first = len(found) - len(survivors) - len(written_for)
    return (
        f"# Mutants: {len(found) - len(survivors)} of {len(found)} are killed\n\n{HOW_READ}\n\n"
        f"{setting(record)}\n\n## Survivors\n\n{_table(survivors, 'why')}\n\n"
        f"## Killed since\n\nThe tests at first killed {first}; what the tests written then kill:"
        f"\n\n{_table(written_for, 'killed_by')}\n\n"
        f"## Files\n\n{markdown(['file', 'killed', 'mutants'], rows)}\n"
    )


def _table(found: Sequence[dict[str, Any]], last: str) -> str:
    rows = [
        (
            _code(f"{one['file']}:{one['line']}"),
            f"{_code(one['before'])} → {_code(one['after'])}",
            one[last],
        )
        for one in found
    ]
    return markdown(["place", "change", last.replace("_", " ")], rows, names=3) if rows else "None."


def _code(text: str) -> str:
    """Quotes code for a cell of a table, which a bare | would end."""
    return "`" + text.replace("|", "\\|") + "`"
