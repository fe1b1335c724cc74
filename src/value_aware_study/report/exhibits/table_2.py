"""Perplexity of one causal model a kernel under approximate attention (Table 2)."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.table_1 import ALONE, baselines, beside_exact
from value_aware_study.report.formatting import DASH, interval, missing, ratio, times, whole
from value_aware_study.report.labels import KERNEL_LABELS
from value_aware_study.report.published import TABLE_2, TABLE_2_COLUMNS
from value_aware_study.report.replicates import RANGE
from value_aware_study.report.results import KERNELS, Results

__all__ = ["exhibit"]

COUNTS = {
    "unigram": "unigram",
    "bigram": "bigram",
    "bigram_tokens_read": "bigram, tokens read",
}
RATIOS = {"value": "ratio", "low": "ratio_low", "high": "ratio_high"}
BESIDE = (
    f"The last rows of a kernel need no attention: {ALONE} lets each token see nothing else; "
    "unigram and interpolated Kneser-Ney bigram (Ney, Essen and Kneser, 1994) are counts of all "
    "training tokens, or of those that the model read."
)


def exhibit(results: Results) -> Exhibit | None:
    """Every column of the paper's table as a row, kernel by kernel; None without causal models."""
    if not results.causal:
        return None
    rows = [row for kernel in KERNELS for row in _rows(results, kernel)]
    models = [model for kernel in KERNELS if (model := results.of_kernel(kernel))]
    display = pd.DataFrame(list(map(_text, rows)))
    if results.replicates:
        display.insert(5, "range over seeds (× exact)", list(map(_over_seeds, rows)))
    notes = [
        "One model trained with each kernel, then evaluated with its attention replaced. The "
        "paper's models have 156M parameters and were trained on WikiText-103. "
        f"{captions.keys(models, 512)}",
        BESIDE,
        f"{captions.NOT_THE_SAME_EXPERIMENT} {captions.INTERVAL}",
        *captions.not_evaluated(results, [f"causal_{kernel}" for kernel in KERNELS]),
    ]
    return Exhibit(
        "table_2",
        "Table 2. Perplexity under approximate attention, for each kernel",
        "Perplexity, and in brackets its ratio to exact attention's: compare the ratios."
        f"{captions.seeds(results)}",
        notes,
        table=Table(pd.DataFrame(rows), display),
    )


def _rows(results: Results, kernel: str) -> list[dict[str, Any]]:
    """The paper's perplexity and ours of every column for a kernel: None where there is none."""
    model = results.of_kernel(kernel)
    name = model.model if model else ""
    paper = dict(zip((column for column, _, _ in TABLE_2_COLUMNS), TABLE_2[kernel], strict=True))
    ours, changes = _cells(results, name), _cells(results, name, results.changes)
    counts = baselines(results, name)
    ours |= {label: counts.get(count, {}) for count, label in COUNTS.items()}
    exact = ours["exact"].get("value")
    return [
        {"kernel": kernel, "column": column, "paper": paper.get(column)}
        | {end: cell.get(end) for end in RATIOS}
        | {name: ratio(cell.get(end), exact) for end, name in RATIOS.items()}
        | {"paper_ratio": ratio(paper.get(column), paper["exact"]), "count": cell.get("count")}
        | {end: cell[end] for end in RANGE if end in cell}
        | {f"ratio_{end}": math.exp(changes[column][end]) for end in RANGE if end in cell}
        for column, cell in ours.items()
    ]


def _cells(
    results: Results, model: str, among: pd.DataFrame | None = None
) -> dict[str, Mapping[str, Any]]:
    """The setting of every column, by its name."""
    columns = [*TABLE_2_COLUMNS, (ALONE, "sliding_window", 1)]
    return {
        column: results.find(model, approximation, among, **({} if r is None else {"r": r}))
        for column, approximation, r in columns
    }


def _text(row: Mapping[str, Any]) -> dict[str, str]:
    ends = (None, None) if row["column"] == "exact" else (row["low"], row["high"])
    return {
        "kernel": KERNEL_LABELS[row["kernel"]],
        "attention": row["column"],
        "ours (× exact)": beside_exact(row["value"], row["ratio"]),
        "paper (× exact)": beside_exact(row["paper"], row["paper_ratio"]),
        "95% interval of ours": interval(*ends),
        "targets": whole(row["count"]),
    }


def _over_seeds(row: Mapping[str, Any]) -> str:
    """The ranges of the perplexity and of its ratio; a dash where no training was evaluated so."""
    if missing(row.get(RANGE[0])):
        return DASH
    lowest, highest = (times(row[f"ratio_{end}"]) for end in RANGE)
    ratios = f"{lowest} to {highest.removeprefix('× ')}"
    return f"{interval(*(row[end] for end in RANGE))} ({ratios})"
