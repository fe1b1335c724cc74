"""The records behind a report, read once, and their numbers as frames.

A row of `cells` is a method with one seed in one training of a model. A row of `settings` is the
mean over its seeds and the model's trainings. In the attention layers, a row of `error_rows` is a
method's error with a number of keys, and a row of `gap_rows` is a layer under one kernel.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, geometric_mean, stdev
from typing import Any

import numpy as np
import pandas as pd

from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.estimate import Array, Estimate, ratio_of_sums
from value_aware_attention.records.record import (
    AWARE,
    OBLIVIOUS,
    Attention,
    Cell,
    OutputError,
    Record,
)
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report.claim import Key, Spread, margin, quantile
from value_aware_study.report.look import Mark, kernel_mark, model_mark
from value_aware_study.report.words import (
    KERNEL_LABELS,
    TRAINING,
    grouped,
    model_label,
    of_trainings,
    series_label,
)

RANDOM_SEED = "seed"
MODEL_COLUMNS = ("model", "task", "kernel", "length", "head_dim", "metric", "scale", "unit")
MEASURES = ("count", "value", "low", "high", "difference", "difference_low", "difference_high")
OUTPUT_ERRORS = tuple(f"relative_output_error{end}" for end in ("", "_low", "_high"))
DIRECTION_COLUMNS = ("cosine", "relative_length")
"""Means over layers: cosine of o~ and o, and the length of o~ relative to that of o"""
EXTRAS = (*OUTPUT_ERRORS, *DIRECTION_COLUMNS, "queries", "largest_support", "largest_error")
MEASURED = (*MEASURES, *EXTRAS, "relative_output_error_by_layer")
SEED_COLUMNS = ("seeds", "seeds_low", "seeds_high")
SINGLE = (*OUTPUT_ERRORS[1:], "queries", "largest_support", "largest_error")
"""Columns without a mean over trainings"""
GAP_PLACE = ("model", "training", "layer")
INTEGERS = (
    *("length", "head_dim", "r", "norm", "rounds", "features", "seed"),
    *("count", "queries", "largest_support"),
)
FIRST = "first"
"""Name of a model's first training; further trainings add their name to the model's"""
KERNEL_NAMES = ("exponential", "polynomial", "elu")
MODEL_ORDER = ("masked_long", "masked_short", *(f"causal_{kernel}" for kernel in KERNEL_NAMES))
OPTIMAL_METHODS = (OBLIVIOUS, AWARE)
FLOOR = 1e-6
"""Relative errors below it, including zero, are mostly rounding and are drawn at this value."""
SIZE = "4"
"""Number of keys, as records name it, at which the skewness gap compares the oracles' errors"""
Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """All data of a report: the evaluated models, in its order, and other records.

    Attributes:
        training: Measurements and hyperparameters of each model's training.
        tokens: Counts of the training text, by source.
        replicates: Further trainings of models in `records`.
        surveyed: Models with every method at equal budgets.
        variants: Models trained with an approximation.
        survey_of: Scale of the published run of `surveyed` and `variants`; "" for this run.
        spreads: Spread of comparisons over trainings, from a published run that trained models
            several times.
        verdicts: Verdicts of published runs on each claim, by their scale.
        probed: Pretrained models.
        pretrained: Pretrained models with the grid of `evaluate_pretrained`, one record per text
            and length.
        prompted: Compressed caches of a pretrained model, one record per kind, text and length of
            prompts.
        links: Addresses of code and manual, by name.
        unchecked: Files that were read without a checksum.
    """

    records: Sequence[Record]
    training: Mapping[str, Row] = field(default_factory=dict)
    tokens: Row = field(default_factory=dict)
    replicates: Sequence[Record] = field(default=(), kw_only=True)
    surveyed: Sequence[Record] = field(default=(), kw_only=True)
    variants: Sequence[Record] = field(default=(), kw_only=True)
    survey_of: str = field(default="", kw_only=True)
    spreads: Mapping[Key, Spread] = field(default_factory=dict, kw_only=True)
    verdicts: Mapping[str, Mapping[str, str]] = field(default_factory=dict, kw_only=True)
    probed: Sequence[Record] = field(default=(), kw_only=True)
    pretrained: Sequence[Record] = field(default=(), kw_only=True)
    prompted: Sequence[CacheRecord] = field(default=(), kw_only=True)
    explored: Exploration | None = field(default=None, kw_only=True)
    links: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    unchecked: Sequence[str] = field(default=(), kw_only=True)

    @classmethod
    def of(cls, records: Iterable[Record], *others: Row, **more: Any) -> "Results":
        """Sorts the records by model, so that a report does not depend on their order."""
        places = {name: place for place, name in enumerate(MODEL_ORDER)}
        ordered = sorted(records, key=lambda r: (places.get(r.model, len(places)), r.model))
        again = [r for r in ordered if any(is_replicate(r, first) for first in ordered)]
        return cls([r for r in ordered if r not in again], *others, replicates=again, **more)

    def trainings(self) -> list["Results"]:
        """Groups the models by training, each under the name of the model that it repeats.

        Later groups hold only the models that were trained as often.
        """
        of_training = grouped(
            (name, replace(again, model=record.model))
            for record in self.records
            for name, again in self.trainings_of(record).items()
        )
        return [Results.of(models) for models in of_training.values()] or [Results.of([])]

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
        """Lists the evaluated models with these names, in the order of the names."""
        return [record for name in names for record in self.records if record.model == name]

    def trainings_of(self, record: Record) -> dict[str, Record]:
        """Maps the names of a model's trainings to their records: "first", "second"."""
        again = (replicate for replicate in self.replicates if is_replicate(replicate, record))
        return {FIRST: record} | {r.model.removeprefix(f"{record.model}_"): r for r in again}

    def of_kernel(self, kernel: str) -> Record | None:
        """Finds the first causal model of our scales trained with a kernel, or None."""
        return next((r for r in self.causal if r.kernel == kernel and r.scale), None)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Tabulates cells, one row per training and seed; `relative_output_error` pools the layers.

        Every grid has the same columns, except for unusual parameters.
        """
        return _frame(
            [
                _row(again, cell) | {"training": training}
                for record in self.records
                for training, again in self.trainings_of(record).items()
                for cell in again.cells
            ]
        )

    @cached_property
    def settings(self) -> pd.DataFrame:
        """Tabulates models and method settings: `cells` averaged over the seeds, then trainings.

        Adds `seeds` (how many) and `seeds_low`, `seeds_high` (range of the seeds' values); `series`
        and `kernel_label`, the names of its curve and of its kernel; `share`, r in percent of the
        length. `low` and `high` average the seeds' intervals. These cover the text as one seed's
        interval does, but not the draws, because all units share them. For a model trained several
        times they cover text and training, and the columns `training_<name>` hold the single
        values. The same holds for `nats` and `changes`.
        """
        trainings = [self.trainings_of(record) for record in self.records]
        names = dict.fromkeys(TRAINING + name for of_model in trainings for name in of_model)
        frame = _frame(
            [row for of_model in trainings for row in _settings(of_model)],
            (*SEED_COLUMNS, *(names if self.replicates else ())),
        )
        frame = frame.assign(
            series=[series_label(row) for row in frame.to_dict("records")],
            kernel_label=frame["kernel"].map(KERNEL_LABELS),
            share=(100 * frame["r"] / frame["length"]).astype(float),
        )
        return frame.drop(columns=RANDOM_SEED)

    @cached_property
    def nats(self) -> pd.DataFrame:
        """Converts perplexities in `settings` to nats per token; errors stay."""
        frame = self.settings.copy()
        causal = frame["metric"] == "perplexity"
        for name in ("value", "low", "high", "seeds_low", "seeds_high", *of_trainings(frame)):
            values = frame[name].astype(float)
            frame[name] = (
                values.where(causal).map(math.log, na_action="ignore").where(causal, values)
            )
        return frame

    @cached_property
    def changes(self) -> pd.DataFrame:
        """`nats`, with `value`, `low` and `high` as differences from exact attention.

        A training's value is the difference from its own exact attention.
        """
        frame, singles = self.nats.copy(), of_trainings(self.nats)
        exact = frame[frame["approximation"] == "exact"].set_index("model")
        for name in ("value", "low", "high", *singles):
            frame[name] = frame[name] - frame["model"].map(
                exact[name if name in singles else "value"]
            )
        return frame[frame["value"].notna()]

    def find(
        self, model: str, approximation: str, among: pd.DataFrame | None = None, **parameters: Any
    ) -> Row:
        """Finds the setting of a model with exactly these parameters; {} for none.

        It searches the rows `among`; None = all of `settings`.
        """
        frame = self.settings if among is None else among
        rows = frame[(frame["model"] == model) & (frame["approximation"] == approximation)]
        for name, value in parameters.items():
            rows = rows[(rows[name] == value).fillna(False)]
        return rows.iloc[0].to_dict() if len(rows) else {}


def _row(record: Record, cell: Cell) -> Row:
    row: Row = (
        {name: getattr(record, name) for name in MODEL_COLUMNS}
        | {"approximation": cell.approximation, **cell.parameters}
        | {name: x for name in ("budget", "cost") if (x := getattr(cell, name)) is not None}
        | {name: getattr(cell, name) for name in MEASURES}
    )
    if (error := cell.error) is None:
        return row | dict.fromkeys(EXTRAS) | {"relative_output_error_by_layer": ""}
    return (
        row
        | dict(zip(OUTPUT_ERRORS, (error.relative, error.low, error.high), strict=True))
        | {name: getattr(error, name) for name in EXTRAS if name not in OUTPUT_ERRORS}
        | {
            "relative_output_error_by_layer": " ".join(
                "nan" if layer is None else f"{layer:.6g}" for layer in error.by_layer
            )
        }
    )


def _frame(rows: Sequence[Row], last: Sequence[str] = ()) -> pd.DataFrame:
    """Makes a data frame of fixed columns, and one for each further parameter."""
    fixed = (
        *(*MODEL_COLUMNS, "approximation"),
        *("r", "norm", "rounds", "features", "scaling", RANDOM_SEED),
    )
    others = sorted({name for row in rows for name in row} - {*fixed, *MEASURED, *last})
    frame = pd.DataFrame(rows, columns=[*fixed, *others, *MEASURED, *last])
    numbers = [*MEASURES[1:], *OUTPUT_ERRORS, *DIRECTION_COLUMNS, "largest_error"]
    return frame.astype(dict.fromkeys(INTEGERS, "Int64") | dict.fromkeys(numbers, float))


def _settings(trainings: Mapping[str, Record]) -> Iterator[Row]:
    """Yields the settings of a model: cells averaged over seeds, then over trainings."""
    model, exact = trainings[FIRST].model, {name: of.cells[0] for name, of in trainings.items()}
    cells = [
        (_row(record, cell) | {"model": model}, name, cell.unit_totals)
        for name, record in trainings.items()
        for cell in record.cells
    ]
    same = [{n: row[n] for n in row if n not in (*MEASURED, RANDOM_SEED)} for row, *_ in cells]
    settings = grouped(
        (json.dumps(key, sort_keys=True), (name, (row, totals)))
        for key, (row, name, totals) in zip(same, cells, strict=True)
    )
    for seeds in map(grouped, settings.values()):
        means = {name: _mean_of_seeds([row for row, _ in of]) for name, of in seeds.items()}
        losses = [
            (
                np.mean([totals for _, totals in of], axis=0) - exact[name].unit_totals,
                np.array(exact[name].unit_counts),
            )
            for name, of in seeds.items()
        ]
        yield (
            _mean_of_trainings(means, mean_loss(losses)) if len(means) > 1 else means.popitem()[1]
        )


def _mean_of_seeds(rows: Sequence[Row]) -> Row:
    """Averages the seeds, and adds the range of their values."""
    values = [row["value"] for row in rows]
    return _mean(rows) | {"seeds": len(rows), "seeds_low": min(values), "seeds_high": max(values)}


def _mean_of_trainings(means: Mapping[str, Row], added: Estimate) -> Row:
    """Averages trainings; the interval is for the mean loss added to exact attention's."""
    row = _mean([*means.values()])
    value, (mean, *ends) = row["value"], vars(added).values()
    low, high = (
        value * math.exp(end - mean)
        if row["metric"] == "perplexity"
        else value + 100 * (end - mean)
        for end in ends
    )
    paired = (row["difference"] + end - value for end in (low, high))
    return (
        row
        | dict.fromkeys(SINGLE)
        | dict(zip(("low", "high", *MEASURES[-2:]), (low, high, *paired), strict=True))
        | {TRAINING + name: of["value"] for name, of in means.items()}
    )


def _mean(rows: Sequence[Row]) -> Row:
    """Averages rows: arithmetically for an error, geometrically for a perplexity."""
    mean = geometric_mean if rows[0]["metric"] == "perplexity" else fmean
    of_loss = dict.fromkeys(("value", "low", "high", *SEED_COLUMNS[1:]), mean)
    averages = dict.fromkeys((*MEASURES[1:], *OUTPUT_ERRORS, *DIRECTION_COLUMNS), fmean) | of_loss
    columns: dict[str, list[Any]] = {
        name: [row.get(name) for row in rows] for name in (averages if len(rows) > 1 else ())
    }
    return rows[0] | {n: None if None in x else averages[n](x) for n, x in columns.items()}


def mean_over_trainings(means: Sequence[float], errors: Sequence[float], units: int) -> Estimate:
    """Averages the trainings' means. The 95% interval covers text and training.

    For one training it covers the text. `errors` are standard errors over the units of text: one
    for the mean over trainings on the same units, or one per training if that is not known. All
    intervals besides those of the claims come from here (docs/statistics.md).
    """
    error = math.sqrt(fmean(error**2 for error in errors))
    spread = Spread(stdev(means), len(means)) if len(means) > 1 else None
    mean, half = fmean(means), margin(error, units, spread, len(means))
    return Estimate(value=mean, low=mean - half, high=mean + half)


def mean_loss(trainings: Sequence[tuple[Array, Array]]) -> Estimate:
    """Averages losses per target, or changes, from each training's sums and counts by unit."""
    totals, counts = (np.sum(sums, axis=0) for sums in zip(*trainings, strict=True))
    mean, _, high = map(float, ratio_of_sums(totals, counts))
    return mean_over_trainings(
        [float(t.sum() / c.sum()) for t, c in trainings],
        [(high - mean) / quantile(len(counts))],
        len(counts),
    )


def averaged(
    frame: pd.DataFrame, same: Sequence[str], value: str, others: Sequence[str] = ()
) -> pd.DataFrame:
    """Averages the rows of several trainings that agree in the `same` columns into one row.

    Means of `value` and `others` are arithmetic. The new `low` and `high` of `value` follow from
    those of each training over the text. The columns `training` (its name) and `units` (its units)
    are dropped. Columns `training_<name>` hold the single values.
    """
    if frame["training"].nunique() > 1:
        frame = pd.DataFrame(
            _mean_row(group, value, others)
            for _, group in frame.groupby(list(same), sort=False, dropna=False)
        )
    return frame.drop(columns=["training", "units"])


def _mean_row(group: pd.DataFrame, value: str, others: Sequence[str]) -> dict[str, object]:
    numbers, units = group[[value, "low", "high", *others]].astype(float), int(group["units"].max())
    errors = (numbers["high"] - numbers["low"]) / 2 / quantile(units)
    mean = mean_over_trainings(numbers[value].tolist(), errors.tolist(), units)
    return (
        group.iloc[0].to_dict()
        | numbers.mean(skipna=False).to_dict()
        | {"low": mean.low, "high": mean.high}
        | dict(zip(TRAINING + group["training"], numbers[value], strict=True))
    )


def is_replicate(record: Record, first: Record) -> bool:
    """Returns whether a model is another training of a recipe: causal_elu_second of causal_elu."""
    recipe, first_recipe = (
        (model.task, model.kernel, model.length, model.trained_with) for model in (record, first)
    )
    return record.model.startswith(f"{first.model}_") and recipe == first_recipe


def filled(frame: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Lists those of the columns that hold a value in some row."""
    return [name for name in columns if name in frame and frame[name].notna().any()]


@dataclass(frozen=True)
class Measured:
    """Attention of one model, or of one kernel in a model, with its name and mark in figures.

    `control` is the attention of the same architecture with random weights.
    """

    label: str
    mark: Mark
    attention: Attention
    control: Attention | None = None
    training: str = FIRST

    @property
    def output_error(self) -> OutputError:
        return self.attention.output_error


def of_models(results: Results) -> list[Measured]:
    """Returns the attention of each model with its own kernel, causal models first.

    Trainings of a model have the same name and mark.
    """
    return [
        Measured(
            model_label(record), model_mark(record), again.attention[0], at_random(again), training
        )
        for record in results.causal_first
        for training, again in results.trainings_of(record).items()
        if again.attention
    ]


def of_kernels(record: Record) -> list[Measured]:
    """Returns the attention of one model with each kernel: its own, and others put in post hoc."""
    return [
        Measured(
            f"{KERNEL_LABELS.get(attention.kernel, attention.kernel)}, "
            f"{'post hoc' if attention.post_hoc else 'its own'}",
            kernel_mark(attention.kernel),
            attention,
            None if place else at_random(record),
        )
        for place, attention in enumerate(record.attention)
    ]


def at_random(record: Record) -> Attention | None:
    """Returns the attention of the record's control, with the kernel of its cells."""
    return next(iter(record.control.attention if record.control else ()), None)


def error_rows(output_error: OutputError, method: str, layer: int | None = None) -> list[Row]:
    """Computes a method's relative output error by size: sum of errors over sum of norms.

    `layer` None pools all layers, each measured on the same number of queries. The error is None
    if all outputs are 0.
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
            {
                "model": item.label,
                "training": item.training,
                "layer": cell.layer,
                "degree": cell.degree,
            }
            | {"own": cell.own, "series": "own kernel" if cell.own else f"degree {cell.degree}"}
            | {"share": 100 * cell.effective_keys / item.output_error.keys}
            | {"gap": max(cell.oblivious[SIZE], FLOOR) / max(cell.aware[SIZE], FLOOR)}
            | {"same": cell.same_first_key}
            for item in measured
            if item.attention.skewness_gap
            for cell in item.attention.skewness_gap.cells
            if SIZE in cell.oblivious
        ],
        columns=[*GAP_PLACE, "degree", "own", "series", "share", "gap", "same"],
    )
