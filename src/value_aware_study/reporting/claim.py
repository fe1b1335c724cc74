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

    def verdict_said(self) -> str:
        """The verdict as a sentence."""
        return " ".join(filter(None, (self.verdict.capitalize(), self.where))) + "."

    def lines(self) -> list[str]:
        """What was published, and the findings, as text."""
        found = [f"Published: {self.published}"] if self.published else []
        for what, group in groupby(self.findings, key=lambda finding: finding.what):
            marked = [f"{finding.sentence} {MARKS[finding.holds]}" for finding in group]
            found += [f"{what}: {', '.join(marked)}"] if what else marked
        return found


@dataclass(frozen=True)
class Claims:
    """Every claim of a paper with its answer, and how to read them."""

    title: str
    about: str
    answers: Sequence[Answer]

    def markdown(self, before: str = "") -> str:
        """As text of its own, which says `before` what it is about."""
        lines = [f"# {self.title}", "", " ".join(filter(None, (before, self.about))), ""]
        for answer in self.answers:
            lines += [f"**{answer.claim}** {answer.verdict_said()}"]
            lines += [*(f"- {line}" for line in answer.lines()), ""]
        return "\n".join(lines)
