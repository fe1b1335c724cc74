"""Describes a fault that a stage met, and the outcome."""

from dataclasses import dataclass
from functools import partial

__all__ = ["CONCURRENT", "DAMAGED", "FOREIGN", "FULL", "KILLED", "SKIPPED", "FaultCase", "Trial"]

KILLED, FULL = "killed", "full disk"
CONCURRENT, DAMAGED, FOREIGN = "two at once", "damaged file", "somebody's file"
SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """Records the outcome of one fault; `wrong` names the mistake, empty where all is right."""

    kind: str
    stage: str
    fault: str
    outcome: str
    wrong: str = ""


Trial = partial[FaultCase]
"""Makes a case in a folder of its own; its random numbers were drawn before."""
