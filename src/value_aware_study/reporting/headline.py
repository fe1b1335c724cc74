"""The essentials of the tables as plain text, for the end of a run."""

from collections.abc import Sequence

from value_aware_study.reporting.claims import answers
from value_aware_study.reporting.measurements import (
    keys_needed_sentence,
    of_records,
    with_output_error,
)
from value_aware_study.reporting.published import TABLE_2_COLUMNS
from value_aware_study.reporting.records import Record
from value_aware_study.reporting.table import number
from value_aware_study.reporting.tables import BOTH_NEIGHBOURS, table_1, table_2


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pair)]
        for pair in (list(zip(row, widths, strict=True)) for row in rows)
    )
    return "\n".join("  " + "  ".join(line).rstrip() for line in lines)


def _left(rows: Sequence[Sequence[str]]) -> str:
    """Two columns of words."""
    width = max(len(first) for first, _ in rows)
    return "\n".join(f"  {first:{width}}  {second}".rstrip() for first, second in rows)


def headline(records: Sequence[Record]) -> str:
    """Perplexity for each kernel, masked-LM error, keys needed and verdicts, as aligned text."""
    perplexity = table_2(records).data.set_index("column")
    columns = [*(name for name, _, _ in TABLE_2_COLUMNS), "bigram"]
    rows = [["perplexity", "", *columns]]
    for kernel, group in perplexity.groupby("kernel", sort=False):
        shown = group.loc[columns]
        rows.append([str(kernel), "ours", *(number(value) for value in shown["value"])])
        rows.append(["", "paper", *(number(value) for value in shown["paper"])])
    errors = [["masked-LM error, %", "ours", "paper"]]
    for row in table_1(records).data.to_dict("records"):
        if row["paper"] > 0 or row["method"] == BOTH_NEIGHBOURS:
            errors.append([str(row["method"]), number(row["value"]), number(row["paper"])])
    counts = [
        f"  {item.label}: {keys_needed_sentence(measured)}"
        for item, measured in with_output_error(of_records(records))
    ]
    scales = ", ".join(dict.fromkeys(str(record["scale"]) for record in records)) or "no records"
    note = f"Ours: {scales} scale. The paper's models are larger: compare the pattern, not levels."
    title = "  output error, best found; in brackets 95% intervals over windows or sequences"
    needed = ["\n".join([title, *counts])] if counts else []
    verdicts = [["the paper's claims", ""]]
    verdicts += [[answer.verdict, answer.claim] for answer in answers(records)]
    return "\n\n".join([_aligned(rows), _aligned(errors), *needed, _left(verdicts), note])
