"""What was measured on recorded attention calls: output error for every size, and skewness."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from value_aware_study.reporting import style
from value_aware_study.reporting.records import KERNEL_LABELS, Record, in_order

OutputError = Mapping[str, Any]
Rows = list[dict[str, Any]]

OBLIVIOUS, AWARE = "optimal_v_oblivious", "optimal_v_aware"
SENTENCE_SIZES = (4, 8, 16)


@dataclass(frozen=True)
class Measured:
    """One model, or one kernel of a model, under the name and the colour it has in figures."""

    label: str
    mark: style.Mark
    output_error: OutputError | None
    skewness_gap: Mapping[str, Any] | None
    keys: int
    unit: str = "window"
    """What its queries are sampled from: "window" or "sequence"."""


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
    return Measured(label, mark, errors, record.get("skewness_gap"), keys, record["unit"])


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


def keys_needed(
    output_error: OutputError, r: int, layer: int | None = None
) -> Mapping[str, Any] | None:
    """How many keys by weight match r value-aware ones (`captions.MATCH`), as the record has it.

    `keys` with `low` and `high`; `median`, `lower_quartile` and `upper_quartile` of single queries.
    None where it was not measured.
    """
    found = (m for m in output_error["matching_keys"] if (m["r"], m["layer"]) == (r, layer))
    return next(found, None)


def sizes_to_compare(output_error: OutputError) -> list[int]:
    """The sizes of the value-aware approximation that keys were counted for."""
    return sorted({match["r"] for match in output_error["matching_keys"]})


def keys_needed_sentence(output_error: OutputError) -> str:
    """ "4 value-aware keys match 69 (65 to 76) keys chosen by attention weight, 8 match ..."

    With the 95% intervals, and the median of single queries.
    """
    pairs = [(r, found) for r in SENTENCE_SIZES if (found := keys_needed(output_error, r))]
    if not pairs:
        return "how many keys match value-aware keys was not measured"
    (r, found), *others = pairs
    first = f"{r} value-aware keys match {with_ends(found)} keys chosen by attention weight"
    parts = [first, *(f"{r} match {with_ends(found)}" for r, found in others)]
    medians = ", ".join(f"{found['median']:,}" for _, found in pairs)
    return (
        f"{', '.join(parts)} of {output_error['keys']:,} (errors pooled; matched query by query, "
        f"the median is {medians})"
    )


def with_ends(match: Mapping[str, Any]) -> str:
    """ "69 (65 to 76)"; the count alone where its interval is not known."""
    ends = "" if match["low"] is None else f" ({match['low']:,} to {match['high']:,})"
    return f"{match['keys']:,}{ends}"


def with_output_error(measured: Sequence[Measured]) -> list[tuple[Measured, OutputError]]:
    """Those whose output error was measured, each with it."""
    return [(item, item.output_error) for item in measured if item.output_error]
