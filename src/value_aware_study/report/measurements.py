"""What was measured in the layers: output error for every size, and skewness, for figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from value_aware_attention.measurement.record import (
    AWARE,
    OBLIVIOUS,
    Attention,
    KeysNeeded,
    MatchingKeys,
    OutputError,
    Record,
)
from value_aware_study.report.captions import plural
from value_aware_study.report.labels import KERNEL_LABELS, model_label
from value_aware_study.report.look import Mark
from value_aware_study.report.marks import kernel_mark, model_mark
from value_aware_study.report.results import Results

Rows = list[dict[str, Any]]

OPTIMAL = (OBLIVIOUS, AWARE)
SENTENCE_SIZES = (4, 8, 16)
NONE = "none"
"""In the place of a share of outputs that are all 0"""
FLOOR = 1e-6
"""Smaller relative errors, zero included, are drawn here: below it is mostly rounding."""


@dataclass(frozen=True)
class Measured:
    """One model, or one kernel in a model, under the name and the colour it has in figures."""

    label: str
    mark: Mark
    attention: Attention
    replicates: Sequence[Attention] = ()
    """Of further trainings of the model"""

    @property
    def output_error(self) -> OutputError:
        return self.attention.output_error


def of_models(results: Results) -> list[Measured]:
    """What was measured in each model with the kernel its cells have, causal models first."""
    ordered = sorted(results.records, key=lambda record: record.task != "causal")
    return [
        Measured(
            model_label(record), model_mark(record), attention, own(results.replicates_of(record))
        )
        for record in ordered
        for attention in own([record])
    ]


def own(records: Iterable[Record]) -> list[Attention]:
    """What was measured in each with the kernel its cells have."""
    return [attention for record in records for attention in record.attention[:1]]


def of_kernels(record: Record) -> list[Measured]:
    """What was measured in one model with each kernel: its own, and others post hoc."""
    return [
        Measured(
            f"{KERNEL_LABELS.get(one.kernel, one.kernel)}, "
            f"{'post hoc' if one.post_hoc else 'its own'}",
            kernel_mark(one.kernel),
            one,
        )
        for one in record.attention
    ]


def measured_on(measured: Iterable[Measured]) -> str:
    """On what: "causal, elu: 256 queries of 8 windows in each of 4 layers"."""
    groups: dict[str, list[str]] = {}
    for item in measured:
        errors = item.output_error
        units = plural(errors.units, errors.unit)
        queries = f"{errors.rows:,} queries of {units} in each of {errors.layers} layers"
        on = f"{queries}, {errors.keys:,} keys"
        of = f"{on}, heads of {errors.head_dim} dimensions, OVA's search: {errors.search}"
        groups.setdefault(of, []).append(item.label)
    return " ".join(f"{'; '.join(labels)}: {of}." for of, labels in groups.items())


def error_rows(output_error: OutputError, method: str, layer: int | None = None) -> Rows:
    """Relative output error of a method at each of its sizes r: sum of errors over sum of norms.

    Every layer was measured on as many queries, so sums and means of layers pool alike. `layer`
    None pools all of them. The error is None where every output is 0.
    """
    curve, norms = output_error.methods[method], output_error.squared_norm
    layers = range(len(norms)) if layer is None else [layer]
    norm = sum(norms[place] for place in layers)
    errors = zip(*(curve.layers[place] for place in layers), strict=True)
    return [
        {"r": r, "error": sum(at_size) / norm if norm else None}
        for r, at_size in zip(curve.sizes, errors, strict=True)
    ]


def sentence(output_error: OutputError) -> str:
    """ "4 value-aware keys match 69 (65 to 76) keys chosen by attention weight, 8 match ..."

    With the 95% intervals, and the median of single queries.
    """
    pooled = (match for match in output_error.matching_keys if match.layer is None)
    found = [match for match in pooled if match.r in SENTENCE_SIZES]
    if not found:
        return "how many keys match value-aware keys was not measured"
    first, *others = found
    known = f"{first.r} value-aware keys match {with_ends(first)} keys chosen by attention weight"
    parts = [known, *(f"{match.r} match {with_ends(match)}" for match in others)]
    medians = ", ".join(f"{match.median:,}" for match in found)
    return (
        f"{', '.join(parts)} of {output_error.keys:,} (errors pooled; matched query by query, "
        f"the median is {medians})"
    )


def with_ends(count: MatchingKeys | KeysNeeded) -> str:
    """ "69 (65 to 76)"; the count alone where its interval is not known; "none" without a count."""
    if count.keys is None:
        return NONE
    ends = "" if count.low is None else f" ({count.low:,} to {count.high:,})"
    return f"{count.keys:,}{ends}"
