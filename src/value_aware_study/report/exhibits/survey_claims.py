"""The survey's claims of time and memory beside what was measured here."""

import pandas as pd

from value_aware_study.report.claim import MARKS, VERDICTS, Finding
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.survey_claims import answers
from value_aware_study.report.survey_records import Measurements

__all__ = ["exhibit"]

RATIOS = (
    "Ratios of times are taken round by round: the median and, in brackets, its 95% interval (sign "
    "test). A finding whose interval holds its threshold is undecided. Memory is measured once."
)
LIMIT = (
    "The survey measured on a GPU (RTX 3090). These verdicts are of a CPU, where other things "
    "cost: they neither confirm nor refute its claims on a GPU."
)


def exhibit(measured: Measurements) -> Exhibit:
    """Every claim of the survey, its verdict, and the sentences that it follows from."""
    found = answers(measured, measured.where)
    rows = pd.DataFrame(
        {
            "claim": [answer.claim for answer in found],
            "verdict": [answer.verdict for answer in found],
            "measured here": [" ".join(map(_marked, answer.findings)) for answer in found],
        }
    )
    return Exhibit(
        "survey_claims",
        "The survey's claims, measured here",
        f"Verdicts {measured.where}, no firmer than their intervals.",
        [VERDICTS, RATIOS if measured.on_gpu else f"{LIMIT} {RATIOS}", measured.setting],
        table=Table(rows, rows),
    )


def _marked(finding: Finding) -> str:
    return f"{MARKS[finding.holds]} {finding.sentence}"
