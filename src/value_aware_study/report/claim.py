"""A published claim, the findings that answer it, and the verdict that they allow.

A finding's interval covers the text and the training. Each training of a recipe has an effect of
its own, measured on one text. The interval is the 95% interval of the mean effect that trainings of
the recipe have on all such text (docs/reproduce.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev

from scipy.special import stdtrit

from value_aware_attention.measurement.estimate import CONFIDENCE, number, signed
from value_aware_study.report.words import grouped, missing

MARKS = {True: "✓", False: "✗", None: "?"}
VERDICTS = (
    "Holds: every comparison agrees with the claim (✓). In part: some do. Contradicted here: none "
    "does and one at least says the opposite (✗). Undecided: the intervals leave it open (?). A "
    "verdict says in brackets how many of its comparisons were made if some are missing."
)
LIMITS = {"ratio": (-math.inf, 700.0), "points": (-100.0, 100.0), "correlation": (-1.0, 1.0)}
"""Least and largest effect by unit; a ratio's is a logarithm"""

Key = tuple[str, str]
"""A comparison and a model; brackets in the comparison's name hold numbers, and are left out"""


@dataclass(frozen=True)
class Spread:
    """The standard deviation of an effect over trainings, and their number."""

    deviation: float
    seeds: int
    of: str = ""
    """The published run in which it was measured; "" for the trainings of this run."""


@dataclass(frozen=True)
class Finding:
    """Holds a measured sentence, and whether it agrees with the claim; None where that is open."""

    sentence: str
    holds: bool | None
    what: str = ""
    """The comparison; findings in a row with the same one, of different models, share a line."""
    label: str = ""
    """The model."""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the 95% interval."""
    unit: str = ""
    """Unit of these numbers: "ratio" of perplexities, "points" of error, or "correlation"."""
    spread: Spread | None = None
    """None where the interval is over text alone."""
    trainings: int = 1

    @property
    def mark(self) -> str:
        return MARKS[self.holds]

    @property
    def firmness(self) -> float:
        """Measures how far the interval is from no difference, in parts of its width.

        0 for a finding without an interval.
        """
        if self.estimate is None or self.low is None or self.high is None:
            return 0.0
        estimate, low, high = (
            math.log(max(end, math.ulp(0.0))) if self.unit == "ratio" else end
            for end in (self.estimate, self.low, self.high)
        )
        return abs(estimate) / (high - low) if high > low else 0.0

    @property
    def over(self) -> str:
        """Names the sources of variance that the interval covers."""
        if missing(self.low):
            return ""
        if self.spread is None:
            return "text alone"
        if self.spread.of:
            return f"text, and training spread of {self.spread.of}"
        return f"text and {self.trainings} trainings"


@dataclass(frozen=True)
class Effect:
    """The difference of two settings in one training of a model, on a scale on which errors add.

    `mean` is in nats a target ("ratio"), in percent of the targets ("points") or a correlation,
    and `error` its standard error over `units` of text. `above`: the claim has it above zero.
    """

    what: str
    label: str
    unit: str
    mean: float
    error: float
    units: int
    above: bool


def key_of(what: str, label: str) -> Key:
    return what.partition(" (")[0], label


def margin(error: float, units: int, spread: Spread | None, trainings: int) -> float:
    """Computes half the width of the 95% interval of the mean effect of all trainings on all text.

    Two margins add in squares: Student's t times the standard error over text, and times that over
    k trainings, s / sqrt(k). Degrees of freedom after Satterthwaite would hold too few effects.
    NaN for a single unit of text.
    """
    text = quantile(units) * error if units > 1 else math.nan
    if spread is None:
        return text
    return math.hypot(text, quantile(spread.seeds) * spread.deviation / math.sqrt(trainings))


def quantile(count: int) -> float:
    """Returns the 97.5% quantile of Student's t for the mean of `count` numbers."""
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))


def over_trainings(
    trainings: Sequence[Sequence[Effect | Finding]], spreads: Mapping[Key, Spread]
) -> list[Finding]:
    """Makes one finding of each comparison in the first training, by its effects in all.

    An effect of one training has the spread of a published run, where `spreads` has it.
    """
    same = grouped(
        (key_of(made.what, made.label), made) for training in trainings for made in training
    )
    first = dict.fromkeys(key_of(made.what, made.label) for made in trainings[0])
    return [_joint(same[key], spreads.get(key)) for key in first]


def _joint(made: Sequence[Effect | Finding], published: Spread | None) -> Finding:
    """Returns the joint finding of all trainings; of those without effects the least favourable.

    It is open where the claim has the effect above zero in one training and below in another.
    """
    effects = [effect for effect in made if isinstance(effect, Effect)]
    plain = [finding for finding in made if isinstance(finding, Finding)]
    if plain:
        return next((finding for finding in plain if not finding.holds), plain[0])
    means, first = [effect.mean for effect in effects], effects[0]
    spread = Spread(stdev(means), len(means)) if len(means) > 1 else published
    error = math.sqrt(fmean(effect.error**2 for effect in effects))  # trainings share the text
    mean, half = fmean(means), margin(error, first.units, spread, len(means))
    estimate, low, high = (_scaled(end, first.unit) for end in (mean, mean - half, mean + half))
    value, *ends, least, most = (
        _text(end, first.unit)
        for end in (
            estimate,
            low,
            high,
            *(_scaled(m, first.unit) for m in (min(means), max(means))),
        )
    )
    value = {"ratio": f"× {value}", "points": f"{value} points"}.get(first.unit, value)
    beside = f"; seeds {least} to {most}" if len(means) > 1 else ""
    differ = any(effect.above != first.above for effect in effects)
    beside += "; trainings differ in which should be larger" if differ else ""
    holds = first.above if mean - half > 0 else not first.above if mean + half < 0 else None
    return Finding(
        f"{first.label} {value} ({' to '.join(ends)}{beside})",
        None if differ else holds,
        *(first.what, first.label, estimate, low, high, first.unit, spread, len(means)),
    )


def _scaled(effect: float, unit: str) -> float:
    """Returns an effect as it is reported, within the limits of its unit."""
    least, most = LIMITS[unit]
    within = min(max(effect, least), most)
    return math.exp(within) if unit == "ratio" else within


def _text(value: float, unit: str) -> str:
    return number(value, 3 if value < 10 else 1) if unit == "ratio" else signed(value, 2)


@dataclass(frozen=True)
class Answer:
    """Pairs a claim and its published numbers with our findings."""

    claim: str
    findings: Sequence[Finding]
    published: str = ""
    expected: int = 0
    """Comparisons that it takes to say that the claim holds."""

    @property
    def verdict(self) -> str:
        """Returns the verdict; findings that are open do not count as agreement.

        Says how many comparisons were made, where there are fewer than expected.
        """
        held = [finding.holds for finding in self.findings]
        if not held:
            return "not measured"
        verdict = "holds" if all(held) else "in part"
        if not any(held):
            verdict = "contradicted here" if False in held else "undecided"
        few = f" ({len(held)} of {self.expected} compared)" if len(held) < self.expected else ""
        return verdict + few

    @property
    def agreement(self) -> str:
        """Counts the comparisons that agree with the claim: "4 of 5 agree, 1 open"."""
        held = [finding.holds for finding in self.findings]
        if not held:
            return "none made"
        counts = {"against": held.count(False), "open": held.count(None)}
        others = [f"{count} {word}" for word, count in counts.items() if count]
        return ", ".join([f"{held.count(True)} of {len(held)} agree", *others])

    @property
    def firmest(self) -> Finding | None:
        """Returns the finding with the firmest interval, of those that agree if there are any."""
        agreeing = [finding for finding in self.findings if finding.holds]
        return max(agreeing or self.findings, key=lambda finding: finding.firmness, default=None)

    def lines(self) -> list[str]:
        """Writes the findings as lines of text, one for each comparison."""
        lines = []
        for what, group in groupby(self.findings, key=lambda finding: finding.what):
            marked = [f"{finding.sentence} {finding.mark}" for finding in group]
            lines += [f"{what}: {', '.join(marked)}"] if what else marked
        return lines
