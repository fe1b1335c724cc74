"""Measurements in the attention layers of a model, under its name and mark in figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd

from value_aware_attention.measurement.record import (
    AWARE,
    OBLIVIOUS,
    Attention,
    GapCell,
    OutputError,
    Record,
)
from value_aware_study.report.captions import plural
from value_aware_study.report.look import Mark, kernel_mark, method_marks, model_mark
from value_aware_study.report.results import Results
from value_aware_study.report.words import (
    KERNEL_LABELS,
    method_label,
    missing,
    model_label,
)

Rows = list[dict[str, Any]]

OPTIMAL = (OBLIVIOUS, AWARE)
ORACLES = {AWARE: "chosen for the output (OVA)", OBLIVIOUS: "chosen by weight (OVO)"}
"""Full names of the two oracles, for figures about them alone."""
ORACLE_MARKS = {
    ORACLES[AWARE]: Mark.of("blue", "square"),
    ORACLES[OBLIVIOUS]: Mark.of("vermillion", "circle"),
}
FLOOR = 1e-6
"""Relative errors below it, zero included, are mostly rounding, and are drawn at it."""
SIZE = "4"
"""Keys kept by both oracles whose errors the skewness gap compares, as records name it."""
OWN = "own kernel"


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
    ordered = sorted(results.records, key=lambda record: record.task != "causal")
    return [
        Measured(
            model_label(record),
            model_mark(record),
            attention,
            own(results.replicates_of(record)),
            at_random(record),
        )
        for record in ordered
        for attention in own([record])
    ]


def at_random(record: Record) -> Attention | None:
    """Returns the attention of the record's control, with the kernel of its cells."""
    return next(iter(own([record.control] if record.control else [])), None)


def own(records: Iterable[Record]) -> list[Attention]:
    """Returns the attention of each record with the kernel that its cells have."""
    return [attention for record in records for attention in record.attention[:1]]


def of_kernels(record: Record) -> list[Measured]:
    """Returns the attention of one model with each kernel: its own, and others put in post hoc."""
    return [
        Measured(
            f"{KERNEL_LABELS.get(one.kernel, one.kernel)}, "
            f"{'post hoc' if one.post_hoc else 'its own'}",
            kernel_mark(one.kernel),
            one,
            control=None if place else at_random(record),
        )
        for place, one in enumerate(record.attention)
    ]


def measured_on(measured: Iterable[Measured]) -> str:
    """Describes the queries: "causal, elu: 256 queries of 8 windows in each of 4 layers"."""
    groups: dict[str, list[str]] = {}
    for item in measured:
        errors = item.output_error
        units = plural(errors.units, errors.unit)
        queries = f"{errors.rows:,} queries of {units} in each of {errors.layers} layers"
        on = f"{queries}, {errors.keys:,} keys"
        of = f"{on}, heads of {errors.head_dim} dimensions, OVA's search: {errors.search}"
        groups.setdefault(of, []).append(item.label)
    return " ".join(f"{'; '.join(labels)}: {of}." for of, labels in groups.items())


def full_name(method: str) -> str:
    """Returns the full name of an oracle, or the label of another method."""
    return ORACLES.get(method, method_label(method))


def oracle_marks(drawn: pd.DataFrame) -> dict[str, Mark]:
    """Returns the marks of curves, the oracles first, under their full names."""
    others = {name: mark for name, mark in method_marks(drawn).items() if name not in ORACLE_MARKS}
    return ORACLE_MARKS | others


def error_rows(output_error: OutputError, method: str, layer: int | None = None) -> Rows:
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


def _cells(measured: Iterable[Measured]) -> list[tuple[Measured, GapCell]]:
    return [
        (item, cell)
        for item in measured
        if (gap := item.attention.skewness_gap)
        for cell in gap.cells
    ]


def gap_rows(measured: Iterable[Measured]) -> pd.DataFrame:
    """Tabulates effective keys (% of all keys) and OVO over OVA error by layer and kernel."""
    rows = [
        {"model": item.label, "layer": cell.layer, "degree": cell.degree, "own": cell.own}
        | {"series": OWN if cell.own else f"degree {cell.degree}"}
        | {"share": 100 * cell.effective_keys / item.output_error.keys}
        | {"gap": max(cell.oblivious[SIZE], FLOOR) / max(cell.aware[SIZE], FLOOR)}
        | {"same": cell.same_first_key}
        for item, cell in _cells(measured)
        if SIZE in cell.oblivious
    ]
    columns = ["model", "layer", "degree", "own", "series", "share", "gap", "same"]
    return pd.DataFrame(rows, columns=columns)


def _correlation(frame: pd.DataFrame) -> str:
    """Writes Spearman's rank correlation of the two axes, from at least three points."""
    found = frame["share"].rank().corr(frame["gap"].rank())
    return "not computed" if len(frame) < 3 or missing(found) else f"{found:+.2f}".replace("-", "−")


def _uniform_shares(measured: Iterable[Measured]) -> str:
    """Says which value the value-aware key has where all weights are equal (degree 0)."""
    cells = [cell for _, cell in _cells(measured)]
    to_mean = [cell.closest_to_mean_key for cell in cells if cell.closest_to_mean_key is not None]
    norms = [cell.smallest_norm_key for cell in cells if cell.smallest_norm_key is not None]
    if not to_mean or not norms:
        return ""
    nearest, smallest = fmean(to_mean), fmean(norms)
    return (
        f" At degree 0 the value-aware key is the value closest to the mean of the values for "
        f"{100 * nearest:.0f}% of the queries, and the shortest value, as for orthogonal values, "
        f"for {100 * smallest:.0f}%."
    )


def gap_findings(measured: Sequence[Measured]) -> str:
    """Describes the skewness gap by its points: rank correlations, and equal first keys."""
    frame = gap_rows(measured)
    if frame.empty:
        return ""
    post_hoc = frame[~frame["own"].astype(bool)]
    gaps = post_hoc.pivot_table(index=["model", "layer"], columns="degree", values="gap")
    first, last = gaps.columns.min(), gaps.columns.max()
    wider = int((gaps[first] > gaps[last]).sum())
    same = post_hoc.groupby("degree")["same"].mean()
    shares = ", ".join(f"{100 * share:.0f}% at {int(degree)}" for degree, share in same.items())
    return (
        f"Rank correlation of the two axes: {_correlation(frame[frame['own']])} over the own "
        f"kernels, {_correlation(post_hoc)} over the polynomials. The gap is wider at degree "
        f"{first:.0f} than at degree {last:.0f} in {wider} of {len(gaps)} layers. OVA-1 and OVO-1 "
        f"keep the same key for a mean share of queries, by degree: {shares}."
        + _uniform_shares(measured)
    )
