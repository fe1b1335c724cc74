"""The records behind a report, read once, and their numbers as frames.

A row of `cells` is a method with one seed in one model, a row of `settings` the mean of its seeds.
In the attention layers, a row of `error_rows` is the error of a method with so many keys, and one
of `gap_rows` a layer under one kernel.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, geometric_mean
from typing import Any

import pandas as pd

from value_aware_attention.measurement.prompted import PromptRecord
from value_aware_attention.measurement.record import (
    AWARE,
    OBLIVIOUS,
    Attention,
    Cell,
    OutputError,
    Record,
)
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report.claim import Key, Spread
from value_aware_study.report.look import Mark, kernel_mark, model_mark
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
RANGE = ("trained_low", "trained_high")
"""Columns of the smallest and the largest value over the trainings of a model."""
KERNELS = ("exponential", "polynomial", "elu")
MODEL_ORDER = ("masked_long", "masked_short", *(f"causal_{kernel}" for kernel in KERNELS))
OPTIMAL = (OBLIVIOUS, AWARE)
FLOOR = 1e-6
"""Relative errors below it, zero included, are mostly rounding, and are drawn at it."""
SIZE = "4"
"""Keys kept by both oracles whose errors the skewness gap compares, as records name it."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """Holds all that a report shows: the evaluated models in its order, and other records.

    Attributes:
        training: Measurements and hyperparameters of each model's training.
        tokens: Counts of the training text, by source.
        replicates: Further trainings of models among the records.
        surveyed: Models with every method at equal budgets.
        variants: Models trained with an approximation.
        benchmark: Measured time and memory; {} where they were not measured.
        spreads: Spread over trainings of comparisons, in a published run of models trained several
            times.
        probed: Pretrained models.
        pretrained: Pretrained models with the grid of `evaluate_pretrained`, a record a text and
            length.
        prompted: Compressed caches of a pretrained model, a record a kind, text and length of
            prompts.
        unchecked: Files that were read without a checksum.
    """

    records: Sequence[Record]
    training: Mapping[str, Row] = field(default_factory=dict)
    tokens: Row = field(default_factory=dict)
    replicates: Sequence[Record] = field(default=(), kw_only=True)
    surveyed: Sequence[Record] = field(default=(), kw_only=True)
    variants: Sequence[Record] = field(default=(), kw_only=True)
    benchmark: Row = field(default_factory=dict, kw_only=True)
    spreads: Mapping[Key, Spread] = field(default_factory=dict, kw_only=True)
    probed: Sequence[Record] = field(default=(), kw_only=True)
    pretrained: Sequence[Record] = field(default=(), kw_only=True)
    prompted: Sequence[PromptRecord] = field(default=(), kw_only=True)
    explored: Exploration | None = field(default=None, kw_only=True)
    unchecked: Sequence[str] = field(default=(), kw_only=True)

    @classmethod
    def of(cls, records: Iterable[Record], *others: Row, **more: Any) -> "Results":
        """Sorts the records by model: a report does not depend on the order they were read in."""
        places = {name: place for place, name in enumerate(MODEL_ORDER)}
        ordered = sorted(records, key=lambda r: (places.get(r.model, len(places)), r.model))
        again = [r for r in ordered if any(is_replicate(r, first) for first in ordered)]
        return cls([r for r in ordered if r not in again], *others, replicates=again, **more)

    def trainings(self) -> list["Results"]:
        """Groups the models by training, each under the name of the model that it repeats.

        A group after the first holds only the models that were trained as often.
        """
        again = grouped(
            (record.model.removeprefix(first.model), replace(record, model=first.model))
            for first in self.records
            for record in self.replicates_of(first)
        )
        return [Results.of(models) for models in (self.records, *again.values())]

    @property
    def causal(self) -> list[Record]:
        return [record for record in self.records if record.task == "causal"]

    @property
    def causal_first(self) -> list[Record]:
        return [*self.causal, *(record for record in self.records if record.task != "causal")]

    def names(self) -> dict[str, str]:
        """Maps each model to its name in titles and legends, causal models first."""
        labels = {record.model: model_label(record) for record in self.causal_first}
        counts = Counter(labels.values())
        return {
            name: f"{label} ({name})" if counts[label] > 1 else label
            for name, label in labels.items()
        }

    def models(self, *names: str) -> list[Record]:
        """Lists the evaluated models of these names, in the order of the names."""
        return [record for name in names for record in self.records if record.model == name]

    def replicates_of(self, record: Record) -> list[Record]:
        """Returns the further trainings of a model."""
        return [again for again in self.replicates if is_replicate(again, record)]

    def of_kernel(self, kernel: str) -> Record | None:
        """Finds the first causal language model trained with a kernel; None if there is none."""
        return next((record for record in self.causal if record.kernel == kernel), None)

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
        records = (*self.records, *self.replicates)
        return [_row(record, cell) for record in records for cell in record.cells]

    @cached_property
    def _settings(self) -> pd.DataFrame:
        """Returns the `settings` of every training."""
        varying = (*MEASURED, RANDOM_SEED)
        setting = ({name: row[name] for name in row if name not in varying} for row in self._rows)
        texts = [json.dumps(values, sort_keys=True) for values in setting]
        groups = grouped(zip(texts, self._rows, strict=True)).values()
        frame = _frame([_mean_of_seeds(rows) for rows in groups], SEED_COLUMNS)
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
            frame[name] = (
                values.where(causal).map(math.log, na_action="ignore").where(causal, values)
            )
        return frame

    def _firsts(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Returns the rows of first trainings, with the range of `value` over all of them."""
        if not self.replicates:
            return frame
        first = {
            record.model: name.model
            for name in self.records
            for record in (name, *self.replicates_of(name))
        }
        setting = [name for name in frame if name not in (*MODEL_COLUMNS, *MEASURED, *SEED_COLUMNS)]
        frame = frame.assign(first=frame["model"].map(first))
        frame = with_range(frame, ["first", *setting], "value")
        return frame[frame["model"] == frame["first"]].drop(columns="first")


def _row(record: Record, cell: Cell) -> Row:
    row: Row = {name: getattr(record, name) for name in MODEL_COLUMNS}
    row |= {"approximation": cell.approximation, **cell.parameters}
    row |= {name: x for name in ("budget", "cost") if (x := getattr(cell, name)) is not None}
    row |= {name: getattr(cell, name) for name in MEASURES}
    error = cell.error
    if error is None:
        return row | dict.fromkeys(EXTRAS) | {"relative_output_error_by_layer": ""}
    layers = ("nan" if layer is None else f"{layer:.6g}" for layer in error.by_layer)
    return (
        row
        | dict(zip(OUTPUT_ERRORS, (error.relative, error.low, error.high), strict=True))
        | {name: getattr(error, name) for name in EXTRAS if name not in OUTPUT_ERRORS}
        | {"relative_output_error_by_layer": " ".join(layers)}
    )


def _frame(rows: Sequence[Row], last: Sequence[str] = ()) -> pd.DataFrame:
    """Makes a data frame of fixed columns; any further parameter gets its own."""
    fixed = (*MODEL_COLUMNS, "approximation", *PARAMETERS)
    others = sorted({name for row in rows for name in row} - {*fixed, *MEASURED, *last})
    frame = pd.DataFrame(rows, columns=[*fixed, *others, *MEASURED, *last])
    numbers = [*MEASURES[1:], *OUTPUT_ERRORS, *DIRECTION, "largest_error"]
    return frame.astype(dict.fromkeys(INTEGERS, "Int64") | dict.fromkeys(numbers, float))


def _mean_of_seeds(rows: Sequence[Row]) -> Row:
    """Averages the seeds: an error's mean is arithmetic, a perplexity's geometric."""
    row, values = dict(rows[0]), [row["value"] for row in rows]
    mean = geometric_mean if row["metric"] == "perplexity" else fmean
    if len(rows) > 1:
        for name in (*MEASURES[1:], *OUTPUT_ERRORS, *DIRECTION):
            average = mean if name in ("value", "low", "high") else fmean
            of_seeds = [row[name] for row in rows]
            row[name] = None if None in of_seeds else average(of_seeds)
    return row | {"seeds": len(rows), "seeds_low": min(values), "seeds_high": max(values)}


def is_replicate(record: Record, first: Record) -> bool:
    """Tells whether a model is another training of a recipe: causal_elu_second of causal_elu."""
    recipe, first_recipe = (
        (model.task, model.kernel, model.length, model.trained_with) for model in (record, first)
    )
    return record.model.startswith(f"{first.model}_") and recipe == first_recipe


def filled(frame: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Lists the given columns that hold a value in some row."""
    return [name for name in columns if name in frame and frame[name].notna().any()]


def with_range(frame: pd.DataFrame, same: Sequence[str], value: str) -> pd.DataFrame:
    """Keeps each setting's first row (`same` columns), with the `RANGE` of its values.

    The range is NaN for settings trained once. If every setting was trained once, no columns are
    added.
    """
    groups = frame.groupby(list(same), dropna=False)[value]
    several = groups.transform("size") > 1
    if not several.any():
        return frame
    ranges = {
        name: groups.transform(end).where(several)
        for name, end in zip(RANGE, ("min", "max"), strict=True)
    }
    return frame.assign(**ranges).drop_duplicates(list(same), ignore_index=True)


@dataclass(frozen=True)
class Measured:
    """Attention of one model, or of one kernel in a model, and its name and mark in figures."""

    label: str
    mark: Mark
    attention: Attention
    replicates: Sequence[Attention] = ()
    """The attention of further trainings of the model."""
    control: Attention | None = None
    """The attention of the same architecture with random weights."""

    @property
    def output_error(self) -> OutputError:
        return self.attention.output_error


def of_models(results: Results) -> list[Measured]:
    """Returns the attention of each model with its own kernel, causal models first."""
    return [
        Measured(
            model_label(record),
            model_mark(record),
            attention,
            own_attention(*results.replicates_of(record)),
            at_random(record),
        )
        for record in results.causal_first
        for attention in own_attention(record)
    ]


def of_kernels(record: Record) -> list[Measured]:
    """Returns the attention of one model with each kernel: its own, and others put in post hoc."""
    return [
        Measured(
            f"{KERNEL_LABELS.get(attention.kernel, attention.kernel)}, "
            f"{'post hoc' if attention.post_hoc else 'its own'}",
            kernel_mark(attention.kernel),
            attention,
            control=None if place else at_random(record),
        )
        for place, attention in enumerate(record.attention)
    ]


def own_attention(*records: Record) -> list[Attention]:
    """Returns the attention of each record with the kernel that its cells have."""
    return [attention for record in records for attention in record.attention[:1]]


def at_random(record: Record) -> Attention | None:
    """Returns the attention of the record's control, with the kernel of its cells."""
    return next(iter(record.control.attention if record.control else ()), None)


def error_rows(output_error: OutputError, method: str, layer: int | None = None) -> list[Row]:
    """Computes a method's relative output error by size: sum of errors over sum of norms.

    `layer` None pools all layers, each measured on the same number of queries. The error is None
    where every output is 0.
    """
    curve, norms = output_error.methods[method], output_error.squared_norm
    layers = range(len(norms)) if layer is None else [layer]
    norm = sum(norms[place] for place in layers)
    errors = zip(*(curve.layers[place] for place in layers), strict=True)
    return [
        {"r": r, "error": sum(at_size) / norm if norm else None}
        for r, at_size in zip(curve.sizes, errors, strict=True)
    ]


def gap_rows(measured: Iterable[Measured]) -> pd.DataFrame:
    """Tabulates effective keys (% of all keys) and OVO over OVA error by layer and kernel."""
    return pd.DataFrame(
        [
            {"model": item.label, "layer": cell.layer, "degree": cell.degree, "own": cell.own}
            | {"series": "own kernel" if cell.own else f"degree {cell.degree}"}
            | {"share": 100 * cell.effective_keys / item.output_error.keys}
            | {"gap": max(cell.oblivious[SIZE], FLOOR) / max(cell.aware[SIZE], FLOOR)}
            | {"same": cell.same_first_key}
            for item in measured
            if item.attention.skewness_gap
            for cell in item.attention.skewness_gap.cells
            if SIZE in cell.oblivious
        ],
        columns=["model", "layer", "degree", "own", "series", "share", "gap", "same"],
    )
