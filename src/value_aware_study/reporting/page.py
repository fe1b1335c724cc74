"""The whole report: every table, every figure and the page, written to one folder."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from value_aware_study.reporting import (
    captions,
    claims,
    figures,
    other_run,
    value_figures,
)
from value_aware_study.reporting.claim import claims_markdown, claims_section
from value_aware_study.reporting.document import html_document
from value_aware_study.reporting.figure import Figure
from value_aware_study.reporting.headline import headline
from value_aware_study.reporting.measured_report import keys_needed_table, measured_figures
from value_aware_study.reporting.measurements import of_records
from value_aware_study.reporting.records import Record, in_order
from value_aware_study.reporting.table import Table
from value_aware_study.reporting.tables import grid_csv, skewness_table, table_1, table_2
from value_aware_study.reporting.training_tables import table_3, table_4, table_4_causal

__all__ = ["headline", "write_report"]

# What the figures of output error, keys needed and skewness are called here.
MEASURED_NAMES = {
    "output_error": ("figure_6", "Figure 6. "),
    "keys_needed": ("figure_7", "Figure 7. "),
    "skewness_gap": ("figure_8", "Figure 8. "),
}


def _figures(
    records: Sequence[Record],
    training: Mapping[str, Mapping[str, Any]],
    other: Sequence[Record],
) -> list[Figure]:
    long = [record for record in records if record["model"] == "masked_long"]
    causal = [record for record in records if record["task"] == "causal"]
    theirs = [record for record in other if record["task"] == "causal"]
    return [
        Figure(
            "figure_1",
            "Figure 1. Masked-LM error of the long model under approximate attention",
            "OVO: optimal value-oblivious; OVA: optimal value-aware; ORF as written in the paper's "
            f"A.1 and with Performer's scaling. {captions.BEST_FOUND} "
            f"{captions.INTERVAL} {captions.SEEDS} {captions.NOT_JOINED} {captions.ours(long)}",
            figures.figure_1(records),
        ),
        Figure(
            "figure_2",
            "Figure 2. Loss of the optimal value-oblivious approximation, for each kernel",
            f"Top r keys by attention weight, up to all keys. {captions.INTERVAL} "
            f"{' '.join(filter(None, [captions.ours(causal), other_run.described(theirs)]))}",
            figures.figure_2(records, theirs),
        ),
        Figure(
            "figure_3",
            "Figure 3. Learning curves with exact attention",
            "The long masked model starts from the trained short one, with new positions; a step "
            "of one model need not see as many tokens as a step of another. "
            f"{captions.ours(records)}",
            figures.figure_3(records, training),
        ),
        Figure(
            "figure_4",
            "Figure 4. Output error of the attention against the error of the model",
            "Each point is one setting: its relative output error, and the metric with that "
            f"approximation in every layer. {captions.OUTPUT_ERROR} "
            f"{captions.recorded_on([*long, *causal])} grid.csv has the intervals. Settings with "
            f"an error under {value_figures.SMALLEST_ERROR:g} count as exact and are left out. "
            f"Not in the paper. The metric: {captions.ours([*long, *causal])}",
            value_figures.figure_4(records),
        ),
        Figure(
            "figure_5",
            "Figure 5. What choosing by the output gains in the end",
            f"{captions.OPTIMAL} {captions.BEST_FOUND} {captions.BASELINES} Sampled from α: r "
            "draws with replacement, mean of the seeds. Not in the paper, which has r = 1 and 65 "
            f"in Tables 1 and 2. {captions.INTERVAL} {captions.NOT_JOINED} "
            f"{captions.ours([*long, *causal])}",
            value_figures.figure_5(records),
        ),
        *measured_figures(of_records(records), MEASURED_NAMES, captions.settings_of(records)),
    ]


def _tables(
    records: Sequence[Record],
    training: Mapping[str, Mapping[str, Any]],
    tokens: Mapping[str, Any],
    other: Sequence[Record],
) -> list[Table]:
    return [
        table_1(records, other),
        table_2(records, other),
        skewness_table(records),
        keys_needed_table(of_records(records), captions.settings_of(records)),
        table_3(tokens),
        table_4(training),
        table_4_causal(training),
    ]


def _write(
    folder: Path,
    records: Sequence[Record],
    tables: Sequence[Table],
    drawn: Sequence[Figure],
    other: Sequence[Record],
) -> None:
    for table in tables:
        (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
        (folder / f"{table.name}.md").write_text(table.markdown(), encoding="utf-8")
    (folder / "grid.csv").write_text(grid_csv(records), encoding="utf-8")
    for figure in drawn:
        figures.save(figure.chart, folder / f"{figure.name}.png")
    about, found = claims.about(records), claims.answers(records)
    answered = claims_markdown(claims.TITLE, about, found)
    (folder / "claims.md").write_text(answered, encoding="utf-8")
    (folder / "claims.csv").write_text(claims.claims_csv(found), encoding="utf-8")
    first = claims_section(claims.TITLE, about, found)
    html = html_document(records, tables, drawn, other, first=first)
    (folder / "index.html").write_text(html, encoding="utf-8")


def write_report(
    records: Sequence[Record],
    training: Mapping[str, Mapping[str, Any]],
    tokens: Mapping[str, Any],
    folder: Path,
    other: Sequence[Record] = (),
) -> None:
    """Write claims and tables (.csv, .md), figures (.png), grid.csv and index.html to a folder.

    `records` are the evaluation's, `training` the training metrics by model, `tokens` the token
    counts. `other` are the records of another run (`other_run.compact`), which Tables 1 and 2 and
    Figure 2 show beside ours unless they are of the same scale. The set of files is always the
    same: what was not evaluated is a dash in a table and one line of text in place of a figure. The
    same input gives the same bytes. Files appear in `folder` only once all of them are written.
    """
    if not records:
        raise ValueError("no evaluation records given; a report needs at least one")
    records, other = in_order(records), other_run.of_another_scale(other, records)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as temporary:
        _write(
            Path(temporary),
            records,
            _tables(records, training, tokens, other),
            _figures(records, training, other),
            other,
        )
        for path in sorted(Path(temporary).iterdir()):
            os.replace(path, folder / path.name)
