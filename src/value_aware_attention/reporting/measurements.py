"""What was measured on recorded attention calls: output error for every size, and skewness."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from value_aware_attention.reporting import style
from value_aware_attention.reporting.records import KERNEL_LABELS, Record, in_order

OutputError = Mapping[str, Any]
Rows = list[dict[str, Any]]

OBLIVIOUS, AWARE = "optimal_v_oblivious", "optimal_v_aware"
SIZES = (1, 2, 4, 8, 16, 32)
SENTENCE_SIZES = (4, 8, 16)


@dataclass(frozen=True)
class Measured:
    """One model, or one kernel of a model, under the name and the colour it has in figures."""

    label: str
    mark: style.Mark
    output_error: OutputError | None
    skewness_gap: Mapping[str, Any] | None
    keys: int


def of_records(records: Iterable[Record]) -> list[Measured]:
    """What the evaluation measured on each of our models, in the order of the report."""
    ordered = in_order(records)
    ordered.sort(key=lambda record: record["task"] != "causal")
    return [_of_record(record) for record in ordered]


def _of_record(record: Record) -> Measured:
    label, mark = f"masked, {record['length']} tokens", style.SHORT
    if record["model"] == "masked_long":
        mark = style.LONG
    if record["task"] == "causal":
        kernel = KERNEL_LABELS[record["kernel"]]
        label, mark = f"causal, {kernel}", style.KERNEL_MARKS[kernel]
    errors = record.get("output_error")
    keys = int(errors["keys"] if errors else record["length"])
    return Measured(label, mark, errors, record.get("skewness_gap"), keys)


def total_error(output_error: OutputError, method: str, layer: int | None = None) -> list[float]:
    """Relative output error of a method at each of its sizes: sum of errors over sum of norms.

    Every layer was measured on as many queries, so sums and means of layers pool alike. `layer`
    None pools all of them.
    """
    errors, norms = output_error["methods"][method]["layers"], output_error["squared_norm"]
    if layer is not None:
        errors, norms = [errors[layer]], [norms[layer]]
    return [sum(at_size) / sum(norms) for at_size in zip(*errors, strict=True)]


def error_rows(output_error: OutputError, method: str, layer: int | None = None) -> Rows:
    """The same as rows of size r and relative error."""
    sizes = output_error["methods"][method]["sizes"]
    errors = total_error(output_error, method, layer)
    return [{"r": r, "error": error} for r, error in zip(sizes, errors, strict=True)]


def keys_needed(output_error: OutputError, r: int, layer: int | None = None) -> int | None:
    """The smallest number of keys chosen by weight with at most the error of r value-aware keys.

    None where r value-aware keys, or no sufficient number of others, were measured. All keys
    suffice by definition, whatever rounding left of their error.
    """
    methods = output_error["methods"]
    aware = {row["r"]: row["error"] for row in error_rows(output_error, AWARE, layer)}
    if r not in aware or OBLIVIOUS not in methods:
        return None
    keys = output_error["keys"]
    rows = error_rows(output_error, OBLIVIOUS, layer)
    enough = (row["r"] for row in rows if row["error"] <= aware[r] or row["r"] >= keys)
    return min(enough, default=None)


def sizes_to_compare(output_error: OutputError) -> list[int]:
    """The sizes of the value-aware approximation that keys are counted for: fewer than all."""
    if AWARE not in output_error["methods"]:
        return []
    measured = set(output_error["methods"][AWARE]["sizes"])
    return [r for r in SIZES if r in measured and r < output_error["keys"]]


def keys_needed_sentence(output_error: OutputError) -> str:
    """ "4 value-aware keys match 69 keys chosen by attention weight, 8 match 194 of 512"."""
    sizes = [r for r in sizes_to_compare(output_error) if r in SENTENCE_SIZES]
    pairs = [(r, needed) for r in sizes if (needed := keys_needed(output_error, r)) is not None]
    if not pairs:
        return "how many keys match value-aware keys was not measured"
    (r, needed), *others = pairs
    first = f"{r} value-aware keys match {needed:,} keys chosen by attention weight"
    parts = [first, *(f"{r} match {needed:,}" for r, needed in others)]
    return ", ".join(parts) + f" of {output_error['keys']:,}"


def with_output_error(measured: Sequence[Measured]) -> list[tuple[Measured, OutputError]]:
    """Those whose output error was measured, each with it."""
    return [(item, item.output_error) for item in measured if item.output_error]
