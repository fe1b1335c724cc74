"""The records behind a report, read once, and tidied as frames with one row a cell or setting."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, geometric_mean
from typing import Any

import pandas as pd

from value_aware_attention.measurement.cache_record import CacheRecord, DecodingRecord
from value_aware_attention.measurement.record import Cell, CellError, Record
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report.claim import Key, Spread
from value_aware_study.report.words import KERNEL_LABELS, grouped, model_label, series_label

RANDOM_SEED = "seed"
PARAMETERS = ("r", "norm", "rounds", "features", "scaling", RANDOM_SEED)
MODEL_COLUMNS = ("model", "task", "kernel", "length", "head_dim", "metric", "scale", "unit")
MEASURES = ("count", "value", "low", "high", "difference", "difference_low", "difference_high")
OUTPUT_ERRORS = tuple(f"relative_output_error{end}" for end in ("", "_low", "_high"))
DIRECTION = ("cosine", "relative_length")
"""Mean over layers of the cosine of o~ and o, and of the length of o~ in parts of that of o"""
EXTRAS = (*OUTPUT_ERRORS, *DIRECTION, "queries", "largest_support", "largest_error")
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
RANGE = ("trained_low", "trained_high")
"""Columns of the smallest and the largest value over the trainings of a model."""


@dataclass(frozen=True)
class Results:
    """Holds all that a report shows: the evaluated models in its order, and other records."""

    records: Sequence[Record]
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Measurements and hyperparameters of each model's training."""
    tokens: Mapping[str, Any] = field(default_factory=dict)
    """Counts of the training text, by source."""
    replicates: Sequence[Record] = field(default=(), kw_only=True)
    """Further trainings of models among the records."""
    surveyed: Sequence[Record] = field(default=(), kw_only=True)
    """Models with every method at equal budgets."""
    variants: Sequence[Record] = field(default=(), kw_only=True)
    """Models trained with an approximation."""
    benchmark: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Measured time and memory; {} where they were not measured."""
    spreads: Mapping[Key, Spread] = field(default_factory=dict, kw_only=True)
    """Spread over trainings of comparisons, in a published run of models trained several times."""
    caches: Sequence[CacheRecord] = field(default=(), kw_only=True)
    decoded: Sequence[DecodingRecord] = field(default=(), kw_only=True)
    probed: Sequence[Record] = field(default=(), kw_only=True)
    """Pretrained models."""
    explored: Exploration | None = field(default=None, kw_only=True)
    unchecked: Sequence[str] = field(default=(), kw_only=True)
    """Files that were read without a checksum."""

    @classmethod
    def of(cls, records: Iterable[Record], *others: Mapping[str, Any], **more: Any) -> "Results":
        """Sorts the records by model: a report does not depend on the order they were read in."""
        known = {name: position for position, name in enumerate(MODEL_ORDER)}
        ordered = sorted(records, key=lambda r: (known.get(r.model, len(known)), r.model))
        again = {r.model for r in ordered if any(is_replicate(r, one) for one in ordered)}
        firsts = [record for record in ordered if record.model not in again]
        replicates = [record for record in ordered if record.model in again]
        return cls(firsts, *others, replicates=replicates, **more)

    def trainings(self) -> list["Results"]:
        """Groups the models by training, each under the name of the model that it repeats.

        A group after the first holds only the models that were trained as often.
        """
        again = grouped(
            (one.model.removeprefix(first.model), replace(one, model=first.model))
            for first in self.records
            for one in self.replicates_of(first)
        )
        return [Results.of(models) for models in (self.records, *again.values())]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Tabulates cells, a row a seed; `relative_output_error` pools the layers.

        The columns are the same for every grid, but for parameters that are not in the usual list.
        """
        return _frame(self._rows)

    @cached_property
    def settings(self) -> pd.DataFrame:
        """Tabulates models and method settings: `cells` averaged over the seeds.

        Adds `seeds` (how many) and `seeds_low`, `seeds_high` (range of the seeds' values); `series`
        and `kernel_label`, the names of its curve and of its kernel. `low` and `high` average the
        seeds' intervals: they cover the text as that of one seed does, and not the draws, which
        units share. With replicates, `trained_low` and `trained_high` are the range of `value` over
        the trainings of the model; so in `nats` and in `changes`.
        """
        return self._firsts(self._settings)

    @cached_property
    def nats(self) -> pd.DataFrame:
        """Returns `settings` with perplexities as nats a token, and errors as they are."""
        return self._firsts(self._nats)

    @cached_property
    def changes(self) -> pd.DataFrame:
        """Returns `nats` whose `value`, `low` and `high` are changes from exact attention's."""
        frame = self._nats.copy()
        exact = frame[frame["approximation"] == "exact"].set_index("model")["value"]
        for name in ("value", "low", "high"):
            frame[name] = frame[name] - frame["model"].map(exact)
        return self._firsts(frame[frame["value"].notna()])

    @cached_property
    def _settings(self) -> pd.DataFrame:
        """Returns the `settings` of every training."""
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
        """Returns the `nats` of every training."""
        frame = self._settings.copy()
        causal = frame["metric"] == "perplexity"
        for name in ("value", "low", "high", "seeds_low", "seeds_high"):
            values = frame[name].astype(float)
            logged = values.where(causal).map(math.log, na_action="ignore")
            frame[name] = logged.where(causal, values)
        return frame

    def _firsts(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Returns the rows of first trainings, with the range of `value` over all of them."""
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
        """Maps each model to its name in titles and legends, causal models first."""
        ordered = sorted(self.records, key=lambda record: record.task != "causal")
        labels = {record.model: model_label(record) for record in ordered}
        twice = [label for label in labels.values() if list(labels.values()).count(label) > 1]
        return {
            name: f"{label} ({name})" if label in twice else label for name, label in labels.items()
        }

    def models(self, *names: str) -> list[Record]:
        """Lists the evaluated models of these names, in the order of the names."""
        return [record for name in names for record in self.records if record.model == name]

    def of_checkpoints(self, records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
        """Splits records into those of checkpoints that were evaluated, and the others."""
        evaluated = {record.hashes.get("checkpoint") for record in self.records}
        same = [record for record in records if record.hashes.get("checkpoint") in evaluated]
        return same, [record for record in records if record not in same]

    def replicates_of(self, record: Record) -> list[Record]:
        """Returns the further trainings of a model."""
        return [one for one in self.replicates if is_replicate(one, record)]

    def of_kernel(self, kernel: str) -> Record | None:
        """Finds the first causal language model trained with a kernel; None if there is none."""
        return next((record for record in self.causal if record.kernel == kernel), None)

    def find(
        self, model: str, approximation: str, among: pd.DataFrame | None = None, **parameters: Any
    ) -> Row:
        """Finds the setting of a model with exactly these parameters; {} for none.

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
        **{name: getattr(error, name) for name in DIRECTION},
        "queries": error.queries,
        "largest_support": error.largest_support,
        "largest_error": error.largest_error,
        "relative_output_error_by_layer": " ".join(layers),
    }


def _frame(rows: Sequence[Row], last: Sequence[str] = ()) -> pd.DataFrame:
    """Makes a data frame of fixed columns; any further parameter gets its own."""
    known = (*MODEL_COLUMNS, "approximation", *PARAMETERS)
    others = sorted({name for row in rows for name in row} - {*known, *MEASURED, *last})
    frame = pd.DataFrame(rows, columns=[*known, *others, *MEASURED, *last])
    frame[list(INTEGERS)] = frame[list(INTEGERS)].astype("Int64")
    numbers = [*MEASURES[1:], *OUTPUT_ERRORS, *DIRECTION, "largest_error"]
    frame[numbers] = frame[numbers].astype(float)
    return frame


def _mean_of_seeds(rows: Sequence[Row]) -> Row:
    """Averages the seeds: an error's mean is arithmetic, a perplexity's geometric."""
    row, values = dict(rows[0]), [row["value"] for row in rows]
    mean = geometric_mean if row["metric"] == "perplexity" else fmean
    if len(rows) > 1:
        for name in (*MEASURES[1:], *OUTPUT_ERRORS, *DIRECTION):
            average = mean if name in ("value", "low", "high") else fmean
            known = [row[name] for row in rows if row[name] is not None]
            row[name] = average(known) if len(known) == len(rows) else None
    return row | {"seeds": len(rows), "seeds_low": min(values), "seeds_high": max(values)}


def is_replicate(record: Record, first: Record) -> bool:
    """Tells whether a model is another training of a recipe: causal_elu_second of causal_elu."""
    recipe = (record.task, record.kernel, record.length, record.trained_with)
    return record.model.startswith(f"{first.model}_") and recipe == (
        first.task,
        first.kernel,
        first.length,
        first.trained_with,
    )


def known(frame: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Lists the given columns that hold a value in some row."""
    return [name for name in columns if name in frame and frame[name].notna().any()]


def with_range(frame: pd.DataFrame, same: Sequence[str], value: str) -> pd.DataFrame:
    """Keeps each setting's first row (`same` columns), with the `RANGE` of its values.

    The range is NaN for settings trained once. If every setting was trained once, no columns are
    added.
    """
    found = frame.groupby(list(same), dropna=False)[value]
    several = found.transform("size") > 1
    if not several.any():
        return frame
    ends = {name: found.transform(end) for name, end in zip(RANGE, ("min", "max"), strict=True)}
    of_several = {name: values.where(several) for name, values in ends.items()}
    return frame.assign(**of_several).drop_duplicates(list(same), ignore_index=True)
