"""One thing that was done to the pipeline, and what came of it."""

from dataclasses import dataclass
from functools import partial

__all__ = ["CONCURRENT", "DAMAGED", "FOREIGN", "FULL", "KILLED", "SKIPPED", "FaultCase", "Trial"]

KILLED, FULL = "killed", "full disk"
CONCURRENT, DAMAGED, FOREIGN = "two at once", "damaged file", "somebody's file"
SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """`wrong` says what should not have come of it; empty where all is right."""

    kind: str
    stage: str
    fault: str
    outcome: str
    wrong: str = ""


Trial = partial[FaultCase]
"""Does it to a folder of its own; what is random in it was drawn before."""
