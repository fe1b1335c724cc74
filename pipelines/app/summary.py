"""Summarises a record for the comparison of runs, and its cells as rows of a table."""

from value_aware_attention.measurement import Record
from value_aware_attention.records.headline import match
from value_aware_attention.records.record import AWARE, OBLIVIOUS, Cell

SHORT_NAMES = {OBLIVIOUS: "OVO", AWARE: "OVA"}


def row(record: Record, cell: Cell) -> dict[str, object]:
    return (
        {"model": record.model, "approximation": cell.approximation}
        | dict(cell.parameters)
        | {key: getattr(cell, key) for key in ("value", "low", "high", "count")}
        | ({"relative_output_error": cell.error.relative} if cell.error else {})
    )


def summary(record: Record) -> dict[str, float]:
    """Returns the numbers of a model for comparing runs.

    These are its metric with exact attention and with 1, 4 and d + 1 keys chosen by weight (OVO)
    and for the output (OVA), and `match_4`, the number of keys by weight that match 4 value-aware
    ones.
    """
    numbers = {"exact": record.cells[0].value} | {
        f"{SHORT_NAMES[cell.approximation]}_{cell.parameters['r']}": cell.value
        for cell in record.cells
        if cell.approximation in SHORT_NAMES and cell.parameters["r"] in (1, 4, record.head_dim + 1)
    }
    matched = match(record.attention[0].output_error, 4) if record.attention else None
    if matched and matched.keys is not None:
        numbers["match_4"] = matched.keys
    return numbers
