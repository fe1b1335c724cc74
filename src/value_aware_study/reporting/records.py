"""Records of the evaluation as tidy data frames, and the names a reader sees."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from value_aware_study.cards import cards

Record = Mapping[str, Any]

RANDOM_SEED = "seed"
PARAMETERS = ("r", "norm", "rounds", "features", "scaling", RANDOM_SEED)
MODEL_COLUMNS = ("model", "task", "kernel", "length", "head_dim", "metric", "scale", "unit")
MEASURES = ("count", "value", "low", "high", "difference", "difference_low", "difference_high")
OUTPUT_ERRORS = tuple(f"relative_output_error{end}" for end in ("", "_low", "_high"))
EXTRAS = (*OUTPUT_ERRORS, "queries", "largest_support", "largest_error")
MEASURED = (*MEASURES, *EXTRAS, "relative_output_error_by_layer")
SEED_COLUMNS = ("seeds", "seeds_low", "seeds_high")
INTEGERS = (
    *("length", "head_dim", "r", "norm", "rounds", "features", "seed"),
    *("count", "queries", "largest_support"),
)

KERNELS = ("exponential", "polynomial", "elu")
KERNEL_LABELS = {"exponential": "exponential", "polynomial": "polynomial (deg 2)", "elu": "elu"}
MODEL_ORDER = (
    "masked_long",
    "masked_short",
    "causal_exponential",
    "causal_polynomial",
    "causal_elu",
)


def model_named(records: Iterable[Record], name: str) -> Record | None:
    return next((record for record in records if record["model"] == name), None)


def causal_model(records: Iterable[Record], kernel: str) -> Record | None:
    """The causal language model trained with a kernel, or None where none was evaluated."""
    matches = (r for r in records if r["task"] == "causal" and r["kernel"] == kernel)
    return next(matches, None)


def in_order(records: Iterable[Record]) -> list[Record]:
    """Records sorted by model, so that a report does not depend on the order they were read in."""
    known = {name: position for position, name in enumerate(MODEL_ORDER)}
    return sorted(records, key=lambda r: (known.get(r["model"], len(known)), r["model"]))


def _cell_row(record: Record, cell: Record) -> dict[str, Any]:
    layers = cell.get("relative_output_error_by_layer") or []
    row = {name: record.get(name) for name in MODEL_COLUMNS}
    row |= {"approximation": cell["approximation"], **cell["parameters"]}
    row |= {name: cell.get(name) for name in MEASURES + EXTRAS}
    row["relative_output_error_by_layer"] = " ".join(f"{error:.6g}" for error in layers)
    return row


def _rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    return [_cell_row(record, cell) for record in in_order(records) for cell in record["cells"]]


def _frame(rows: Sequence[Mapping[str, Any]], last: Sequence[str] = ()) -> pd.DataFrame:
    """Rows as a data frame of fixed columns; a parameter not in the usual list gets its own."""
    known = (*MODEL_COLUMNS, "approximation", *PARAMETERS)
    others = sorted({name for row in rows for name in row} - {*known, *MEASURED, *last})
    frame = pd.DataFrame(rows, columns=[*known, *others, *MEASURED, *last])
    frame[list(INTEGERS)] = frame[list(INTEGERS)].astype("Int64")
    numbers = [*MEASURES[1:], *OUTPUT_ERRORS, "largest_error"]
    frame[numbers] = frame[numbers].astype(float)
    return frame


def cells(records: Iterable[Record]) -> pd.DataFrame:
    """Every cell of the grid in one row, seeds apart; `relative_output_error` pools the layers.

    The columns are the same for every grid, but for parameters that are not in the usual list.
    """
    return _frame(_rows(records))


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def _mean_of_seeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of the seeds: arithmetic for an error, geometric (mean of nats) for a perplexity."""
    row, values = dict(rows[0]), [row["value"] for row in rows]
    mean = _geometric_mean if row["metric"] == "perplexity" else fmean
    if len(rows) > 1:
        for name in (*MEASURES[1:], *OUTPUT_ERRORS):
            average = mean if name in ("value", "low", "high") else fmean
            known = [row[name] for row in rows if row[name] is not None]
            row[name] = average(known) if len(known) == len(rows) else None
    return row | {"seeds": len(rows), "seeds_low": min(values), "seeds_high": max(values)}


def settings(records: Iterable[Record]) -> pd.DataFrame:
    """One row per model and method setting: `cells` with the seeds of random methods averaged.

    Adds `seeds` (how many) and `seeds_low`, `seeds_high` (range of the seeds' values). `low` and
    `high` average the seeds' intervals: they cover the text as that of one seed does, and not the
    draws, which units share.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(records):
        setting = {name: row[name] for name in row if name not in (*MEASURED, RANDOM_SEED)}
        groups.setdefault(json.dumps(setting, sort_keys=True), []).append(row)
    rows = [_mean_of_seeds(group) for group in groups.values()]
    return _frame(rows, SEED_COLUMNS).drop(columns=RANDOM_SEED)


def find(
    frame: pd.DataFrame, model: str, approximation: str, parameters: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The setting of a model with exactly these values of these parameters, or None."""
    rows = frame[(frame["model"] == model) & (frame["approximation"] == approximation)]
    for name, value in parameters.items():
        rows = rows[(rows[name] == value).fillna(False)]
    return rows.iloc[0].to_dict() if len(rows) else None


def method_label(name: str) -> str:
    """The name of a method that a reader sees; the option's where it has no card."""
    known = cards()
    return known[name].label if name in known else name


def series_label(row: Mapping[str, Any]) -> str:
    """The curve a setting belongs to: the method, with the argument that tells its curves apart."""
    card = cards().get(row["approximation"])
    return card.curve(row) if card else row["approximation"]


def setting_label(row: Mapping[str, Any]) -> str:
    """Name of a setting as a row of a table: "OVO 65", "LSH r = 64, 4 rounds"."""
    name, series = method_label(row["approximation"]), series_label(row)
    card = cards().get(row["approximation"])
    if card and card.size:
        return series.replace(name, f"{name} {card.size.format(**row)}", 1)
    return series if pd.isna(row.get("r")) else f"{series} {int(row['r'])}"
