"""Models trained with a method beside models that only met it afterwards."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from value_aware_attention.measurement.record import Cell, Record
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import interval, number, signed
from value_aware_study.report.labels import method_label

__all__ = ["exhibit"]

MIXING = {
    "fourier_mixing": "Fourier mixing (FNet)",
    "linear_mixing": "linear mixing",
    "random_mixing": "random mixing",
}
READ = (
    "The same model, text and steps, trained with the method in every layer and evaluated with it; "
    "beside it the model trained with exact attention, with the same method only swapped in. "
    "One training run each: the intervals cover the choice of evaluation text only."
)


def exhibit(trained: Sequence[Record], records: Sequence[Record]) -> Exhibit | None:
    """One row a trained variant; `records` are the survey's, of the exact models."""
    if not trained:
        return None
    rows = [_row(variant, records) for variant in trained]
    display = pd.DataFrame(
        {
            "model": [row["model"] for row in rows],
            "attention": [row["label"] for row in rows],
            "trained with it": [number(row["trained"], 2) for row in rows],
            "swapped in": [number(row["swapped"], 2) for row in rows],
            "change, 95%": [
                interval(row["swapped_low"], row["swapped_high"], 2, text=signed) for row in rows
            ],
            "exact": [number(row["exact"], 2) for row in rows],
        }
    )
    return Exhibit(
        "trained",
        "Trained with a method, and only swapped in",
        "Masked tokens predicted wrongly in percent, or perplexity; lower is better.",
        [READ, captions.settings_of(trained)],
        table=Table(pd.DataFrame(rows), display),
    )


def _row(variant: Record, records: Sequence[Record]) -> dict[str, Any]:
    """`exact` is the model trained with exact attention that it is a variant of."""
    exact = next((r for r in records if variant.model.startswith(f"{r.model}_")), None)
    arguments = variant.arguments
    name = variant.model.removeprefix(f"{exact.model}_") if exact else variant.trained_with
    swapped = _swapped(exact, name, arguments) if exact else None
    return {
        "model": exact.model if exact else variant.model,
        "attention": name,
        "label": _label(MIXING.get(name) or method_label(name), arguments),
        "arguments": json.dumps(arguments, sort_keys=True),
        "trained": variant.cells[0].value,
        "exact": exact.cells[0].value if exact else None,
        "swapped": swapped.value if swapped else None,
        "swapped_low": swapped.difference_low if swapped else None,
        "swapped_high": swapped.difference_high if swapped else None,
    }


def _label(name: str, arguments: Mapping[str, Any]) -> str:
    given = ", ".join(f"{k} = {v}" for k, v in sorted(arguments.items()) if k not in UNSAID)
    return f"{name} ({given})" if given else name


# What a trained method does not share with the one swapped in.
UNSAID = ("seed", "length", "width", "engine")


def _swapped(exact: Record, name: str, arguments: Mapping[str, Any]) -> Cell | None:
    """The first cell of the exact model with the same method and the same arguments."""

    def said(given: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in given.items() if key not in UNSAID}

    alike = (cell for cell in exact.cells if cell.approximation == name)
    return next((cell for cell in alike if said(cell.parameters) == said(arguments)), None)
