"""Sentences that captions and notes share: methods, intervals, scale, data and machine."""

from collections import Counter
from collections.abc import Collection, Iterable

from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.estimate import rounded
from value_aware_attention.records.record import Record
from value_aware_study.report.frame import Measured, Results
from value_aware_study.report.words import grouped, plain_text, plural

NOT_THE_SAME_EXPERIMENT = "Compare the order of the methods and the ratios, not the levels."
INTERVAL = (
    "95% intervals cover text and training; for one training or a pretrained model, text alone."
)
OPTIMAL = (
    "OVO keeps the r largest attention weights, renormalised; OVA is the mixture of at most r "
    "values that is nearest to the exact output."
)
BEST_FOUND = (
    "OVA is proved optimal at r = 1 and from head size + 1 on; between the two, its error is an "
    "upper bound."
)
BASELINES = (
    "OVO keys + optimal weights and OVA keys + attention weights are the two halves of the step "
    "from OVO to OVA. α|v| and CAOTE score keys by weight and value."
)
OUTPUT_ERROR = "Output error: |o − õ|² over |o|², each summed over queries, heads and layers."
DIRECTION = "Cosine of õ and o, and the length of õ over that of o, are means over layers."
MATCH = (
    "Matching keys: the fewest keys by weight (OVO) whose pooled output error is at most that of r "
    "value-aware keys (OVA). Intervals are over windows or sequences."
)
MATCH_OF_QUERIES = "Median and quartiles are over queries, each matched alone."
CONSERVATIVE = "So the counts are conservative."
DRAWS = "Random methods are means over seeds; the range over seeds stands beside."
PALE = "; pale: single trainings"
SEEDS = f"LSH and ORF are random. {DRAWS}"
NOT_JOINED = "Curves of fewer than three settings are not joined."


def keys(records: Iterable[Record], paper: int) -> str:
    """Explains that r is a number of keys, and that its share depends on the sequence length."""
    lengths = sorted({record.length for record in records})
    return (
        "r is a number of keys, not a share: our sequences have "
        f"{' and '.join(map(str, lengths)) or 'no'}, the paper's {paper}."
    )


def measured_on(record: Record) -> str:
    """Describes the text of exact attention: "5,000 masked tokens in 90 sequences"."""
    kind = "masked token" if record.task == "masked" else "target"
    return f"{plural(record.text.targets, kind)} in {plural(record.text.units, record.unit)}"


def queries_of(measured: Iterable[Measured]) -> str:
    """Describes the queries: "causal, elu: 256 queries of 8 windows in each of 4 layers"."""
    models = grouped(
        (
            f"{errors.rows:,} queries of {plural(errors.units, errors.unit)} in each of "
            f"{errors.layers} layers, {errors.keys:,} keys, heads of {errors.head_dim} dimensions, "
            f"OVA's search: {errors.search}",
            label,
        )
        for label, errors in {item.label: item.output_error for item in measured}.items()
    )
    return " ".join(f"{'; '.join(labels)}: {queries}." for queries, labels in models.items())


def machine_of(record: Record | CacheRecord) -> str:
    """Lists hardware, threads and versions, for the page's last section."""
    on = record.run_on
    versions = ", ".join(f"{name} {on.versions[name]}" for name in sorted(on.versions))
    return f"hardware: {on.hardware}, {plural(on.threads, 'thread')}; {versions}."


def machines(records: Iterable[Record]) -> list[tuple[str, str]]:
    """Returns scale and data of these records with their machine, without repetition."""
    return list(
        dict.fromkeys(
            (f"Scale {record.scale}; data: {record.text.description}", machine_of(record))
            for record in records
        )
    )


def seeds(results: Results, drawn: str = "", tasks: Iterable[str] = ("causal", "masked")) -> str:
    """States over how many trainings the numbers of our models are averaged."""
    trained = (
        record.model
        for record in results.records
        if record.task in tasks
        for _ in results.trainings_of(record)
    )
    return means(trained, drawn) or " One training of each model; intervals are over text alone."


def means(trained: Iterable[str], drawn: str = "") -> str:
    """States over how many trainings numbers are averaged; "" for one training.

    `trained` names the model of each training. `drawn` describes single trainings in a figure.
    """
    often = " or ".join(map(str, sorted({1, *Counter(trained).values()} - {1})))
    return often and (f" Means of {often} trainings, 95% intervals over text and training{drawn}.")


def not_evaluated(results: Results, expected: Collection[str]) -> list[str]:
    """Notes the expected models that were not evaluated, unless all or none are missing."""
    absent = [name for name in expected if not results.models(name)]
    return [f"Not evaluated yet: {', '.join(map(plain_text, absent))}."] * (
        0 < len(absent) < len(expected)
    )


def probed_on(record: Record) -> str:
    text, errors = record.text, record.attention[0].output_error
    rows = errors.rows // (errors.heads * errors.units)
    causal = (
        " A causal query sees only its past. All positions count alike; a query that sees no more "
        "keys than are kept is exact with either method."
    )
    return (
        f"{record.model} ({record.architecture}, {errors.layers} layers of {errors.heads} heads of "
        f"{errors.head_dim} dimensions), {record.kernel} kernel"
        f"{f', {record.bits_a_weight:.1f} bits a weight' if record.bits_a_weight else ''}; "
        f"{text.units} of {text.available_units} windows of {record.length} tokens"
        f"{', BOS first' * text.begins_with_bos}, "
        f"{rounded(100 * (text.share_read or 0), 2)}% of the text's {text.tokens:,} tokens; "
        f"{rows} queries of each head and window; OVA's search: {errors.search}."
        f"{causal if errors.causal else ''}"
    )
