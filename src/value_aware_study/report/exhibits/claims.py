"""The paper's claims, each answered from our records alone, with the comparisons behind it.

A comparison of two settings of a model on the same targets is a finding no firmer than its
interval: their difference in mean loss, paired over units of text, becomes a ratio of
perplexities, or a difference in points of error, with the 95% interval over text and trainings.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from value_aware_attention.measurement.estimate import DASH, number, ratio_of_sums
from value_aware_attention.measurement.record import EndMetric, Record
from value_aware_study.report import words
from value_aware_study.report.claim import (
    VERDICTS,
    Answer,
    Effect,
    Finding,
    over_trainings,
    quantile,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import KERNELS, Results, Row, gap_rows, of_models
from value_aware_study.report.published import SHORT_EXACT, TABLE_1, TABLE_2, TABLE_2_COLUMNS

SIZES = (1, 65)
"""Keys kept in the paper's tables."""
ALL = ("causal", "long", "short")
"""All models, as `models` names them."""
NUMBERS = ("what", "estimate", "low", "high", "unit", "trainings")
"""Columns of a finding's numbers"""
Find = Callable[[Results], Iterable[Effect | Finding]]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """An approximation and its parameters; a random one stands for all of its seeds."""

    approximation: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return words.setting_label({"approximation": self.approximation, **self.parameters})


EXACT = Setting("exact")


def oblivious(r: int) -> Setting:
    return Setting("optimal_v_oblivious", {"r": r})


def aware(r: int) -> Setting:
    return Setting("optimal_v_aware", {"r": r})


@dataclass(frozen=True)
class Sums:
    """Summed loss (nats, or wrong predictions) and number of targets of each unit of text."""

    totals: FloatArray
    counts: FloatArray

    @classmethod
    def of(cls, measured: Sequence[EndMetric]) -> "Sums":
        """Averages several measurements on the same targets."""
        totals = np.mean([metric.unit_totals for metric in measured], axis=0)
        return cls(totals, np.array(measured[0].unit_counts))


@dataclass(frozen=True)
class Model:
    """One evaluated model under the name that findings have for it."""

    label: str
    record: Record

    def sums(self, setting: Setting) -> Sums | None:
        """Returns the sums of one setting, averaged over seeds; None where it was not measured."""
        cells = [
            cell
            for cell in self.record.cells
            if cell.approximation == setting.approximation
            and setting.parameters.items() <= cell.parameters.items()
        ]
        return Sums.of(cells) if cells else None

    def added(self, setting: Setting) -> Sums | None:
        """Subtracts exact attention's loss from that of a setting."""
        sums, exact = self.sums(setting), self.sums(EXACT)
        return Sums(sums.totals - exact.totals, sums.counts) if sums and exact else None

    @property
    def flatness(self) -> float | None:
        """Averages the effective keys over layers; None where they were not measured."""
        layers = self.record.attention[0].skewness if self.record.attention else ()
        return fmean(layer.effective_keys for layer in layers) if layers else None


def compared(
    models: Iterable[Model], first: Setting, second: Setting, *, above: bool
) -> Iterator[Effect | Finding]:
    """Tells whether the first setting's loss is above (or below) the second's, in each model."""
    what = f"{first.label} against {second.label}"
    for model in models:
        yield from difference(
            what,
            model.label,
            model.record.metric,
            *(model.sums(first), model.sums(second)),
            above=above,
        )


def difference(
    what: str, label: str, metric: str, first: Sums | None, second: Sums | None, *, above: bool
) -> list[Effect | Finding]:
    """Compares two settings: open for different targets, no finding if a side is missing."""
    if first is None or second is None:
        return []
    if not np.array_equal(first.counts, second.counts):
        return [Finding(f"{label} not compared: other targets", None, what, label)]
    unit, size = ("ratio", 1.0) if metric == "perplexity" else ("points", 100.0)
    totals = size * (first.totals - second.totals)
    return [effect(what, label, unit, totals, first.counts, above=above)]


def effect(
    what: str, label: str, unit: str, totals: FloatArray, counts: FloatArray, *, above: bool = True
) -> Effect:
    """Computes the ratio of sums over units as an effect, with its standard error."""
    mean, _, high = map(float, ratio_of_sums(totals, counts))
    error = (high - mean) / quantile(len(counts))
    return Effect(what, label, unit, mean, error, len(counts), above)


ORF = Setting("orf", {"features": 256, "scaling": "paper"})
FEW_LSH, MANY_LSH = (
    Setting("lsh", {"r": r, "rounds": rounds}) for r, rounds in ((64, 4), (512, 16))
)


def models(results: Results, *names: str) -> list[Model]:
    """Selects models: "causal" (one a kernel), "long" and "short" (the masked ones)."""
    models = {
        "causal": [Model(k, record) for k in KERNELS if (record := results.of_kernel(k))],
        "long": [Model("masked long", record) for record in results.models("masked_long")],
        "short": [Model("masked short", record) for record in results.models("masked_short")],
    }
    return [model for name in names for model in models[name]]


def compares(names: Sequence[str], first: Setting, second: Setting, *, above: bool) -> Find:
    """Finds in each model whether one setting's loss is above (or below) the other's."""
    return lambda results: compared(models(results, *names), first, second, above=above)


def one_more_than_head_size(results: Results) -> Iterator[Finding]:
    """Finds the largest output error of head size + 1 value-aware keys over all queries."""
    what = "largest |o − õ| of head size + 1 value-aware keys, over the longest value"
    for model in models(results, *ALL):
        r = model.record.head_dim + 1
        for cell in model.record.cells:
            error = cell.error.largest_error if cell.error else None
            if error is not None and Setting(cell.approximation, cell.parameters) == aware(r):
                exact = error <= 1e-5  # in single precision
                yield Finding(f"{model.label} {error:.0e}", exact, what, model.label)


def order_of_kernels(results: Results) -> Iterator[Effect | Finding]:
    """Compares the loss that OVO adds: polynomial above elu above exponential."""
    for setting in map(oblivious, SIZES):
        for first, second in pairwise(_by_kernel(results)):
            yield from _in_order(first, second, setting, "", above=True)


def flatter_kernels_lose_more(results: Results) -> Iterator[Effect | Finding]:
    """Compares the loss that OVO adds, for each two kernels: more where attention is flatter.

    Pairs are named alike in every training, whichever of the two is flatter there.
    """
    measured = [model for model in _by_kernel(results) if model.flatness]
    keys = ", ".join(f"{model.label} {model.flatness:.0f}" for model in measured)
    how = f", more where attention is flatter (effective keys of the first training: {keys})"
    for setting in map(oblivious, SIZES):
        for first, second in combinations(measured, 2):
            if more := (first.flatness or 0) - (second.flatness or 0):
                yield from _in_order(first, second, setting, how, above=more > 0)


def flatter_is_wider(results: Results) -> Iterator[Effect | Finding]:
    """Correlates effective keys with OVO / OVA error over the kernels of each layer, by rank."""
    layers = gap_rows(of_models(results)).groupby(["model", "layer"])
    ranks = [rows["share"].rank().corr(rows["gap"].rank()) for _, rows in layers]
    finite = np.array([rank for rank in ranks if math.isfinite(rank)])
    if len(finite):
        what = (
            "rank correlation of effective keys and OVO / OVA error at r = 4, over the kernels put "
            f"on a layer's queries and keys (mean of {len(finite)} layers)"
        )
        yield effect(what, "all models", "correlation", finite, np.ones(len(finite)))


def longer_is_better(results: Results) -> Iterator[Effect | Finding]:
    """Compares the long model with the short one, which reads the same text in pieces."""
    what = "long model against the short one, same masked tokens"
    for long, short in zip(models(results, "long"), models(results, "short"), strict=False):
        if text := short.record.baselines.get("longer_text"):
            yield from difference(
                what, "exact attention", "error", long.sums(EXACT), Sums.of([text]), above=False
            )


def against_counts(results: Results) -> Iterator[Effect | Finding]:
    """Tells whether each model's loss is below that of the n-grams that count its training text."""
    strongest = {
        "5gram": "5-grams of all training tokens",
        "5gram_tokens_read": "5-grams of the tokens read",
        "4grams_shown_token": "4-grams on both sides and the token shown",
    }
    for model in models(results, *ALL):
        for name, label in strongest.items():
            if counted := model.record.baselines.get(name):
                metric, sums = model.record.metric, (model.sums(EXACT), Sums.of([counted]))
                yield from difference(
                    f"exact attention against {label}", model.label, metric, *sums, above=False
                )


def lsh_against_oblivious(
    results: Results, paper: Setting, *, above: bool
) -> Iterator[Effect | Finding]:
    """Compares OVO-65 with LSH of the paper's keys and rounds, or with our closest setting.

    That has the most keys and rounds, up to the paper's, that leave keys out.
    """
    for model in models(results, "long"):
        fitting = [
            (lsh["r"], lsh["rounds"])
            for cell in model.record.cells
            if cell.approximation == "lsh" and (lsh := cell.parameters)["r"] < model.record.length
            if all(lsh[name] <= most for name, most in paper.parameters.items())
        ]
        if fitting:
            r, rounds = max(fitting)
            setting = Setting("lsh", {"r": r, "rounds": rounds})
            yield from compared([model], setting, oblivious(65), above=above)


def _by_kernel(results: Results) -> list[Model]:
    """Lists the causal models: polynomial, elu, exponential."""
    of_kernel = {model.label: model for model in models(results, "causal")}
    return [of_kernel[name] for name in ("polynomial", "elu", "exponential") if name in of_kernel]


def _in_order(
    first: Model, second: Model, setting: Setting, how: str, *, above: bool
) -> list[Effect | Finding]:
    """Tells whether a setting adds more (or less) to the loss of one model than to another's."""
    return difference(
        f"perplexity of {setting.label} over exact's{how}",
        f"{first.label} / {second.label}",
        "perplexity",
        first.added(setting),
        second.added(setting),
        above=above,
    )


def _table_1(*settings: Setting) -> str:
    """Returns "error 88.6 (OVA 1), 96.6 (OVO 1) %" """
    errors = {Setting(cell.approximation, cell.parameters).label: cell.error for cell in TABLE_1}
    each = (f"{errors[setting.label]:g} ({setting.label})" for setting in settings)
    return f"error {', '.join(each)} % (Table 1)"


def _table_2(first: Setting, second: Setting) -> str:
    """Returns "perplexity 280.3 against 1,031.1 (exponential), ..." """
    columns = {(name, r): place for place, (_, name, r) in enumerate(TABLE_2_COLUMNS)}
    places = [columns[s.approximation, s.parameters.get("r")] for s in (first, second)]
    pairs = (
        f"{' against '.join(number(row[place]) for place in places)} ({kernel})"
        for kernel, row in TABLE_2.items()
    )
    return f"perplexity {', '.join(pairs)} (Table 2)"


def _added_in_table_2() -> str:
    """Returns "over exact, OVO-1 × 33.8 (exponential), ..." """
    sizes = []
    for column in ("OVO-1", "OVO-65"):
        place = [name for name, _, _ in TABLE_2_COLUMNS].index(column)
        each = (f"{words.times(row[place] / row[0])} ({kernel})" for kernel, row in TABLE_2.items())
        sizes.append(f"{column} {', '.join(each)}")
    return f"perplexity over exact's {'; '.join(sizes)} (Table 2)"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, its numbers, and the comparisons that answer it here."""

    text: str
    published: str
    finds: Sequence[Find]
    expected: int
    """Comparisons that it takes to say that the claim holds."""


CLAIMS = (
    Claim(
        "One value-aware key loses less than one chosen by weight.",
        f"{_table_2(aware(1), oblivious(1))}; {_table_1(aware(1), oblivious(1))}.",
        [compares(ALL, aware(1), oblivious(1), above=False)],
        expected=5,
    ),
    Claim(
        "Head size + 1 value-aware keys equal exact attention.",
        f"Section 3; {_table_2(aware(65), EXACT)}; {_table_1(aware(65), EXACT)}.",
        [one_more_than_head_size],
        expected=4,  # the short model may have fewer keys than that
    ),
    Claim(
        "65 keys chosen by weight lose against exact attention.",
        f"{_table_2(oblivious(65), EXACT)}; {_table_1(oblivious(65), EXACT)}.",
        [compares(("causal", "long"), oblivious(65), EXACT, above=True)],
        expected=4,
    ),
    Claim(
        "Chosen by weight, keys cost polynomial attention most, then elu, then exponential.",
        f"{_added_in_table_2()}.",
        [order_of_kernels],
        expected=4,
    ),
    Claim(
        "Flatter attention widens the gap between OVO and OVA.",
        "argued in section 3; section 4 explains the order of the kernels by it.",
        [flatter_is_wider, flatter_kernels_lose_more],
        expected=7,
    ),
    Claim(
        "Random features (ORF) and hashing (LSH) of few keys lose against 65 keys by weight.",
        f"{_table_1(ORF, FEW_LSH, oblivious(65))}.",
        [
            compares(("long",), ORF, oblivious(65), above=True),
            partial(lsh_against_oblivious, paper=FEW_LSH, above=True),
        ],
        expected=2,
    ),
    Claim(
        "LSH of many keys does better than 65 keys by weight.",
        f"{_table_1(MANY_LSH, oblivious(65))}.",
        [partial(lsh_against_oblivious, paper=MANY_LSH, above=False)],
        expected=1,
    ),
    Claim(
        "The model of long sequences errs less than that of short ones.",
        f"error {TABLE_1[0].error:g} against {SHORT_EXACT:g} % (section 4).",
        [longer_is_better],
        expected=1,
    ),
    Claim(
        "A sliding window is worse than exact attention and than the r largest weights.",
        "Figure 1, masked LM; no number is printed.",
        [
            compares(("causal", "long"), Setting("sliding_window", {"r": r}), other, above=True)
            for r in (4, 16, 65)
            for other in (EXACT, oblivious(r))
        ],
        expected=24,
    ),
)


def answers(results: Results) -> list[Answer]:
    """Answers every claim; one has no findings if a model or setting was not evaluated."""
    trainings = results.trainings()
    return [
        Answer(
            claim.text,
            over_trainings(
                [
                    [finding for find in claim.finds for finding in find(training)]
                    for training in trainings
                ],
                results.spreads,
            ),
            claim.published,
            claim.expected,
        )
        for claim in CLAIMS
    ]


def about(answered: Sequence[Answer]) -> str:
    """Explains how to read the verdicts."""
    over = Counter(f.over for answer in answered for f in answer.findings if f.over)
    counts = ", ".join(f"{count} over {what}" for what, count in over.items()) or "none"
    once = " An interval over text alone is about one training run." * ("text alone" in over)
    return (
        f"{VERDICTS} Numbers with × are ratios of perplexities; points are percentage points of "
        "masked-token error. Each is the mean over the trainings of a model, with the 95% interval "
        "of this mean in brackets; it covers text and training (for correlations: layers). Draws "
        "of random methods are not covered; they are averaged over seeds. Intervals: "
        f"{counts}.{once}"
    )


def claims(results: Results) -> list[Exhibit]:
    """Shows the verdicts, one row a claim, the models' strength, and every finding."""
    strength = over_trainings(
        [list(against_counts(training)) for training in results.trainings()], results.spreads
    )
    answered = answers(results)
    return [
        _verdicts(answered),
        *([_strength(strength)] if strength else []),
        _findings(answered),
    ]


def _verdicts(answered: Sequence[Answer]) -> Exhibit:
    data = pd.DataFrame(
        {
            "claim": [answer.claim for answer in answered],
            "verdict": [answer.verdict for answer in answered],
            "ours": ["; ".join(answer.lines()) or "not measured" for answer in answered],
            "the paper's": [answer.published for answer in answered],
        }
    )
    counts = data["verdict"].value_counts(sort=False)
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in counts.items())
    return Exhibit(
        "claims",
        "The paper's claims, measured here",
        f"Of {len(answered)} claims: {verdicts}. Beside each verdict stands the comparison that "
        "agrees most firmly, or, where none agrees, the firmest; all are in the section's last "
        "table.",
        [
            about(answered),
            *(f"The paper on “{answer.claim}” {answer.published}" for answer in answered),
        ],
        table=Table(
            data,
            data[["claim", "verdict"]].assign(
                comparisons=[answer.agreement for answer in answered],
                firmest=[
                    f"{firmest.what}: {firmest.sentence} {firmest.mark}" if firmest else DASH
                    for firmest in (answer.firmest for answer in answered)
                ],
            ),
        ),
    )


def _strength(findings: Sequence[Finding]) -> Exhibit:
    """Says whether the models predict better than counts of their training text."""
    errs = [None if finding.holds is None else not finding.holds for finding in findings]
    errors = {True: "more than counting", False: "less than counting", None: "undecided"}
    data = pd.DataFrame(map(_numbers, findings)).assign(errs=[errors[more] for more in errs])
    return Exhibit(
        "strength",
        "The models against counting",
        f"Of {len(findings)} comparisons of exact attention with n-grams of the same text, the "
        f"model predicts worse in {errs.count(True)} and better in {errs.count(False)}; "
        f"{errs.count(None)} are undecided.",
        [
            "Numbers with × are ratios of perplexities, points are percentage points of "
            "masked-token error, on the same targets; in brackets 95% intervals over text and "
            "trainings, as the claims have. Where a model errs more than counting, its attention "
            "has learned less than a few neighbouring tokens tell, and the loss of an "
            "approximation is that of such a model."
        ],
        table=Table(
            data,
            {
                "model": data["model"],
                "compared": data["what"],
                "measured": [f.sentence.removeprefix(f"{f.label} ") for f in findings],
                "errs": data["errs"],
            },
        ),
    )


def _numbers(finding: Finding) -> Row:
    """Returns what the files hold of a finding, for later runs to be compared with."""
    spread = finding.spread
    return {
        "model": finding.label,
        **{name: getattr(finding, name) for name in NUMBERS},
        "spread": spread.deviation if spread else None,
        "seeds": spread.seeds if spread else "",
    }


def _findings(answered: Sequence[Answer]) -> Exhibit:
    """Shows one row for each finding; a claim without findings has an empty row."""
    pairs = [(answer, f) for answer in answered for f in answer.findings or [Finding("", None)]]
    data = pd.DataFrame(
        {"claim": answer.claim, "verdict": answer.verdict, "published": answer.published}
        | {
            "holds": {True: "yes", False: "no", None: ""}[finding.holds],
            "sentence": finding.sentence,
        }
        | _numbers(finding)
        for answer, finding in pairs
    )
    intervals = int(data["low"].notna().sum())
    chance = (
        f"Each of the {intervals} comparisons with an interval is made at 95% by itself, and their "
        f"number is not corrected for: if no settings differed, about {0.05 * intervals:.1f} of "
        "them would carry ✓ or ✗ by chance."
    )
    return Exhibit(
        "findings",
        "Every comparison behind the verdicts",
        "One line a comparison, with its interval: ✓ agrees, ✗ contradicts, ? is open.",
        [about(answered), *([chance] if intervals else [])],
        table=Table(
            data,
            [
                {
                    "claim": answer.claim,
                    "compared": finding.what,
                    "measured": finding.sentence,
                    "interval over": finding.over,
                    "agrees": finding.mark if answer.findings else "not measured",
                }
                for answer, finding in pairs
            ],
        ),
        folded=True,
    )
