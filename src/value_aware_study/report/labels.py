"""The names that a reader sees of models, kernels, methods and their settings."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.cards import cards

KERNEL_LABELS = {"exponential": "exponential", "polynomial": "polynomial (deg 2)", "elu": "elu"}


def model_label(record: Record) -> str:
    """ "causal, elu", "masked, 512 tokens": one of our models in titles and legends."""
    if record.task == "causal":
        return f"causal, {KERNEL_LABELS.get(str(record.kernel), record.kernel)}"
    return f"masked, {record.length} tokens"


def method_label(name: str) -> str:
    """The name of a method; the option's where it has no card."""
    known = cards()
    return known[name].label if name in known else name


def series_label(row: Mapping[str, Any]) -> str:
    """The curve a setting belongs to: the method, with the argument that tells its curves apart."""
    card = cards().get(row["approximation"])
    return card.curve(row) if card else row["approximation"]


def setting_label(row: Mapping[str, Any]) -> str:
    """Name of a setting as a row of a table: "OVO 65", "LSH r = 64, 4 rounds"."""
    name, series = method_label(row["approximation"]), series_label(row)
    card = cards().get(row["approximation"])
    if card and card.size:
        return series.replace(name, f"{name} {card.size.format(**row)}", 1)
    return series if pd.isna(row.get("r")) else f"{series} {int(row['r'])}"
