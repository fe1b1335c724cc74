"""Numbers as text, and the names that a reader sees of models, kernels, methods and settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from value_aware_attention.measurement.estimate import DASH, interval, number, rounded
from value_aware_attention.measurement.estimate import NONE as NONE
from value_aware_attention.measurement.estimate import counted as counted
from value_aware_attention.measurement.estimate import short as short
from value_aware_attention.measurement.estimate import signed as signed
from value_aware_attention.measurement.estimate import whole as whole
from value_aware_attention.measurement.estimate import with_interval as with_interval
from value_aware_attention.measurement.record import Record
from value_aware_study.cards import cards

KERNEL_LABELS = {"exponential": "exponential", "polynomial": "polynomial (deg 2)", "elu": "elu"}


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Maps each key to its values, both in the order of the pairs."""
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def missing(value: Any) -> bool:
    return value is None or bool(pd.isna(value))


def intervals(
    frame: pd.DataFrame,
    digits: int = 1,
    text: Callable[..., str] = number,
    ends: Sequence[str] = ("low", "high"),
) -> list[str]:
    """Returns the interval of each row, whose ends are in two columns."""
    pairs = zip(frame[ends[0]], frame[ends[1]], strict=True)
    return [interval(low, high, digits, text) for low, high in pairs]


def sentences(
    frame: pd.DataFrame,
    where: str,
    unit: str = "",
    sign: str = "",
    digits: int = 3,
    text: Callable[..., str] = rounded,
) -> list[str]:
    """Writes what each mark says: "exponential, r = 4: +0.154 nats (0.127 to 0.181)".

    `where` names columns in braces: "{series}, r = {count:,.0f}"; `sign` is + where a value above 0
    has one. A range over trainings follows.
    """

    def said(row: Mapping[Any, Any]) -> str:
        plus = "" if missing(row["value"]) or row["value"] <= 0 else sign
        begins = f"{where.format(**row)}: {plus}{text(row['value'], digits)}{unit}"
        over_text = interval(row.get("low"), row.get("high"), digits, text)
        trained = interval(row.get("trained_low"), row.get("trained_high"), digits, text)
        begins += "" if over_text == DASH else f" ({over_text})"
        return begins if trained == DASH else f"{begins}; {trained} over trainings"

    return [said(row) for row in frame.to_dict("records")]


def ratio(value: Any, base: Any) -> float | None:
    return None if missing(value) or missing(base) or not base else float(value) / float(base)


def times(value: Any) -> str:
    """Writes a ratio: two decimals below ten, none from a hundred on."""
    if missing(value):
        return DASH
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"× {number(value, digits)}"


def tokens_count(value: Any) -> str:
    """Writes a count of tokens as the paper prints it: 1.53B, 1.02M, 482K."""
    if missing(value):
        return DASH
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(int(value))


def setting_value(value: Any) -> str:
    """Writes a hyperparameter as text; flags as y and n, the way Table 4 has them."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return str(value)


def model_label(record: Record) -> str:
    """Writes "causal, elu", "masked, 512 tokens": one of our models in titles and legends."""
    if record.task == "causal":
        return f"causal, {KERNEL_LABELS.get(str(record.kernel), record.kernel)}"
    return f"masked, {record.length} tokens"


def method_label(name: str) -> str:
    """Returns a method's label; of a method without a card, the option's name."""
    known = cards()
    return known[name].label if name in known else name


def series_label(row: Mapping[str, Any]) -> str:
    """Names the curve of a setting: the method, and the argument that tells curves apart."""
    card = cards().get(row["approximation"])
    return card.curve(row) if card else row["approximation"]


def setting_label(row: Mapping[str, Any]) -> str:
    """Names a setting as a row of a table: "OVO 65", "LSH r = 64, 4 rounds"."""
    name, series = method_label(row["approximation"]), series_label(row)
    card = cards().get(row["approximation"])
    if card and card.size:
        return series.replace(name, f"{name} {card.size.format(**row)}", 1)
    return series if pd.isna(row.get("r")) else f"{series} {int(row['r'])}"
