"""Numbers as text, and the displayed names of models, kernels, methods and settings."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd

from value_aware_attention.records.estimate import DASH, Writer, interval, number, rounded
from value_aware_attention.records.record import AWARE, OBLIVIOUS, Record
from value_aware_study.cards import cards

KERNEL_LABELS = {"exponential": "exponential", "polynomial": "polynomial (deg 2)", "elu": "elu"}
ORACLES = {AWARE: "chosen for the output (OVA)", OBLIVIOUS: "chosen by weight (OVO)"}
"""Full names of the two oracles, for figures about them alone"""
TRAINING = "training_"
"""Prefix of the columns with single trainings' values, next to the column of their mean"""
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Maps each key to its values, both in the order of the pairs."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def missing(value: float | None) -> bool:
    return value is None or bool(pd.isna(value))


def of_trainings(columns: Iterable[Any], begun: str = "") -> list[str]:
    """Lists the columns with single trainings' values; their names begin with `begun`."""
    return [name for name in columns if name.startswith(f"{begun}{TRAINING}")]


def range_over(row: Mapping[str, Any], begun: str = "") -> tuple[float | None, float | None]:
    """Returns the least and largest value over the trainings of a row; None for one training."""
    values = [row[name] for name in of_trainings(row, begun) if not missing(row[name])]
    return (min(values), max(values)) if values else (None, None)


def intervals(
    frame: pd.DataFrame,
    digits: int = 1,
    text: Writer = number,
    ends: Sequence[str] = ("low", "high"),
) -> list[str]:
    """Writes the interval of each row, from the two columns with its ends."""
    return [
        interval(low, high, digits, text)
        for low, high in zip(frame[ends[0]], frame[ends[1]], strict=True)
    ]


def sentences(
    frame: pd.DataFrame,
    where: str,
    unit: str = "",
    sign: str = "",
    digits: int = 3,
    text: Writer = rounded,
) -> list[str]:
    """Writes the sentence of each mark: "exponential, r = 4: +0.154 nats (0.127 to 0.181)".

    `where` names columns in braces: "{series}, r = {count:,.0f}". `sign` "+" puts a plus before
    positive values. A range over trainings follows.
    """
    written = []
    for row in frame.to_dict("records"):
        plus = "" if missing(row["value"]) or row["value"] <= 0 else sign
        over_text = interval(row.get("low"), row.get("high"), digits, text)
        trained = interval(*range_over(row), digits, text)
        written.append(
            f"{where.format(**row)}: {plus}{text(row['value'], digits)}{unit}"
            f"{'' if over_text == DASH else f' ({over_text})'}"
            f"{'' if trained == DASH else f'; {trained} over trainings'}"
        )
    return written


def times(value: float | None) -> str:
    """Writes a ratio: two decimals below ten, none from a hundred on."""
    if value is None or missing(value):
        return DASH
    return f"× {number(value, 2 if value < 10 else 1 if value < 100 else 0)}"


def plural(count: int, unit: str) -> str:
    """Writes "1 window", "1,024 windows"."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def model_label(record: Record) -> str:
    """Writes "causal, elu", "masked, 512 tokens": one of our models in titles and legends."""
    if record.task == "causal":
        return f"causal, {KERNEL_LABELS.get(str(record.kernel), record.kernel)}"
    return f"masked, {record.length} tokens"


def plain_text(name: str) -> str:
    """Writes the name of a record, column or option as words: "masked long", "mean key"."""
    return name.replace("_", " ")


def method_label(name: str) -> str:
    """Returns a method's label; without a card, the option's name in words."""
    card = cards().get(name)
    return card.label if card else plain_text(name)


def full_name(method: str) -> str:
    """Returns the full name of an oracle, or the label of another method."""
    return ORACLES.get(method, method_label(method))


def series_label(row: Mapping[str, Any]) -> str:
    """Names the curve of a setting: the method, and the argument that distinguishes curves."""
    card = cards().get(row["approximation"])
    return card.curve(row) if card else row["approximation"]


def setting_label(row: Mapping[str, Any]) -> str:
    """Names a setting in a row of a table: "OVO 65", "LSH r = 64, 4 rounds"."""
    card, series = cards().get(row["approximation"]), series_label(row)
    if card and card.size:
        return series.replace(card.label, f"{card.label} {card.size.format(**row)}", 1)
    return series if pd.isna(row.get("r")) else f"{series} {int(row['r'])}"
