"""A published claim beside what was measured, and the verdict that the measurements allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

MARKS = {True: "✓", False: "✗", None: "?"}
VERDICTS = (
    "Holds: every comparison agrees with the claim (✓). In part: some do. Not at this scale: none "
    "does and one at least says the opposite (✗). Undecided: the intervals leave it open (?)."
)


@dataclass(frozen=True)
class Finding:
    """One measured sentence, and whether it agrees with the claim; None where that is open.

    Findings in a row that say the same `what` of different models are one line. `estimate`, `low`
    and `high` are the number of a sentence that has one, with its 95% interval.
    """

    sentence: str
    holds: bool | None
    what: str = ""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Answer:
    """A claim, the numbers it was published with, and what was found here."""

    claim: str
    findings: Sequence[Finding]
    published: str = ""
    where: str = ""
    """What the verdict is limited to: "on this CPU"."""

    @property
    def verdict(self) -> str:
        """No firmer than its findings: one that is open keeps a claim from holding."""
        held = [finding.holds for finding in self.findings]
        if not held:
            return "not measured"
        if all(held):
            return "holds"
        if any(held):
            return "in part"
        return "not at this scale" if False in held else "undecided"

    def found(self) -> list[str]:
        """The findings as text, those that say the same of different models on one line."""
        found = []
        for what, group in groupby(self.findings, key=lambda finding: finding.what):
            marked = [f"{finding.sentence} {MARKS[finding.holds]}" for finding in group]
            found += [f"{what}: {', '.join(marked)}"] if what else marked
        return found
