"""The colour and shape of every model, kernel and method, the same in every figure."""

import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.cards import Card, cards
from value_aware_study.report.labels import KERNEL_LABELS
from value_aware_study.report.look import Mark

__all__ = ["KERNEL_MARKS", "LONG", "OTHER", "SHORT", "kernel_mark", "method_marks", "model_mark"]

KERNEL_MARKS = {
    "exponential": Mark.of("deep"),
    "polynomial (deg 2)": Mark.of("brown", "triangle-up"),
    "elu": Mark.of("sky", "square"),
}
SHORT, LONG = Mark.of("grey", "square"), Mark.of("olive", "cross")
OTHER = Mark.of("grey")
"""Of what has no mark of its own."""


def kernel_mark(kernel: str) -> Mark:
    """The mark of a kernel by its option's name."""
    return KERNEL_MARKS.get(KERNEL_LABELS.get(kernel, kernel), OTHER)


def model_mark(record: Record) -> Mark:
    """A causal model has its kernel's mark, a masked one that of its length."""
    if record.task == "causal":
        return kernel_mark(str(record.kernel))
    return LONG if record.model == "masked_long" else SHORT


def method_marks(settings: pd.DataFrame) -> dict[str, Mark]:
    """The mark of each curve (`series`) of some settings, in legend order, from the cards."""
    present = set(settings["series"])
    marks: dict[str, Mark] = {}
    shaded: dict[str, Mark] = {}
    for card in cards().values():
        for name, own in card.marks().items():
            marks |= {name: Mark.of(own["colour"], own["shape"])} if name in present else {}
        shaded |= _shades(card, settings)
    marks |= shaded
    return marks | dict.fromkeys(sorted(present - set(marks)), OTHER)


def _shades(card: Card, settings: pd.DataFrame) -> dict[str, Mark]:
    """Shades of one hue for a method's curves, by the argument that tells them apart."""
    of_card = settings[settings["approximation"] == card.name]
    if "shades" not in card.mark or of_card.empty:
        return {}
    names = of_card.sort_values(list(card.curves))["series"].unique()
    shades = card.mark["shades"]
    last, steps = len(shades) - 1, max(len(names) - 1, 1)
    places = (round(place * last / steps) for place in range(len(names)))
    return {n: Mark.of(shades[p], card.mark["shape"]) for n, p in zip(names, places, strict=True)}
