"""A published claim beside what was measured, and the verdict that the measurements allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
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
        """The findings as text."""
        found: list[str] = []
        for what, group in groupby(self.findings, key=lambda finding: finding.what):
            marked = [f"{finding.sentence} {MARKS[finding.holds]}" for finding in group]
            found += [f"{what}: {', '.join(marked)}"] if what else marked
        return found


def claims_markdown(title: str, about: str, answers: Sequence[Answer]) -> str:
    """Every claim with its verdict and findings, as Markdown."""
    lines = [f"# {title}", "", about, ""]
    for answer in answers:
        published = [f"Published: {answer.published}"] if answer.published else []
        lines += [f"**{answer.claim}** {answer.verdict_said()}"]
        lines += [*(f"- {line}" for line in [*published, *answer.lines()]), ""]
    return "\n".join(lines)


def claims_section(title: str, about: str, answers: Sequence[Answer]) -> str:
    """The same as a section of a page."""
    items = "\n".join(_item(answer) for answer in answers)
    caption = f"<p class='caption'>{escape(about)}</p>\n" if about else ""
    return f"<section id='claims'><h2>{escape(title)}</h2>{caption}<ul>\n{items}\n</ul></section>"


def _item(answer: Answer) -> str:
    published = [f"Published: {answer.published}"] if answer.published else []
    findings = "<br>".join(escape(line) for line in [*published, *answer.lines()])
    return (
        f"<li><p><b>{escape(answer.claim)}</b> {escape(answer.verdict_said())}</p>"
        f"<p class='caption'>{findings}</p></li>"
    )
