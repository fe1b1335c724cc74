"""The two oracles by their full names, as figures about them alone have them, and their marks."""

from value_aware_study.report.labels import method_label
from value_aware_study.report.look import Mark
from value_aware_study.report.measurements import AWARE, OBLIVIOUS

__all__ = ["MARKS", "NAMES", "full_name"]

NAMES = {AWARE: "chosen for the output (OVA)", OBLIVIOUS: "chosen by weight (OVO)"}
MARKS = {
    NAMES[AWARE]: Mark.of("blue", "square"),
    NAMES[OBLIVIOUS]: Mark.of("vermillion", "circle"),
}


def full_name(method: str) -> str:
    """The name of an oracle in full, and of any other method as ever."""
    return NAMES.get(method, method_label(method))
