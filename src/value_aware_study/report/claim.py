"""A published claim, the findings that answer it, and the verdict that follows from them.

A finding's interval covers the text and the training. Each training of a recipe has its own effect,
measured on one text. The 95% interval is for the recipe's mean effect over trainings, on all such
text (docs/statistics.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import stdev

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import stdtrit

from value_aware_attention.records.estimate import CONFIDENCE, number, ratio_of_sums, signed
from value_aware_study.report.words import grouped, missing

MARKS = {True: "✓", False: "✗", None: "?"}
VERDICTS = (
    "A claim says that all of its comparisons come out one way. Holds: all of them are decided for "
    "it, each by its own interval. Opposed: one at least is decided against it. Open: neither. Not "
    "testable here: what the claim presupposes is not found in these models. A verdict says in "
    "brackets how many of its comparisons were made if some are missing."
)
CORRECTED = (
    "✓ and ✗ are decided after Holm's correction for all comparisons of the page, (✓) and (✗) by "
    "the comparison's own interval alone, ? is open."
)
LIMITS = {"ratio": (-math.inf, 700.0), "points": (-100.0, 100.0), "correlation": (-1.0, 1.0)}
"""Least and largest effect by unit; for a ratio, of its logarithm"""
LEVEL = 1 - CONFIDENCE
LEAST_SPREAD = 1e-12  # smallest p-value computed

FloatArray = NDArray[np.float64]
Key = tuple[str, str]
"""A comparison without the numbers in brackets after its name, and a model"""


@dataclass(frozen=True)
class Spread:
    """The standard deviation of an effect over trainings, and their number.

    `of` is the published run that measured it; "" for the trainings of this run.
    """

    deviation: float
    seeds: int
    of: str = ""


@dataclass(frozen=True)
class Finding:
    """A measured sentence, and whether it agrees with the claim; None if that is open.

    Attributes:
        what: The comparison. Successive findings of one comparison, for different models, share a
            line.
        label: The model.
        low, high: Ends of the 95% interval.
        unit: Unit of these numbers: "ratio" of perplexities, "points" of error, or "correlation".
        spread: None if the interval covers the text alone.
        agree: Number of trainings whose effect has the claim's sign.
        p: The level of the interval that ends at no difference.
        p_holm: `p` after Holm's correction for all comparisons of the page.
    """

    sentence: str
    holds: bool | None
    what: str = ""
    label: str = ""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    spread: Spread | None = None
    trainings: int = 1
    agree: int = 0
    p: float | None = None
    p_holm: float | None = None

    @property
    def corrected(self) -> bool | None:
        """Whether it agrees after the correction; None if the correction leaves that open."""
        return None if self.p_holm is not None and self.p_holm > LEVEL else self.holds

    @property
    def mark(self) -> str:
        mark = MARKS[self.holds]
        return mark if self.corrected is self.holds else f"({mark})"

    @property
    def over(self) -> str:
        """Names the sources of variance that the interval covers."""
        if missing(self.low):
            return ""
        units = "layers" if self.unit == "correlation" else "text"
        if self.spread is None:
            return f"{units} alone"
        if self.spread.of:
            return f"{units}, and training spread of {self.spread.of}"
        return f"{units} and {self.trainings} trainings"


@dataclass(frozen=True)
class Effect:
    """The difference of two settings in one training of a model, on a scale where errors add.

    `totals` over `counts`, by unit of text: nats per target ("ratio"), percent of the targets
    ("points") or a correlation. `above`: the claim expects it above zero.
    """

    what: str
    label: str
    unit: str
    totals: FloatArray
    counts: FloatArray
    above: bool = True

    @property
    def mean(self) -> float:
        return float(self.totals.sum() / self.counts.sum())


def key_of(what: str, label: str) -> Key:
    return what.partition(" (")[0], label


def margin(
    error: float, units: int, spread: Spread | None, trainings: int, level: float = LEVEL
) -> float:
    """Computes half the width of the interval of the mean effect over all trainings and all text.

    Two margins add in squares. One is Student's t times the standard error over units of text of
    the mean over trainings. The other is t times that over k trainings, s / sqrt(k). It is the
    narrowest rule with enough coverage in every simulation (tests/report/test_interval.py). NaN for
    a single unit.
    """
    text = quantile(units, level) * error if units > 1 else math.nan
    if spread is None:
        return text
    return math.hypot(text, quantile(spread.seeds, level) * spread.deviation / math.sqrt(trainings))


def quantile(count: int, level: float = LEVEL) -> float:
    """Returns the two-sided quantile of Student's t for the mean of `count` numbers."""
    return -float(stdtrit(count - 1, level / 2))


def p_value(
    mean: float, error: float, units: int, spread: Spread | None, trainings: int
) -> float | None:
    """Inverts `margin`: the level at which an end of the interval is 0; None for one unit."""
    if units < 2 or not mean:
        return None if units < 2 else 1.0

    def excess(logarithm: float) -> float:
        return margin(error, units, spread, trainings, math.exp(logarithm)) - abs(mean)

    least = math.log(LEAST_SPREAD)
    return math.exp(brentq(excess, least, 0.0)) if excess(least) > 0 else LEAST_SPREAD


def holm(findings: Sequence[Finding]) -> list[Finding]:
    """Corrects p-values for the number of findings, as Holm (1979); findings without p stay."""
    order = sorted((f.p, place) for place, f in enumerate(findings) if f.p is not None)
    corrected, least = list(findings), 0.0
    for above, (p, place) in enumerate(order):
        least = min(max(least, p * (len(order) - above)), 1.0)
        corrected[place] = replace(findings[place], p_holm=least)
    return corrected


def over_trainings(
    trainings: Sequence[Sequence[Effect | Finding]], spreads: Mapping[Key, Spread]
) -> list[Finding]:
    """Makes one finding of each comparison in the first training, from its effects in all.

    The effect of a single training takes the spread of a published run if `spreads` has one.
    """
    same = grouped(
        (key_of(made.what, made.label), made) for training in trainings for made in training
    )
    return [
        _joint(same[key], spreads.get(key))
        for key in dict.fromkeys(key_of(made.what, made.label) for made in trainings[0])
    ]


def _joint(made: Sequence[Effect | Finding], published: Spread | None) -> Finding:
    """Returns the joint finding of all trainings, or the least favourable one without an effect.

    It is open if the claim expects the effect above zero in one training and below in another.
    """
    effects = [effect for effect in made if isinstance(effect, Effect)]
    if plain := [finding for finding in made if isinstance(finding, Finding)]:
        return replace(
            min(plain, key=lambda finding: (finding.holds or False, -(finding.estimate or 0))),
            trainings=len(made),
            agree=sum(bool(f.holds) for f in plain),
        )
    first, means = effects[0], [effect.mean for effect in effects]
    if len({len(effect.counts) for effect in effects}) > 1:
        return Finding(
            f"{first.label} not compared: other "
            f"{'layers' if first.unit == 'correlation' else 'text'}",
            None,
            first.what,
            first.label,
        )
    spread = Spread(stdev(means), len(means)) if len(means) > 1 else published
    totals, counts = (
        np.sum([getattr(effect, name) for effect in effects], axis=0)  # trainings share the text
        for name in ("totals", "counts")
    )
    mean, _, high = map(float, ratio_of_sums(totals, counts))
    units = len(counts)
    error = (high - mean) / quantile(units)
    half = margin(error, units, spread, len(means))
    holds = first.above if mean - half > 0 else not first.above if mean + half < 0 else None
    differ = any(effect.above != first.above for effect in effects)
    seeds = (min(means), max(means)) if len(means) > 1 else ()
    numbers = [_scaled(end, first.unit) for end in (mean, mean - half, mean + half, *seeds)]
    return Finding(
        _sentence(first, numbers, differ=differ),
        None if differ else holds,
        first.what,
        first.label,
        estimate=numbers[0],
        low=numbers[1],
        high=numbers[2],
        unit=first.unit,
        spread=spread,
        trainings=len(means),
        agree=sum(m > 0 if e.above else m < 0 for m, e in zip(means, effects, strict=True)),
        p=p_value(mean, error, units, spread, len(means)),
    )


def _sentence(effect: Effect, numbers: Sequence[float], *, differ: bool) -> str:
    """Writes "elu × 0.361 (0.190 to 0.688; seeds 0.272 to 0.446)"."""
    value, low, high, *seeds = (_text(end, effect.unit) for end in numbers)
    form = {"ratio": "× {}", "points": "{} points"}.get(effect.unit, "{}")
    return (
        f"{effect.label} {form.format(value)} ({low} to {high}"
        f"{'; seeds ' if seeds else ''}{' to '.join(seeds)}"
        f"{'; trainings differ in which should be larger' if differ else ''})"
    )


def _scaled(effect: float, unit: str) -> float:
    """Returns an effect as reported, within the limits of its unit."""
    least, most = LIMITS[unit]
    within = min(max(effect, least), most)
    return math.exp(within) if unit == "ratio" else within


def _text(value: float, unit: str) -> str:
    return number(value, 3 if value < 10 else 1) if unit == "ratio" else signed(value, 2)


@dataclass(frozen=True)
class Answer:
    """Pairs a claim and its published numbers with our findings.

    Attributes:
        expected: Comparisons needed to say that the claim holds.
        remark: What the verdict leaves out.
        testable: False if a premise of the claim was not found.
    """

    claim: str
    findings: Sequence[Finding]
    published: str = ""
    expected: int = 0
    remark: str = ""
    testable: bool = True

    @property
    def verdict(self) -> str:
        """The verdict (`VERDICTS`) by each comparison's own interval.

        "Holds" needs all comparisons, so more of them do not make it likelier by chance (an
        intersection-union test: Berger, 1982). "Opposed" needs only one, so chance can cause it;
        `after_holm` stands next to it. If some are missing, the verdict counts those made.
        """
        return self._outcome([finding.holds for finding in self.findings])

    @property
    def after_holm(self) -> str:
        """The verdict by the comparisons that stay decided after Holm's correction."""
        return self._outcome([finding.corrected for finding in self.findings])

    def _outcome(self, held: Sequence[bool | None]) -> str:
        if not held:
            return "not measured"
        verdict = "holds" if all(held) else "opposed" if False in held else "open"
        few = f" ({len(held)} of {self.expected} compared)" if len(held) < self.expected else ""
        return verdict + few if self.testable else "not testable here"

    def lines(self) -> list[str]:
        """Writes the findings as lines of text, one for each comparison."""
        lines = []
        for what, group in groupby(self.findings, key=lambda finding: finding.what):
            marked = [f"{finding.sentence} {finding.mark}" for finding in group]
            lines += [f"{what}: {', '.join(marked)}"] if what else marked
        return lines


def decided(findings: Sequence[Finding]) -> str:
    """Counts decided comparisons: "4 of 5, 1 against"; "none made" without findings."""
    held = [finding.holds for finding in findings]
    against = f", {held.count(False)} against" if False in held else ""
    return f"{held.count(True)} of {len(held)}{against}" if held else "none made"


def agreeing(findings: Sequence[Finding]) -> str:
    """Counts the trainings whose own effect has the claim's sign: "14 of 15"."""
    agree, trainings = (sum(getattr(f, name) for f in findings) for name in ("agree", "trainings"))
    return f"{agree} of {trainings}"
