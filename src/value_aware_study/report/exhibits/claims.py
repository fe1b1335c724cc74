"""What the paper claims, what was measured here, and every comparison behind the verdicts."""

from collections.abc import Sequence

import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.claim import VERDICTS, Answer
from value_aware_study.report.claims import about, answers
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.results import Results

__all__ = ["exhibit"]

HOLDS = {True: "yes", False: "no", None: ""}


def exhibit(results: Results) -> list[Exhibit]:
    """The verdicts, a row a claim, and the findings that they rest on."""
    found = answers(results)
    return [_verdicts(found, results), _findings(found, about(results))]


def _verdicts(found: Sequence[Answer], results: Results) -> Exhibit:
    display = pd.DataFrame(
        {
            "claim": [answer.claim for answer in found],
            "verdict": [answer.verdict for answer in found],
            "ours": ["; ".join(answer.found()) or "not measured" for answer in found],
            "the paper's": [answer.published for answer in found],
        }
    )
    counts = display["verdict"].value_counts(sort=False)
    said = ", ".join(f"{verdict} {count}" for verdict, count in counts.items())
    return Exhibit(
        "claims",
        "The paper's claims, measured here",
        f"Of {len(found)} claims: {said}.{captions.seeds(results)}",
        [VERDICTS],
        table=Table(display, display),
    )


def _findings(found: Sequence[Answer], read: str) -> Exhibit:
    """One row a finding; a claim without findings has one without them."""
    rows = [
        {"claim": answer.claim, "verdict": answer.verdict, "published": answer.published} | of_it
        for answer in found
        for of_it in ([vars(one) | {"mark": one.mark} for one in answer.findings] or [{}])
    ]
    columns = ["claim", "verdict", "published", "what", "sentence", "holds"]
    data = pd.DataFrame(rows, columns=[*columns, "estimate", "low", "high"])
    holds = [holds if isinstance(holds, bool) else None for holds in data["holds"]]
    display = data[["claim", "what", "sentence"]].fillna("")
    display = display.rename(columns={"what": "compared", "sentence": "measured"})
    display["agrees"] = [row.get("mark", "not measured") for row in rows]
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
        [read, *([chance] if intervals else [])],
        table=Table(data.assign(holds=[HOLDS[one] for one in holds]), display),
        folded=True,
    )
