"""The paper's claims, each answered from our records alone, with the comparisons behind it.

A finding compares two settings of a model on the same targets. Their difference in mean loss,
paired over units of text, becomes a ratio of perplexities, or a difference in points of error, with
the 95% interval over text and trainings.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from value_aware_attention.records.estimate import DASH, number, rounded
from value_aware_attention.records.record import EndMetric, Record
from value_aware_study.report import words
from value_aware_study.report.claim import (
    CORRECTED,
    LEVEL,
    VERDICTS,
    Answer,
    Effect,
    Finding,
    FloatArray,
    agreeing,
    decided,
    holm,
    over_trainings,
    quantile,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import KERNEL_NAMES, Results, Row, gap_rows, of_models
from value_aware_study.report.published import SHORT_EXACT, TABLE_1, TABLE_2, TABLE_2_COLUMNS

CLAIM_SIZES = {
    "one key": (
        (1, 2, 4, 8, 16),
        "One value-aware key: the paper's r = 1, and every doubling up to 16 for the few keys that "
        "it stands for.",
    ),
    "by weight": ((65,), "65 keys by weight: the paper's number, and its share of the keys."),
    "share, causal": ((32,), "65 of 512 are 12.7%, 32 of 256 are 12.5%;"),
    "share, long": ((8,), "65 of 4,096 are 1.6%, and so are 8 of 512."),
    "order": (
        (1, 65, 32, 4, 16),
        "Order of the kernels: the paper's 1 and 65, its share (32), and the sizes of the gap.",
    ),
    "gap": ((1, 4, 16), "Gap of OVO over OVA: 1, 4 and 16 keys; with 65 OVA is exact."),
    "window": ((4, 16, 65), "Window: the sizes of its curve below the text's length."),
}
"""Claim -> the numbers of keys at which it is asked, fixed before a run is read, and why"""
ALL_MODELS = ("causal", "long", "short")
NOT_MEASURED = {"trainings": DASH, "p, after Holm": DASH, "agrees": "not measured"}
HELD = {True: "yes", False: "no", None: ""}
Find = Callable[[Results], Iterable[Effect | Finding]]


@dataclass(frozen=True)
class Setting:
    """An approximation and its parameters; a random one stands for all of its seeds."""

    approximation: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return words.setting_label({"approximation": self.approximation, **self.parameters})


EXACT_SETTING = Setting("exact")


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
        return cls(
            np.mean([metric.unit_totals for metric in measured], axis=0),
            np.array(measured[0].unit_counts),
        )


@dataclass(frozen=True)
class Model:
    """One evaluated model under the name that findings have for it."""

    label: str
    record: Record

    def sums(self, setting: Setting) -> Sums | None:
        """Returns the sums of one setting, averaged over seeds; None if it was not measured."""
        cells = [
            cell
            for cell in self.record.cells
            if cell.approximation == setting.approximation
            and setting.parameters.items() <= cell.parameters.items()
        ]
        return Sums.of(cells) if cells else None

    def added(self, setting: Setting, other: Setting) -> Sums | None:
        sums, less = self.sums(setting), self.sums(other)
        return Sums(sums.totals - less.totals, sums.counts) if sums and less else None

    @property
    def flatness(self) -> float | None:
        """Averages the effective keys over layers; None if they were not measured."""
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
    return [Effect(what, label, unit, size * (first.totals - second.totals), first.counts, above)]


ORF = Setting("orf", {"features": 256, "scaling": "paper"})
FEW_LSH, MANY_LSH = (
    Setting("lsh", {"r": r, "rounds": rounds}) for r, rounds in ((64, 4), (512, 16))
)


def models(results: Results, *names: str) -> list[Model]:
    """Selects models: "causal" (one a kernel), "long" and "short" (the masked ones)."""
    models = {
        "causal": [Model(k, record) for k in KERNEL_NAMES if (record := results.of_kernel(k))],
        "long": [Model("masked long", record) for record in results.models("masked_long")],
        "short": [Model("masked short", record) for record in results.models("masked_short")],
    }
    return [model for name in names for model in models[name]]


def compares(
    names: Sequence[str], first: Setting, second: Setting, *, above: bool, length: int | None = None
) -> Find:
    """Finds in each model whether one setting's loss is above (or below) the other's.

    `length`: that of the models' sequences, None = any.
    """
    return lambda results: compared(
        (model for model in models(results, *names) if length in (None, model.record.length)),
        first,
        second,
        above=above,
    )


def one_more_than_head_size(results: Results) -> Iterator[Finding]:
    """Finds the largest output error of head size + 1 value-aware keys over all queries."""
    what = "largest |o − õ| of head size + 1 value-aware keys, over the longest value"
    for model in models(results, *ALL_MODELS):
        r = model.record.head_dim + 1
        for cell in model.record.cells:
            error = cell.error.largest_error if cell.error else None
            if error is not None and Setting(cell.approximation, cell.parameters) == aware(r):
                exact = error <= 1e-5  # in single precision
                yield Finding(f"{model.label} {error:.0e}", exact, what, model.label, error)


def order_of_kernels(results: Results) -> Iterator[Effect | Finding]:
    """Compares the loss that OVO adds: polynomial above elu above exponential."""
    for r, pair in product(CLAIM_SIZES["order"][0], combinations(_by_kernel(results), 2)):
        yield from _in_order(*pair, (oblivious(r), EXACT_SETTING), "", above=True)


def flatter_kernels_gap(results: Results) -> Iterator[Effect | Finding]:
    """Compares the gap of OVO over OVA, for each two kernels: wider where attention is flatter.

    A pair has the same name in every training, whichever of the two is flatter there.
    """
    measured = [model for model in _by_kernel(results) if model.flatness]
    for r, (first, second) in product(CLAIM_SIZES["gap"][0], combinations(measured, 2)):
        if more := (first.flatness or 0) - (second.flatness or 0):
            yield from _in_order(
                first,
                second,
                (oblivious(r), aware(r)),
                ", wider where attention is flatter",
                above=more > 0,
            )


def flatter_is_wider(results: Results) -> Iterator[Effect | Finding]:
    """Correlates effective keys with OVO / OVA error over the kernels of each layer, by rank."""
    ranks = np.array(
        [
            rows["share"].rank().corr(rows["gap"].rank())
            for _, rows in gap_rows(of_models(results)).groupby(["model", "layer"])
        ]
    )
    if (finite := np.isfinite(ranks)).any():
        what = (
            "rank correlation of effective keys and OVO / OVA error at r = 4, over the kernels put "
            f"on a layer's queries and keys (mean of {finite.sum()} layers)"
        )
        yield Effect(what, "all models", "correlation", np.where(finite, ranks, 0.0), 1.0 * finite)


def flatness_of_kernels(results: Results) -> str:
    """Writes the effective keys of each kernel, averaged over its trainings."""
    flat = words.grouped(
        (model.label, model.flatness)
        for training in results.trainings()
        for model in _by_kernel(training)
        if model.flatness
    )
    keys = ", ".join(f"{kernel} {fmean(counts):.0f}" for kernel, counts in flat.items())
    return f"Effective keys, mean over trainings: {keys}." if keys else ""


def longer_is_better(results: Results) -> Iterator[Effect | Finding]:
    """Compares the long model with the short one, and with itself, on the same text in pieces."""
    for long, short in zip(models(results, "long"), models(results, "short"), strict=False):
        for model, what in (
            (short, "long model against the short one, same masked tokens"),
            (long, "long model against itself in pieces as long as the short one's sequences"),
        ):
            if text := model.record.baselines.get("longer_text"):
                yield from difference(
                    what,
                    "exact attention",
                    "error",
                    long.sums(EXACT_SETTING),
                    Sums.of([text]),
                    above=False,
                )


def further_training(results: Results) -> str:
    """Says how much longer the long model was trained than the short one, from which it starts."""
    long, before = (
        results.training.get(f"masked_{name}", {}).get("tokens", 0) for name in ("long", "short")
    )
    more = f"{100 * long / before:.0f}% further tokens" if long and before else "further"
    return (
        f"The long model is the short one, trained on {more}: the first comparison has both, the "
        "second length alone."
    )


def dependent_trainings(results: Results) -> str:
    """Says how many trainings start from other weights, so that they are not independent."""
    names = [record.model for record in (*results.records, *results.replicates)]
    starts = [
        results.training.get(name, {}).get("hyperparameters", {}).get("initialisation", "random")
        for name in names
    ]
    continued, pretrained = sum(start in names for start in starts), {*starts} - {*names, "random"}
    if pretrained:
        return (
            f"Of {len(names)} trainings {continued} start from the short model of their seed, and "
            f"{sum(start in pretrained for start in starts)} from pretrained weights, which the "
            "seeds share: they vary the rest of the weights, the masks and the batches."
        )
    return (
        f"Of {len(names)} trainings {len(names) - continued} are independent: a long masked model "
        "starts from the short one of its seed."
    ) * bool(continued)


def against_counts(results: Results) -> Iterator[Effect | Finding]:
    """Tells whether each model's loss is below that of the n-grams that count its training text."""
    strongest = {
        "5gram": "5-grams of all training tokens",
        "5gram_tokens_read": "5-grams of the tokens read",
        "4grams_shown_token": "4-grams on both sides and the token shown",
    }
    for model in models(results, *ALL_MODELS):
        for name, label in strongest.items():
            if counted := model.record.baselines.get(name):
                metric, sums = model.record.metric, (model.sums(EXACT_SETTING), Sums.of([counted]))
                yield from difference(
                    f"exact attention against {label}", model.label, metric, *sums, above=False
                )


def lsh_against_oblivious(
    results: Results, paper: Setting, *, above: bool
) -> Iterator[Effect | Finding]:
    """Compares OVO-65 with LSH of the paper's keys and rounds, or with our closest setting.

    The closest has the most keys and rounds, up to the paper's, with which keys are left out.
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
            yield from compared(
                [model], Setting("lsh", {"r": r, "rounds": rounds}), oblivious(65), above=above
            )


def _by_kernel(results: Results) -> list[Model]:
    """Lists the causal models: polynomial, elu, exponential."""
    of_kernel = {model.label: model for model in models(results, "causal")}
    return [of_kernel[name] for name in ("polynomial", "elu", "exponential") if name in of_kernel]


def _in_order(
    first: Model, second: Model, settings: tuple[Setting, Setting], how: str, *, above: bool
) -> list[Effect | Finding]:
    """Tells whether one setting adds more (or less) than the other in one model than in another."""
    return difference(
        f"perplexity of {settings[0].label} over {settings[1].label}'s{how}",
        f"{first.label} / {second.label}",
        "perplexity",
        first.added(*settings),
        second.added(*settings),
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
    """A sentence of the paper, its numbers, and the comparisons that answer it here.

    Attributes:
        expected: Comparisons needed to say that the claim holds.
        remark: Says what the verdict does not.
        premise: A comparison that it presupposes; if it is not decided, the claim is untestable.
    """

    text: str
    published: str
    finds: Sequence[Find]
    expected: int
    remark: Callable[[Results], str] = lambda _: ""
    premise: Find | None = None


CLAIMS = (
    Claim(
        "One value-aware key loses less than one chosen by weight.",
        f"{_table_2(aware(1), oblivious(1))}; {_table_1(aware(1), oblivious(1))}.",
        [
            compares(ALL_MODELS, aware(r), oblivious(r), above=False)
            for r in CLAIM_SIZES["one key"][0]
        ],
        expected=5 * len(CLAIM_SIZES["one key"][0]),
        remark=dependent_trainings,
    ),
    Claim(
        "Head size + 1 value-aware keys equal exact attention.",
        f"Section 3; {_table_2(aware(65), EXACT_SETTING)}; {_table_1(aware(65), EXACT_SETTING)}.",
        [one_more_than_head_size],
        expected=4,  # the short model may have fewer keys than that
        remark=lambda _: "It checks the solver: that so many keys are enough is a theorem.",
    ),
    Claim(
        "65 keys chosen by weight lose against exact attention.",
        f"{_table_2(oblivious(65), EXACT_SETTING)}; {_table_1(oblivious(65), EXACT_SETTING)}.",
        [
            compares(names, oblivious(r), EXACT_SETTING, above=True, length=length)
            for names, sizes, length in (
                (("causal", "long"), "by weight", None),
                (("causal",), "share, causal", 256),
                (("long",), "share, long", 512),
            )
            for r in CLAIM_SIZES[sizes][0]
        ],
        expected=4,  # models of the paper's lengths have its number of keys alone
    ),
    Claim(
        "Chosen by weight, keys cost polynomial attention most, then elu, then exponential.",
        f"{_added_in_table_2()}.",
        [order_of_kernels],
        expected=3 * len(CLAIM_SIZES["order"][0]),
    ),
    Claim(
        "Flatter attention widens the gap between OVO and OVA.",
        "argued in section 3; section 4 explains the order of the kernels by it.",
        [flatter_is_wider, flatter_kernels_gap],
        expected=1 + 3 * len(CLAIM_SIZES["gap"][0]),
        remark=flatness_of_kernels,
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
        premise=compares(("long",), oblivious(65), EXACT_SETTING, above=True),
    ),
    Claim(
        "The model of long sequences errs less than that of short ones.",
        f"error {TABLE_1[0].error:g} against {SHORT_EXACT:g} % (section 4).",
        [longer_is_better],
        expected=2,
        remark=further_training,
    ),
    Claim(
        "A sliding window is worse than exact attention and than the r largest weights.",
        "Figure 1, masked LM; no number is printed.",
        [
            compares(("causal", "long"), Setting("sliding_window", {"r": r}), other, above=True)
            for r in CLAIM_SIZES["window"][0]
            for other in (EXACT_SETTING, oblivious(r))
        ],
        expected=8 * len(CLAIM_SIZES["window"][0]),
    ),
)


def answers(results: Results) -> list[Answer]:
    """Answers every claim; one has no findings if a model or setting was not evaluated."""
    found = [joint(results, claim.finds) for claim in CLAIMS]
    corrected = iter(holm([finding for findings in found for finding in findings]))
    return [
        answer(results, claim, [next(corrected) for _ in findings])
        for claim, findings in zip(CLAIMS, found, strict=True)
    ]


def answer(results: Results, claim: Claim, findings: Sequence[Finding]) -> Answer:
    """Answers a claim, which cannot be tested if its premise is not decided."""
    remark, testable = claim.remark(results) if findings else "", True
    for premise in joint(results, [claim.premise] if claim.premise and findings else []):
        testable = bool(premise.holds)
        remark = f"It presupposes a loss, {premise.what}: {premise.sentence} {premise.mark}."
    return Answer(claim.text, findings, claim.published, claim.expected, remark, testable)


def joint(results: Results, finds: Sequence[Find]) -> list[Finding]:
    """Makes one finding of each comparison, by its effects in all trainings."""
    return over_trainings(
        [[made for find in finds for made in find(training)] for training in results.trainings()],
        results.spreads,
    )


def about(answered: Sequence[Answer]) -> str:
    over = Counter(f.over for answer in answered for f in answer.findings if f.over)
    counts = ", ".join(f"{count} over {what}" for what, count in over.items()) or "none"
    once = " An interval over text alone is about one training run." * ("text alone" in over)
    return (
        f"{VERDICTS} {CORRECTED} Numbers with × are ratios of perplexities; points are percentage "
        "points of masked-token error. Each is the mean over the trainings of a model, with the "
        "two-sided 95% interval of this mean in brackets; it covers text and training. Draws "
        "of random methods are not covered; they are averaged over seeds. Intervals: "
        f"{counts}.{once}"
    )


def claims(
    results: Results, published: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> list[Exhibit]:
    """Shows the verdicts, one row a claim, the models' strength, and every finding.

    Next to a verdict stand the `published` ones, by run and claim.
    """
    strength = joint(results, [against_counts])
    answered = answers(results)
    return [
        _verdicts(answered, published),
        *([_strength(strength)] if strength else []),
        _findings(answered),
    ]


def _verdicts(answered: Sequence[Answer], published: Mapping[str, Mapping[str, str]]) -> Exhibit:
    data = pd.DataFrame(map(_row, answered))
    counts = data["verdict"].str.partition(" (")[0].value_counts(sort=False)
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in counts.items())
    return Exhibit(
        "claims",
        "The paper's claims, measured here",
        f"Of {len(answered)} claims: {verdicts}. Beside each verdict: its comparisons that are "
        "decided for it, each by its own 95% interval, and the single trainings that agree."
        + (" Last: the verdicts of published runs, by scale." if published else ""),
        [
            about(answered),
            *(f"“{answer.claim}” {_told(answer)}" for answer in answered),
        ],
        table=Table(
            data,
            {
                "claim": data["claim"],
                "verdict": data["verdict"],
                "after Holm": data["after_holm"],
                "decided for it": [decided(answer.findings) for answer in answered],
                "trainings that agree": [agreeing(answer.findings) for answer in answered],
            }
            | {
                f"verdict, {scale}": [of_run.get(answer.claim, DASH) for answer in answered]
                for scale, of_run in published.items()
            },
        ),
        listed="The claims",
    )


def _told(answer: Answer) -> str:
    """Lists the paper's numbers for a claim, each model's, and what the verdict leaves out."""
    models = words.grouped((finding.label, finding) for finding in answer.findings)
    each = (f"{model}: {decided(some)} ({agreeing(some)})" for model, some in models.items())
    ours = f"Here: {'; '.join(each)}." if len(models) > 1 else ""
    return " ".join(filter(None, [f"The paper: {answer.published}", ours, answer.remark]))


def _row(answer: Answer) -> Row:
    held, firm = ([getattr(f, x) for f in answer.findings] for x in ("holds", "corrected"))
    return {
        "claim": answer.claim,
        "verdict": answer.verdict,
        "after_holm": answer.after_holm,
        "compared": len(held),
        "decided_for": held.count(True),
        "decided_against": held.count(False),
        "for_after_holm": firm.count(True),
        "against_after_holm": firm.count(False),
        "trainings": sum(finding.trainings for finding in answer.findings),
        "agree": sum(finding.agree for finding in answer.findings),
        "remark": answer.remark,
        "ours": "; ".join(answer.lines()) or "not measured",
        "the paper's": answer.published,
    }


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
        folded=True,
        listed="Against counting",
    )


def _numbers(finding: Finding) -> Row:
    """Returns the fields of a finding in the files, for comparison with later runs."""
    spread = finding.spread
    columns = ("what", "estimate", "low", "high", "unit", "trainings", "agree", "p", "p_holm")
    return {
        "model": finding.label,
        **{name: getattr(finding, name) for name in columns},
        "spread": spread.deviation if spread else None,
        "seeds": spread.seeds if spread else "",
    }


def _findings(answered: Sequence[Answer]) -> Exhibit:
    """Shows one row for each finding; a claim without findings has an empty row."""
    pairs = [(answer, f) for answer in answered for f in answer.findings or [Finding("", None)]]
    data = pd.DataFrame(
        {"claim": answer.claim, "verdict": answer.verdict, "published": answer.published}
        | {"holds": HELD[finding.holds], "holds_after_holm": HELD[finding.corrected]}
        | {"sentence": finding.sentence, **_numbers(finding)}
        for answer, finding in pairs
    )
    intervals = int(data["p"].notna().sum())
    firm = int((data["p_holm"] <= LEVEL).sum())
    chance = (
        f"If no settings differed, about {LEVEL * intervals:.1f} of the {intervals} comparisons "
        "with an interval would be decided by their own interval, by chance; after Holm's "
        f"correction one at all would be in at most 5 of 100 runs. Of ours {firm} are: for three "
        f"trainings Student's t of {quantile(3):.1f} becomes "
        f"{quantile(3, LEVEL / max(intervals, 1)):.0f} for the first of them."
    )
    return Exhibit(
        "findings",
        "Every comparison behind the verdicts",
        f"One line a comparison, with its interval. {CORRECTED}",
        [
            about(answered),
            *([chance] if intervals else []),
            " ".join(reason for _, reason in CLAIM_SIZES.values()),
        ],
        table=Table(
            data,
            [
                {
                    "claim": answer.claim,
                    "compared": finding.what,
                    "measured": finding.sentence,
                    "interval over": finding.over,
                    "trainings": f"{finding.agree} of {finding.trainings}",
                    "p, after Holm": f"{rounded(finding.p, 2)}, {rounded(finding.p_holm, 2)}",
                    "agrees": finding.mark,
                }
                | ({} if answer.findings else NOT_MEASURED)
                for answer, finding in pairs
            ],
            grouped=True,
        ),
        folded=True,
        listed="Every comparison",
    )
