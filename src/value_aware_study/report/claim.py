"""A published claim, the findings that answer it, and the verdict that they allow."""

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
    """Holds a measured sentence, and whether it agrees with the claim; None where that is open."""

    sentence: str
    holds: bool | None
    what: str = ""
    """The comparison; findings in a row with the same one, of different models, share a line."""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the 95% interval."""
    label: str = ""
    """The model."""
    shown: str = ""
    """The estimate as text."""
    seeds: tuple[bool | None, ...] = ()
    """Whether each training agrees, where the model was trained again."""

    @property
    def mark(self) -> str:
        """Returns the mark of the finding; one for each training where they disagree."""
        held = self.seeds if len(set(self.seeds)) > 1 else [self.holds]
        return "".join(MARKS[one] for one in held)


@dataclass(frozen=True)
class Answer:
    """Pairs a claim and its published numbers with our findings."""

    claim: str
    findings: Sequence[Finding]
    published: str = ""
    trainings: Sequence[Sequence[Finding]] = ()
    """The findings in each training of the models, where they were trained again."""
    expected: int = 0
    """Comparisons that it takes to say that the claim holds."""

    @classmethod
    def of_trainings(
        cls,
        claim: str,
        trainings: Sequence[Sequence[Finding]],
        published: str = "",
        expected: int = 0,
    ) -> "Answer":
        """Returns the findings of the first training, with the range over all trainings."""
        return cls(claim, _over_seeds(trainings), published, trainings, expected)

    @property
    def verdict(self) -> str:
        """Returns the verdict of most trainings, with their number if others differ, or "mixed".

        Says how many comparisons were made, where a training has fewer than expected.
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
        """Writes the findings as lines of text, one for each comparison."""
        found = []
        for what, group in groupby(self.findings, key=lambda finding: finding.what):
            marked = [f"{finding.sentence} {finding.mark}" for finding in group]
            found += [f"{what}: {', '.join(marked)}"] if what else marked
        return found


def _verdict(findings: Sequence[Finding]) -> str:
    """Judges one training; findings that are open do not count as agreement."""
    held = [finding.holds for finding in findings]
    if not held:
        return "not measured"
    if all(held):
        return "holds"
    if any(held):
        return "in part"
    return "not at this scale" if False in held else "undecided"


def _over_seeds(trainings: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Makes one finding for each model and comparison from those of all trainings.

    Brackets in the name of a comparison hold numbers, which differ between trainings.
    """
    if len(trainings) == 1:
        return list(trainings[0])
    same: dict[tuple[str, str], list[Finding]] = {}
    for finding in chain.from_iterable(trainings):
        what = finding.what.partition(" (")[0]
        same.setdefault((what, finding.label), []).append(finding)
    return list(map(_with_range, same.values()))


def _with_range(found: Sequence[Finding]) -> Finding:
    """Adds the range of the estimates to the first finding, where the findings differ."""
    first, *others = found
    if all(other == first for other in others):
        return first
    ordered = sorted(found, key=lambda one: (one.estimate is not None, one.estimate))
    ends = f"seeds {ordered[0].shown} to {ordered[-1].shown}"
    begun = f"{first.sentence[:-1]}; " if first.sentence.endswith(")") else f"{first.sentence} ("
    held = tuple(one.holds for one in found)
    agreed = first.holds if len(set(held)) == 1 else None
    return replace(first, sentence=f"{begun}{ends})", holds=agreed, seeds=held)
