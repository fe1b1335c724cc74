"""What a report is made of: the records of its models, read and tidied once."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import pandas as pd

from value_aware_attention.files import reading
from value_aware_attention.measurement.record import Cell, CellError, Record
from value_aware_study.report.labels import KERNEL_LABELS, model_label, series_label
from value_aware_study.report.replicates import is_replicate, with_range

__all__ = ["KERNELS", "OUTPUT_ERRORS", "Results", "files_of", "read_folder"]

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
MODEL_ORDER = (
    "masked_long",
    "masked_short",
    "causal_exponential",
    "causal_polynomial",
    "causal_elu",
)

Row = dict[str, Any]


def read_folder(*folders: Path | str) -> list[Record]:
    """The records of one report, in the order of their files' names.

    Raises FileNotFoundError for a folder without records; ValueError, naming the files, where they
    are of different scales or of different corpora, not of this version of the schema, damaged, or
    two of them of one model.
    """
    files = [file for folder in folders for file in files_of(folder)]
    read = {str(file): _record(file) for file in files}
    _check_alike("scales", {name: record.scale for name, record in read.items()})
    _check_alike("corpora", {name: record.text.description for name, record in read.items()})
    _check_models({name: record.model for name, record in read.items()})
    return list(read.values())


def _record(file: Path) -> Record:
    with reading(file):
        return Record.from_json(file.read_text(encoding="utf-8"), str(file))


def _check_models(models: Mapping[str, str]) -> None:
    """Raises ValueError, naming the files, where one model has two records."""
    first: dict[str, str] = {}
    for file, model in models.items():
        if (other := first.setdefault(model, file)) != file:
            raise ValueError(f"{other} and {file} are both records of {model}: remove one of them")


def files_of(folder: Path | str) -> list[Path]:
    """A folder's JSON files by name; raises FileNotFoundError where there are none."""
    if files := sorted(Path(folder).glob("*.json")):
        return files
    raise FileNotFoundError(f"{folder} holds no records; run dvc repro first")


def _check_alike(what: str, values: Mapping[str, str]) -> None:
    """Raises ValueError, naming the files, where they do not all have the same value."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    if len(names) > 1:
        found = "; ".join(f"{value!r}: {', '.join(files)}" for value, files in names.items())
        raise ValueError(f"the records of a report have one of its {what}, these have {found}")


@dataclass(frozen=True)
class Results:
    """The evaluated models in the report's order, and how they were trained, by model.

    `replicates` are further trainings of causal models among the `records`.
    """

    records: Sequence[Record]
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    """Counts of the training text by source"""
    replicates: Sequence[Record] = field(default=(), kw_only=True)

    @classmethod
    def of(cls, records: Iterable[Record], *others: Mapping[str, Any]) -> "Results":
        """Sorts the records by model: a report does not depend on the order they were read in."""
        known = {name: position for position, name in enumerate(MODEL_ORDER)}
        ordered = sorted(records, key=lambda r: (known.get(r.model, len(known)), r.model))
        again = {r.model for r in ordered if any(is_replicate(r, one) for one in ordered)}
        firsts = [record for record in ordered if record.model not in again]
        replicates = [record for record in ordered if record.model in again]
        return replace(cls(firsts, *others), replicates=replicates)

    def trainings(self) -> list["Results"]:
        """The models once for every time that the causal ones were trained; the masked in each."""
        masked = [record for record in self.records if record.task != "causal"]
        again: dict[str, list[Record]] = {}
        for first in self.causal:
            for one in self.replicates_of(first):
                again.setdefault(one.model.removeprefix(first.model), []).append(one)
        return [Results.of([*causal, *masked]) for causal in (self.causal, *again.values())]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Every cell of the grid in one row, seeds apart; `relative_output_error` pools the layers.

        The columns are the same for every grid, but for parameters that are not in the usual list.
        """
        return _frame(self._rows)

    @cached_property
    def settings(self) -> pd.DataFrame:
        """One row per model and method setting: `cells` with the seeds of random methods averaged.

        Adds `seeds` (how many) and `seeds_low`, `seeds_high` (range of the seeds' values); `series`
        and `kernel_label`, the names of its curve and of its kernel. `low` and `high` average the
        seeds' intervals: they cover the text as that of one seed does, and not the draws, which
        units share. With replicates, `trained_low` and `trained_high` are the range of `value` over
        the trainings of the model; so in `nats` and in `changes`.
        """
        return self._firsts(self._settings)

    @cached_property
    def nats(self) -> pd.DataFrame:
        """`settings` with perplexities as their logarithms, nats a token, errors as they are."""
        return self._firsts(self._nats)

    @cached_property
    def changes(self) -> pd.DataFrame:
        """`nats` with `value`, `low` and `high` as changes from exact attention's of the model."""
        frame = self._nats.copy()
        exact = frame[frame["approximation"] == "exact"].set_index("model")["value"]
        for name in ("value", "low", "high"):
            frame[name] = frame[name] - frame["model"].map(exact)
        return self._firsts(frame[frame["value"].notna()])

    @cached_property
    def _settings(self) -> pd.DataFrame:
        """`settings` of every training."""
        groups: dict[str, list[Row]] = {}
        for row in self._rows:
            setting = {name: row[name] for name in row if name not in (*MEASURED, RANDOM_SEED)}
            groups.setdefault(json.dumps(setting, sort_keys=True), []).append(row)
        frame = _frame([_mean_of_seeds(group) for group in groups.values()], SEED_COLUMNS)
        frame["series"] = [series_label(row) for row in frame.to_dict("records")]
        frame["kernel_label"] = frame["kernel"].map(KERNEL_LABELS)
        return frame.drop(columns=RANDOM_SEED)

    @cached_property
    def _nats(self) -> pd.DataFrame:
        """`nats` of every training."""
        frame = self._settings.copy()
        causal = frame["metric"] == "perplexity"
        for name in ("value", "low", "high", "seeds_low", "seeds_high"):
            values = frame[name].astype(float)
            logged = values.where(causal).map(math.log, na_action="ignore")
            frame[name] = logged.where(causal, values)
        return frame

    def _firsts(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows of first trainings, with the range of `value` over all of them."""
        if not self.replicates:
            return frame
        first = {one.model: r.model for r in self.records for one in (r, *self.replicates_of(r))}
        setting = [name for name in frame if name not in (*MODEL_COLUMNS, *MEASURED, *SEED_COLUMNS)]
        found = frame.assign(first=frame["model"].map(first))
        found = with_range(found, ["first", *setting], "value")
        return found[found["model"] == found["first"]].drop(columns="first")

    @property
    def causal(self) -> list[Record]:
        return [record for record in self.records if record.task == "causal"]

    def names(self) -> dict[str, str]:
        """Model -> the name that titles and legends have for it, causal models first."""
        ordered = sorted(self.records, key=lambda record: record.task != "causal")
        labels = {record.model: model_label(record) for record in ordered}
        twice = [label for label in labels.values() if list(labels.values()).count(label) > 1]
        return {
            name: f"{label} ({name})" if label in twice else label for name, label in labels.items()
        }

    def models(self, *names: str) -> list[Record]:
        """Those of these models that were evaluated, in the order of the names."""
        return [record for name in names for record in self.records if record.model == name]

    def replicates_of(self, record: Record) -> list[Record]:
        """The further trainings of a model."""
        return [one for one in self.replicates if is_replicate(one, record)]

    def of_kernel(self, kernel: str) -> Record | None:
        """The first causal language model trained with a kernel; None where there is none."""
        return next((record for record in self.causal if record.kernel == kernel), None)

    def find(
        self, model: str, approximation: str, among: pd.DataFrame | None = None, **parameters: Any
    ) -> Row:
        """The setting of a model with exactly these values of these parameters; {} for none.

        It is looked for `among` rows of `settings`, unless others are given.
        """
        frame = self.settings if among is None else among
        rows = frame[(frame["model"] == model) & (frame["approximation"] == approximation)]
        for name, value in parameters.items():
            rows = rows[(rows[name] == value).fillna(False)]
        return rows.iloc[0].to_dict() if len(rows) else {}

    @cached_property
    def _rows(self) -> list[Row]:
        every = [*self.records, *self.replicates]
        return [_row(record, cell) for record in every for cell in record.cells]


def _row(record: Record, cell: Cell) -> Row:
    row: Row = {name: getattr(record, name) for name in MODEL_COLUMNS}
    row |= {"approximation": cell.approximation, **cell.parameters}
    place = {"budget": cell.budget, "cost": cell.cost}
    row |= {name: value for name, value in place.items() if value is not None}
    return row | {name: getattr(cell, name) for name in MEASURES} | _error(cell.error)


def _error(error: CellError | None) -> Row:
    if error is None:
        return dict.fromkeys(EXTRAS) | {"relative_output_error_by_layer": ""}
    ends = dict(zip(OUTPUT_ERRORS, (error.relative, error.low, error.high), strict=True))
    layers = ("nan" if layer is None else f"{layer:.6g}" for layer in error.by_layer)
    return ends | {
        "queries": error.queries,
        "largest_support": error.largest_support,
        "largest_error": error.largest_error,
        "relative_output_error_by_layer": " ".join(layers),
    }


def _frame(rows: Sequence[Row], last: Sequence[str] = ()) -> pd.DataFrame:
    """Rows as a data frame of fixed columns; a parameter not in the usual list gets its own."""
    known = (*MODEL_COLUMNS, "approximation", *PARAMETERS)
    others = sorted({name for row in rows for name in row} - {*known, *MEASURED, *last})
    frame = pd.DataFrame(rows, columns=[*known, *others, *MEASURED, *last])
    frame[list(INTEGERS)] = frame[list(INTEGERS)].astype("Int64")
    numbers = [*MEASURES[1:], *OUTPUT_ERRORS, "largest_error"]
    frame[numbers] = frame[numbers].astype(float)
    return frame


def _mean_of_seeds(rows: Sequence[Row]) -> Row:
    """Mean of the seeds: arithmetic for an error, geometric (mean of nats) for a perplexity."""
    row, values = dict(rows[0]), [row["value"] for row in rows]
    mean = geometric_mean if row["metric"] == "perplexity" else fmean
    if len(rows) > 1:
        for name in (*MEASURES[1:], *OUTPUT_ERRORS):
            average = mean if name in ("value", "low", "high") else fmean
            known = [row[name] for row in rows if row[name] is not None]
            row[name] = average(known) if len(known) == len(rows) else None
    return row | {"seeds": len(rows), "seeds_low": min(values), "seeds_high": max(values)}
