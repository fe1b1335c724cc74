"""The whole report: every table, every figure and the page, written to one folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.reporting import captions, claims, figures
from value_aware_study.reporting.captions import measured_on, versions
from value_aware_study.reporting.document import Part, Text, write_page
from value_aware_study.reporting.headline import headline
from value_aware_study.reporting.measured_report import matching_table, measured_figures
from value_aware_study.reporting.measurements import of_models
from value_aware_study.reporting.results import Results
from value_aware_study.reporting.table import Figure, Table, number
from value_aware_study.reporting.tables import grid_csv, skewness_table, table_1, table_2
from value_aware_study.reporting.training_tables import table_3, table_4, table_4_causal

__all__ = ["headline", "write_report"]

# What the figures of output error, matching keys and skewness are called here.
MEASURED_NAMES = {
    "output_error": ("figure_6", "Figure 6. "),
    "matching_keys": ("figure_7", "Figure 7. "),
    "skewness_gap": ("figure_8", "Figure 8. "),
}

INTRODUCTION = """
If attention may look at only r keys, how much of the loss comes from choosing them by attention
weight instead of by the attention output? Language models are trained with exact attention, then
evaluated with the attention of every layer replaced by an approximation: optimal value-oblivious
(OVO, the r largest weights, renormalised), optimal value-aware (OVA, the convex combination of at
most r values closest to the exact output), methods between the two, a sliding window, LSH and
orthogonal random features (ORF). OVA is proved optimal at r = 1 and from r = head size + 1 on;
between, it is best found, an upper bound on the optimal error. Numbers called the paper's are those
printed in Value-aware Approximate Attention (Gupta and Berant, 2021); they belong to larger models
trained on other text.
"""

REPRODUCE = """
Every number and picture on this page is written by the report stage of the pipeline, from the
records of the evaluation. To run all of it, from the text to this page:
"""

# The order of the page; what is not named here follows.
FIRST = (
    *("table_1", "figure_1", "table_2", "figure_2", "figure_5", "figure_6", "figure_7"),
    *("keys_needed", "figure_8", "skewness", "figure_4"),
)

PRETRAINED = """
Figures 6 to 8 for the attention of a pretrained model, on real text, are on
<a href='pretrained/index.html'>a page of their own</a>, written by
<code>python -m pipelines.pretrained</code>; <code>python -m pipelines.probe</code> writes one for
any model. No stage of the pipeline does.
"""

GRID = """
<a href='grid.csv'>grid.csv</a> has one line for each model, approximation, parameters and seed.
"""

FACTS = {
    "model": "model",
    "kernel": "kernel",
    "length": "sequence length",
    "exact": "exact attention",
    "measured": "measured on",
    "data": "data",
    "hardware": "hardware",
    "versions": "versions",
    "scale": "scale",
}


def _figures(results: Results) -> list[Figure]:
    long = results.models("masked_long")
    every = [*long, *results.causal]
    return [
        Figure(
            "figure_1",
            "Figure 1. Masked-LM error of the long model under approximate attention",
            "OVO: optimal value-oblivious; OVA: optimal value-aware; ORF as written in the paper's "
            f"A.1 and with Performer's scaling. {captions.BEST_FOUND} "
            f"{captions.INTERVAL} {captions.SEEDS} {captions.NOT_JOINED} {captions.ours(long)}",
            figures.figure_1(results),
        ),
        Figure(
            "figure_2",
            "Figure 2. Loss of the optimal value-oblivious approximation, for each kernel",
            f"Top r keys by attention weight, up to all keys. {captions.INTERVAL} "
            f"{captions.ours(results.causal)}",
            figures.figure_2(results),
        ),
        Figure(
            "figure_3",
            "Figure 3. Learning curves with exact attention",
            "The long masked model starts from the trained short one, with new positions; a step "
            "of one model need not see as many tokens as a step of another. "
            f"{captions.ours(results.records)}",
            figures.figure_3(results),
        ),
        Figure(
            "figure_4",
            "Figure 4. Output error of the attention against the error of the model",
            "Each point is one setting: its relative output error, and the metric with that "
            f"approximation in every layer. {captions.OUTPUT_ERROR} "
            f"{captions.recorded_on(every)} grid.csv has the intervals. Settings with "
            f"an error under {figures.SMALLEST_ERROR:g} count as exact and are left out. "
            f"Not in the paper. The metric: {captions.ours(every)}",
            figures.figure_4(results),
        ),
        Figure(
            "figure_5",
            "Figure 5. What choosing by the output gains in the end",
            f"{captions.OPTIMAL} {captions.BEST_FOUND} {captions.BASELINES} Sampled from α: r "
            "draws with replacement, mean of the seeds. Not in the paper, which has r = 1 and 65 "
            f"in Tables 1 and 2. {captions.INTERVAL} {captions.NOT_JOINED} "
            f"{captions.ours(every)}",
            figures.figure_5(results),
        ),
        *measured_figures(
            of_models(results), MEASURED_NAMES, captions.settings_of(results.records)
        ),
    ]


def _tables(results: Results) -> list[Table]:
    setting = captions.settings_of(results.records)
    return [
        table_1(results),
        table_2(results),
        skewness_table(results),
        matching_table("keys_needed", of_models(results), setting),
        table_3(results.tokens),
        table_4(results.training),
        table_4_causal(results.training),
    ]


def _facts(results: Results) -> pd.DataFrame:
    """One row a model: what it is, its metric with exact attention, and what it was run on."""
    rows = []
    for record in results.records:
        exact = results.find(record.model, "exact").get("value")
        unit = " %" if record.metric == "error" else ""
        row = {name: str(getattr(record, name, "")) for name in FACTS}
        row |= {"exact": f"{record.metric} {number(exact)}{unit}", "measured": measured_on(record)}
        row |= {"data": record.text.description, "hardware": record.run_on.hardware}
        rows.append(row | {"versions": versions(record.run_on.versions)})
    return pd.DataFrame(rows, columns=list(FACTS)).rename(columns=FACTS)


def write_report(
    records: Sequence[Record],
    training: Mapping[str, Mapping[str, Any]],
    tokens: Mapping[str, Any],
    folder: Path | str,
) -> None:
    """Write claims and tables (.csv, .md), figures (.png), grid.csv and index.html to a folder.

    `records` are the evaluation's, `training` the training metrics by model, `tokens` the token
    counts. The set of files is always the same: what was not evaluated is a dash in a table and one
    line of text in place of a figure. Raises ValueError for no records.
    """
    if not records:
        raise ValueError("no evaluation records given; a report needs at least one")
    results = Results.of(records, training, tokens)
    drawn: list[Table | Figure] = [*_tables(results), *_figures(results)]
    exhibits = {part.name: part for part in drawn}
    answered = claims.answered(results)
    parts: list[Part] = [
        Text(paragraphs=[INTRODUCTION.strip()]),
        answered,
        Text("What was run", frame=_facts(results)),
        *(exhibits.pop(name) for name in FIRST),
        *exhibits.values(),
        Text("A pretrained model", html=f"<p>{PRETRAINED}</p>"),
        Text("Every cell", html=f"<p>{GRID}</p>"),
        Text("Reproduce", [REPRODUCE.strip()], html="<pre>make repro</pre>"),
    ]
    files = {
        "grid.csv": grid_csv(results),
        "claims.md": answered.markdown(),
        "claims.csv": claims.claims_csv(answered.answers),
    }
    write_page(folder, "Value-aware approximate attention: results", parts, files)
