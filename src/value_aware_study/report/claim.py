"""A published claim beside what was measured, and the verdict that the measurements allow."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

MARKS = {True: "✓", False: "✗", None: "?"}
VERDICTS = (
    "Holds: every comparison agrees with the claim (✓). In part: some do. Not at this scale: none "
    "does and one at least says the opposite (✗). Undecided: the intervals leave it open (?). In "
    "brackets: how many of the comparisons of a claim were made, where not all were."
)
FIRMEST_FIRST = ("holds", "in part", "not at this scale", "undecided", "not measured")


@dataclass(frozen=True)
class Finding:
    """One measured sentence, and whether it agrees with the claim; None where that is open.

    Findings in a row that say the same `what` of different models are one line. `estimate`, `low`
    and `high` are the number of a sentence that has one, with its 95% interval; `label` is its
    model, `shown` the estimate as text. `seeds` are what each training found, where several did.
    """

    sentence: str
    holds: bool | None
    what: str = ""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    label: str = ""
    shown: str = ""
    seeds: tuple[bool | None, ...] = ()

    @property
    def mark(self) -> str:
        """The mark of the finding; one for each training where they disagree."""
        held = self.seeds if len(set(self.seeds)) > 1 else [self.holds]
        return "".join(MARKS[one] for one in held)


@dataclass(frozen=True)
class Answer:
    """A claim, the numbers it was published with, and what was found here.

    `expected` is the number of comparisons that it takes to say that the claim holds. `trainings`
    are the findings in each training of the models, where they were trained again.
    """

    claim: str
    findings: Sequence[Finding]
    published: str = ""
    where: str = ""
    """What the verdict is limited to: "on this CPU"."""
    trainings: Sequence[Sequence[Finding]] = ()
    expected: int = 0

    @classmethod
    def of_trainings(
        cls,
        claim: str,
        trainings: Sequence[Sequence[Finding]],
        published: str = "",
        expected: int = 0,
    ) -> "Answer":
        """What was found in each training, as findings of the first with the range over seeds."""
        found = _over_seeds(trainings)
        return cls(claim, found, published, trainings=trainings, expected=expected)

    @property
    def verdict(self) -> str:
        """The verdict of most trainings and of how many, where they differ; else it is mixed.

        With the number of comparisons, where fewer than expected were made in a training.
        """
        trainings = self.trainings or [self.findings]
        each = sorted(map(_verdict, trainings), key=FIRMEST_FIRST.index)
        counts = Counter(each)
        said, count = counts.most_common(1)[0]
        if 2 * count <= len(each):
            said = f"mixed: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}"
        elif count < len(each):
            said = f"{said} for {count} of {len(each)} seeds"
        made = min(map(len, trainings))
        if said == "not measured" or made >= self.expected:
            return said
        return f"{said} ({made} of {self.expected} compared)"

    def found(self) -> list[str]:
        """The findings as text, those that say the same of different models on one line."""
        found = []
        for what, group in groupby(self.findings, key=lambda finding: finding.what):
            marked = [f"{finding.sentence} {finding.mark}" for finding in group]
            found += [f"{what}: {', '.join(marked)}"] if what else marked
        return found


def _verdict(findings: Sequence[Finding]) -> str:
    """No firmer than its findings: one that is open keeps a claim from holding."""
    held = [finding.holds for finding in findings]
    if not held:
        return "not measured"
    if all(held):
        return "holds"
    if any(held):
        return "in part"
    return "not at this scale" if False in held else "undecided"


def _over_seeds(trainings: Sequence[Sequence[Finding]]) -> list[Finding]:
    """What the trainings found of the same model and `what`, as one finding.

    What stands in the brackets of a `what` was measured too, and may be another in each.
    """
    if len(trainings) == 1:
        return list(trainings[0])
    same: dict[tuple[str, str], list[Finding]] = {}
    for finding in chain.from_iterable(trainings):
        what = finding.what.partition(" (")[0]
        same.setdefault((what, finding.label), []).append(finding)
    return list(map(_with_range, same.values()))


def _with_range(found: Sequence[Finding]) -> Finding:
    """The first of these findings, with the range of their estimates; itself where all are it."""
    first, *others = found
    if all(other == first for other in others):
        return first
    ordered = sorted(found, key=lambda one: (one.estimate is not None, one.estimate))
    ends = f"seeds {ordered[0].shown} to {ordered[-1].shown}"
    begun = f"{first.sentence[:-1]}; " if first.sentence.endswith(")") else f"{first.sentence} ("
    held = tuple(one.holds for one in found)
    agreed = first.holds if len(set(held)) == 1 else None
    return replace(first, sentence=f"{begun}{ends})", holds=agreed, seeds=held)
