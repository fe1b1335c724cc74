"""What every caption says: scale, data, hardware, and on how much the numbers were measured."""

from collections.abc import Iterable

from value_aware_attention.reporting.records import Record

NOT_THE_SAME_EXPERIMENT = (
    "Ours and the paper's are different models on different data: compare the order of the "
    "methods and the distances between them, not the levels."
)
INTERVAL = (
    "Intervals are paired 95% intervals of the change from exact attention on the same evaluation "
    "text, added to the exact value; they cover the choice of evaluation text, not of training run."
)
SEEDS = "Random methods are means over seeds."
NO_RECORDS = "No model of this kind was evaluated."


def _plural(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def measured_on(record: Record) -> str:
    """"5,000 masked tokens in 90 sequences"."""
    run_on = record.get("run_on", {})
    kind = "masked token" if record["task"] == "masked" else "target"
    parts = []
    if run_on.get("targets") is not None:
        parts.append(_plural(run_on["targets"], kind))
    if run_on.get("evaluation_units") is not None:
        parts.append(_plural(run_on["evaluation_units"], record["unit"]))
    return " in ".join(parts) or "an unrecorded amount of text"


def run_on(record: Record) -> str:
    """One sentence: scale, length, head size, data, size of the evaluation, hardware, versions."""
    facts = record.get("run_on", {})
    versions = facts.get("versions", {})
    software = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    parts = [
        f"{record['scale']} scale",
        f"sequences of {record['length']} tokens",
        f"heads of {record['head_dim']} dimensions",
        f"measured on {measured_on(record)}",
        f"data: {facts.get('data', 'not recorded')}",
        f"run on {facts.get('hardware', 'unrecorded hardware')}",
    ]
    return "; ".join([*parts, software] if software else parts) + "."


def ours(records: Iterable[Record]) -> str:
    """The facts of `run_on` for a figure or table about several models, each said once."""
    sentences = list(dict.fromkeys(run_on(record) for record in records))
    return " ".join(f"Ours: {sentence}" for sentence in sentences) or NO_RECORDS
