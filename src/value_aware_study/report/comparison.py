"""Two settings of a model compared on the same targets, as a finding no firmer than its interval.

The paired 95% interval of their difference in mean loss over units of text becomes a ratio of
perplexities, or a difference in points of error.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from value_aware_attention.measurement.intervals import ratio_of_sums
from value_aware_attention.measurement.record import EndMetric, Record
from value_aware_study.report.claim import Finding
from value_aware_study.report.formatting import number, signed
from value_aware_study.report.labels import setting_label


@dataclass(frozen=True)
class Setting:
    """An approximation and its parameters; of a random one all seeds."""

    approximation: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return setting_label({"approximation": self.approximation, **self.parameters})


EXACT = Setting("exact")


def oblivious(r: int) -> Setting:
    return Setting("optimal_v_oblivious", {"r": r})


def aware(r: int) -> Setting:
    return Setting("optimal_v_aware", {"r": r})


@dataclass(frozen=True)
class Sums:
    """Summed loss (nats, or wrong predictions) and targets of each unit of text."""

    totals: NDArray[np.float64]
    counts: NDArray[np.float64]

    @classmethod
    def of(cls, measured: Sequence[EndMetric]) -> "Sums":
        """The mean of what was measured on the same targets."""
        totals = np.mean([one.unit_totals for one in measured], axis=0)
        return cls(totals, np.array(measured[0].unit_counts))


@dataclass(frozen=True)
class Model:
    """One evaluated model under the name that findings have for it."""

    label: str
    record: Record

    def sums(self, setting: Setting) -> Sums | None:
        """Of one setting, the mean over the seeds of a random method; None where not measured."""
        cells = [
            cell
            for cell in self.record.cells
            if cell.approximation == setting.approximation
            and setting.parameters.items() <= cell.parameters.items()
        ]
        return Sums.of(cells) if cells else None

    def added(self, setting: Setting) -> Sums | None:
        """The loss above exact attention's."""
        sums, exact = self.sums(setting), self.sums(EXACT)
        return Sums(sums.totals - exact.totals, sums.counts) if sums and exact else None

    @property
    def effective_keys(self) -> float:
        return fmean(layer.effective_keys for layer in self.record.attention[0].skewness)


def compared(
    models: Iterable[Model], first: Setting, second: Setting, *, above: bool
) -> list[Finding]:
    """In each model, whether the first setting's loss is above (or below) the second's."""
    what = f"{first.label} against {second.label}"
    return [
        finding
        for model in models
        for finding in difference(
            what,
            model.label,
            model.record.metric,
            model.sums(first),
            model.sums(second),
            above=above,
        )
    ]


def difference(
    what: str, label: str, metric: str, first: Sums | None, second: Sums | None, *, above: bool
) -> list[Finding]:
    """The finding of one comparison; an open one of other targets, none where a side is missing."""
    if first is None or second is None:
        return []
    if not np.array_equal(first.counts, second.counts):
        return [Finding(f"{label} not compared: other targets", None, what, label=label)]
    ends = [float(end) for end in ratio_of_sums(first.totals - second.totals, first.counts)]
    higher = is_above(ends)
    if metric == "perplexity":
        ends = [math.exp(min(end, 700.0)) for end in ends]
        value, low, high = (number(end, 3 if end < 10 else 1) for end in ends)
        shown = f"× {value}"
    else:
        ends = [100 * end for end in ends]
        value, low, high = (signed(end, 2) for end in ends)
        shown = f"{value} points"
    sentence = f"{label} {shown} ({low} to {high})"
    holds = None if higher is None else higher == above
    return [Finding(sentence, holds, what, ends[0], ends[1], ends[2], label, value)]


def is_above(ends: Sequence[float]) -> bool | None:
    """Whether an estimate is above zero, by the ends of its interval; None where it may be both."""
    _, low, high = ends
    return True if low > 0 else False if high < 0 else None
