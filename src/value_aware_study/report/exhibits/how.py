"""The models, the text and the machine behind every number of the page."""

from collections.abc import Sequence

import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.results import Results
from value_aware_study.report.words import grouped, number

INTRODUCTION = (
    "Language models are trained with exact attention, then evaluated with the attention of every "
    "layer replaced by an approximation. Numbers called the paper's are those printed in "
    "Value-aware Approximate Attention (Gupta and Berant, 2021); they belong to larger models "
    "trained on other text."
)
REPRODUCE = (
    "Every number and picture on this page is written by the report stage of the pipeline from the "
    "records of the evaluation. make repro makes all of them but for the survey (make survey), "
    "caches (make caches) and probed models (python -m pipelines.probe)."
)


def models(results: Results, machines: Sequence[tuple[str, str]] = ()) -> Exhibit:
    """Shows one row a model: its sizes, its text, and its metric with exact attention.

    `machines` pair the measurements of other sections with the machine that made them.
    """
    ordered = sorted(results.records, key=lambda record: record.task != "causal")
    every = [one for record in ordered for one in (record, *results.replicates_of(record))]
    data = pd.DataFrame(list(map(_row, every)))
    display = data.drop(columns="value")
    display["model"] = [
        name
        for record in ordered
        for name in (record.model, *(again(record, one) for one in results.replicates_of(record)))
    ]
    display.insert(5, "exact attention", list(map(_exact, data["metric"], data["value"])))
    display = display.drop(columns="metric").rename(columns=lambda name: name.replace("_", " "))
    runs = grouped((on, measured) for measured, on in [*captions.machines(every), *machines])
    read = {on: "; ".join(dict.fromkeys(measured)) for on, measured in runs.items()}
    return Exhibit(
        "models",
        "Models, text and machine",
        " ".join(f"{texts}; {on.partition('; ')[0]}." for on, texts in read.items()),
        [INTRODUCTION, *(f"{texts}; {on}" for on, texts in read.items()), REPRODUCE],
        table=Table(data, display.astype(str)),
    )


def again(first: Record, record: Record) -> str:
    """Names a further training of a model: "causal_elu, second training"."""
    return f"{first.model}, {record.model.removeprefix(f'{first.model}_')} training"


def _row(record: Record) -> dict[str, object]:
    exact = (cell.value for cell in record.cells if cell.approximation == "exact")
    return {
        "model": record.model,
        "kernel": record.kernel,
        "length": record.length,
        "head_dim": record.head_dim,
        "measured_on": captions.measured_on(record),
        "metric": record.metric,
        "value": next(exact, None),
    }


def _exact(metric: str, value: float | None) -> str:
    return f"{metric} {number(value)}{' %' if metric == 'error' else ''}"
