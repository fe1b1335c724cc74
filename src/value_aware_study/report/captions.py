"""Sentences that captions and notes share: methods, intervals, scale, data and machine."""

from collections import Counter
from collections.abc import Collection, Iterable

from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.estimate import rounded
from value_aware_attention.records.record import Record
from value_aware_study.report.frame import Measured, Results
from value_aware_study.report.words import grouped, plain_text, plural

NOT_THE_SAME_EXPERIMENT = (
    "Ours and the paper's are different models on different text: compare the order of the "
    "methods and the distances between them, not the levels."
)
INTERVAL = (
    "Intervals are 95% intervals, paired with exact attention on the same text where they are of a "
    "change from it. Of the mean of several trainings (of perplexities geometric, of all else "
    "arithmetic) they cover text and training, as the claims' do; of one training, or of a "
    "pretrained model, the choice of evaluation text alone."
)
OPTIMAL = (
    "OVO keeps the r largest attention weights, renormalised; OVA is the convex combination of at "
    "most r values closest to the exact output."
)
BEST_FOUND = (
    "OVA is proved optimal at r = 1 and from r = d + 1 on (d: the head size); between, it is best "
    "found, an upper bound on the optimal error."
)
BASELINES = (
    "OVO keys + optimal weights and OVA keys + attention weights are the two halves of the step: "
    "only the weights, or only the keys (added greedily), are chosen for the output. α|v|, 2-norm "
    "(Kobayashi et al., 2020) or 1-norm (VATP), and CAOTE choose keys by a score of weight and "
    "value and renormalise the weights."
)
OUTPUT_ERROR = (
    "Relative output error: the sum of |o − õ|² over queries, heads and layers, divided by that of "
    "|o|²; its 95% interval is over the recorded windows or sequences (Student's t)."
)
DIRECTION = (
    "Cosine of õ and o: the mean over queries and heads; length: the root of the sum of |õ|² in "
    "parts of that of |o|²; both averaged over layers. An output that is too long errs in square "
    "although the layer norm behind attention forgives its length: then the cosine says more."
)
MATCH = (
    "The number of keys by weight (OVO) that match r value-aware keys (OVA) is the smallest number "
    "whose output error is at most theirs. Errors are pooled: |o − õ|² is summed over queries, "
    "heads and layers. The 95% interval is over windows or sequences: the numbers of keys "
    "at which the paired difference of the two errors may be zero (Student's t test, inverted)."
)
MATCH_OF_QUERIES = (
    "Median and quartiles are over queries, each matched by itself: the fewest keys by weight "
    "whose error for that query is at most that of its r value-aware keys."
)
CONSERVATIVE = "As OVA's error is an upper bound on the optimal one, the counts are conservative."
DRAWS = (
    "Random methods: means over the draws of their seeds, which the interval does not cover; the "
    "range over these seeds is given apart."
)
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


def recorded_on(records: Iterable[Record]) -> str:
    """Counts the units, a part of all, that output errors and skewness were measured on."""
    models = grouped(
        (plural(units, record.unit), plain_text(record.model))
        for record in records
        if (units := record.text.recorded_units) is not None
    )
    if not models:
        return "On how many windows or sequences was not recorded."
    parts = (f"{count} ({', '.join(names)})" for count, names in models.items())
    return f"Measured on {' and '.join(parts)}, evenly spaced over those of the evaluation."


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


def ours(records: Iterable[Record]) -> str:
    """Describes scale and data of our numbers once, then each model's sizes."""
    models = grouped(
        (
            f"{record.scale} scale; data: {record.text.description}",
            f"{plain_text(record.model)}: {record.length} tokens, heads of {record.head_dim} "
            f"dimensions, {measured_on(record)}",
        )
        for record in records
    )
    return (
        " ".join(f"Ours: {setting} ({'; '.join(names)})." for setting, names in models.items())
        or "No model of this kind was evaluated."
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
        " A causal query sees its past alone: rows at all positions count alike, and one that sees "
        "no more keys than are kept is exact with either method."
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
