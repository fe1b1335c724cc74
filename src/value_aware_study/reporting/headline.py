"""The essentials of the tables as plain text, for the end of a run."""

from collections.abc import Sequence
from textwrap import indent

from tabulate import tabulate

from value_aware_attention.measurement.record import Record
from value_aware_study.reporting.claims import answers
from value_aware_study.reporting.measurements import of_models, sentence
from value_aware_study.reporting.published import TABLE_2_COLUMNS
from value_aware_study.reporting.results import Results
from value_aware_study.reporting.table import number
from value_aware_study.reporting.tables import BOTH_NEIGHBOURS, table_1, table_2


def _aligned(rows: Sequence[Sequence[str]], others: str = "right") -> str:
    """Columns of text, the first to the left, the `others` to one side."""
    sides = ["left", *[others] * (len(rows[0]) - 1)]
    text = tabulate(rows, tablefmt="plain", colalign=sides, disable_numparse=True)
    return indent(text, "  ")


def headline(records: Sequence[Record]) -> str:
    """Perplexity for each kernel, masked-LM error, keys needed and verdicts, as aligned text."""
    results = Results.of(records)
    perplexity = table_2(results).data.set_index("column")
    columns = [*(name for name, _, _ in TABLE_2_COLUMNS), "bigram"]
    rows = [["perplexity", "", *columns]]
    for kernel, group in perplexity.groupby("kernel", sort=False):
        shown = group.loc[columns]
        rows.append([str(kernel), "ours", *(number(value) for value in shown["value"])])
        rows.append(["", "paper", *(number(value) for value in shown["paper"])])
    errors = [["masked-LM error, %", "ours", "paper"]]
    for row in table_1(results).data.to_dict("records"):
        if row["paper"] > 0 or row["method"] == BOTH_NEIGHBOURS:
            errors.append([str(row["method"]), number(row["value"]), number(row["paper"])])
    counts = [f"  {one.label}: {sentence(one.output_error)}" for one in of_models(results)]
    scales = ", ".join(dict.fromkeys(record.scale for record in records)) or "no records"
    note = f"Ours: {scales} scale. The paper's models are larger: compare the pattern, not levels."
    title = "  output error, best found; in brackets 95% intervals over windows or sequences"
    needed = ["\n".join([title, *counts])] if counts else []
    verdicts = [["the paper's claims", ""]]
    verdicts += [[answer.verdict, answer.claim] for answer in answers(results)]
    return "\n\n".join(
        [_aligned(rows), _aligned(errors), *needed, _aligned(verdicts, "left"), note]
    )
