"""The paper's tables, of losses, data and hyperparameters, next to ours."""

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
import pandas as pd

from value_aware_attention.records.estimate import DASH, Writer, interval, number, signed, whole
from value_aware_attention.records.record import EndMetric, Record
from value_aware_study.report import captions, charts, published
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits import pretrained
from value_aware_study.report.frame import FIRST, KERNEL_NAMES, Results, Row, mean_loss
from value_aware_study.report.words import (
    KERNEL_LABELS,
    TRAINING,
    missing,
    of_trainings,
    plain_text,
    range_over,
    setting_label,
    times,
)

CHANGE = ("difference", "difference_low", "difference_high")
MASKED_MEASURES = (
    *("value", "own_low", "own_high", *CHANGE),
    *("seeds", "seeds_low", "seeds_high", "count"),
)
"""Columns of Table 1, besides those of single trainings; own: the interval of the value itself"""
CAUSAL_LENGTH, MASKED_LENGTH = 512, 4096
"""Tokens of the paper's sequences"""
SIMILAR_SHARES = 0.02
"""Relative difference below which two shares of keys are compared as one"""
MASKED = ("masked_long", "masked_short")
RANDOM_METHODS = ("lsh", "orf")
"""Methods with all our settings in the table, and with two digits of the paper's numbers"""
ALONE = "itself alone (window 1)"
MASKED_COUNTS = {
    "unigram": "counts: most frequent token",
    "shown_token": "counts: the token shown",
    "both_neighbours": "counts: both neighbours",
    "4grams": "counts: 4-grams on both sides",
    "4grams_shown_token": "counts: 4-grams, the token shown",
}
CAUSAL_COUNTS = {
    **{name: name for name in ("unigram", "bigram", "trigram")},
    "trigram_tokens_read": "trigram, tokens read",
    "5gram": "5-gram",
    "5gram_tokens_read": "5-gram, tokens read",
}
OF_DIFFERENCE, OF_RATIO = "95% interval (±: of the difference)", "95% interval (×: of the ratio)"
"""Columns of the paired intervals; exact attention and counts have their own intervals there"""


def table_1(results: Results) -> Exhibit | None:
    """Shows the paper's rows, our other LSH and ORF, and baselines without attention."""
    if not results.models(*MASKED):
        return None
    rows = _masked_rows(results)
    return Exhibit(
        "table_1",
        "Table 1. Masked-LM error under approximate attention",
        "Masked tokens predicted wrongly, %, and in brackets the ratio to exact attention's."
        f"{captions.seeds(results, tasks=['masked'])}",
        [
            "OVO: optimal value-oblivious with r keys a query; OVA: optimal value-aware; in LSH a "
            "query sees r keys in each hash round. The paper's model is RoBERTa-4096, and "
            "RoBERTa-512 in the row of the short model; its ORF is as written in A.1. "
            f"{captions.keys(results.models('masked_long'), MASKED_LENGTH)} A row of the "
            "paper's share of keys stands beside its number for r = 65. LSH with as many keys as "
            "the sequence sees all of them.",
            f"The last rows need no attention: {ALONE} lets each token see only itself, and "
            "counts of all training tokens choose the most frequent token, the likeliest given the "
            "token shown in its place (masking leaves one token in ten as it is), the likeliest "
            "between both neighbours, and the likeliest between three tokens on each side, by "
            "Kneser-Ney 4-grams, without and with the token shown. A model that errs more than the "
            "last row has learned less than these counts.",
            f"{captions.NOT_THE_SAME_EXPERIMENT} {captions.INTERVAL} {captions.SEEDS}",
            *captions.not_evaluated(results, MASKED),
        ],
        table=Table(
            pd.DataFrame(rows).drop(columns="approximation").dropna(axis="columns", how="all"),
            list(map(_masked_text, rows)),
        ),
    )


def baselines(results: Results, model: str) -> dict[str, Row]:
    """Returns scores of count models, or of another model, on a model's targets, by name."""
    return {
        name: level({t: r.baselines[name] for t, r in trainings.items()}, record.metric)
        for record in results.models(model)
        if (trainings := results.trainings_of(record))
        for name in record.baselines
    }


def exact_of(results: Results, model: str) -> Row:
    """Returns the setting of exact attention, with its own interval; {} for no model."""
    row = results.find(model, "exact")
    for record in results.models(model):
        row |= level(
            {name: of.cells[0] for name, of in results.trainings_of(record).items()}, record.metric
        )
    return row


def level(measured: Mapping[str, EndMetric], metric: str) -> Row:
    """Averages a loss itself, not its change, over trainings, by name, with its interval."""
    losses = [(np.array(of.unit_totals), np.array(of.unit_counts)) for of in measured.values()]
    values, nats = [of.value for of in measured.values()], metric == "perplexity"
    _, low, high = (
        math.exp(end) if nats else min(max(100 * end, 0.0), 100.0)
        for end in vars(mean_loss(losses)).values()
    )
    single = {f"own_{TRAINING}{name}": of.value for name, of in measured.items()}
    return (
        {"value": (geometric_mean if nats else fmean)(values), "own_low": low, "own_high": high}
        | {"difference": fmean(of.difference for of in measured.values())}
        | {"count": measured[FIRST].count, **(single if len(single) > 1 else {})}
    )


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or missing(value) or missing(base) or not base else value / base


def beside_exact(value: float | None, share: float | None, digits: int = 1) -> str:
    """Writes "1,031.1 (× 33.8)": a value, and its ratio to exact attention's if it has one."""
    is_alone = missing(value) or missing(share)
    return f"{number(value, digits)}{'' if is_alone else f' ({times(share)})'}"


def ends(row: Row, begun: str, text: Writer = number) -> str:
    """Writes "1.0 to 2.5; seeds 1.2 to 1.4": an interval, and the range over trainings that differ.

    The names of the row's columns begin with `begun`.
    """
    of_mean = interval(row.get(f"{begun}low"), row.get(f"{begun}high"), text=text)
    seeds = f"; seeds {interval(*range_over(row, begun), text=text)}"
    return of_mean + seeds * (len({text(end, 1) for end in range_over(row, begun)}) > 1)


def sizes(record: Record | None, approximation: str, parameters: Row, length: int) -> Iterator[Row]:
    """Yields the paper's parameters, then r at the paper's share of its length if measured."""
    yield parameters
    for cell in record.cells if record else ():
        size, of = dict(cell.parameters), record.length if record else 1
        of_size = cell.approximation == approximation and size.keys() == {"r"} == parameters.keys()
        if of_size and 0 < abs(size["r"] / of / (parameters["r"] / length) - 1) < SIMILAR_SHARES:
            yield size


def _masked_rows(results: Results) -> list[Row]:
    """Lists the paper's cells and our other ones, the short model, and those without attention."""
    exact = exact_of(results, "masked_long")
    short, long = baselines(results, "masked_short"), baselines(results, "masked_long")
    frame = results.changes[results.changes["model"] == "masked_long"]
    frame = frame.rename(columns={name: f"difference_{name}" for name in of_trainings(frame)})
    frame = frame.assign(value=frame["value"] + exact.get("value", 0.0))
    rows = [
        *_approximate_rows(results, frame, exact),
        _masked_row(
            "short model, exact", published.SHORT_EXACT, exact_of(results, "masked_short"), "exact"
        ),
        _masked_row("short model, exact, same text", None, short.get("longer_text", {}), "exact"),
        _masked_row(
            ALONE, None, results.find("masked_long", "sliding_window", frame, r=1), "sliding_window"
        ),
        *(_masked_row(label, None, long.get(name, {})) for name, label in MASKED_COUNTS.items()),
    ]
    return [
        row
        | {"ratio": ratio(row["value"], exact.get("value"))}
        | {"paper_ratio": ratio(row["paper"], published.TABLE_1[0].error)}
        for row in rows
    ]


def _masked_row(label: str, paper: float | None, ours: Row, approximation: str = "") -> Row:
    """Makes a row of Table 1; with `approximation` "exact" it has no change."""
    single = [name for begun in ("own_", "difference_") for name in of_trainings(ours, begun)]
    return (
        {"method": label, "approximation": approximation, "paper": paper}
        | {name: ours.get(name) for name in (*MASKED_MEASURES, *single)}
        | (dict.fromkeys(CHANGE) if approximation == "exact" else {})
    )


def _approximate_rows(results: Results, frame: pd.DataFrame, exact: Row) -> Iterator[Row]:
    """Yields the paper's cells in its order, also at its share of keys, then our other ones."""
    random = frame[frame["approximation"].isin(RANDOM_METHODS)]
    random = random.sort_values(["approximation", "rounds", "r", "features"])
    others = {setting_label(row): row for row in random.to_dict("records")}
    record = next(iter(results.models("masked_long")), None)
    for cell in published.TABLE_1:
        name, paper = cell.approximation, dict(cell.parameters)
        for size in sizes(record, name, paper, MASKED_LENGTH):
            label = setting_label({"approximation": name, **size})
            ours = results.find("masked_long", name, frame, **size) if size else exact
            share = ", the paper's share of keys" * (size != paper)
            yield _masked_row(f"{label}{share}", cell.error, ours, name)
            others.pop(label, None)
    for label, row in others.items():
        yield _masked_row(label, None, row, row["approximation"])


def _masked_text(row: Row) -> dict[str, str]:
    draws = f"{interval(row['seeds_low'], row['seeds_high'])} ({row['seeds']})"
    value, change = ends(row, "own_"), ends(row, "difference_", signed)
    return {
        "method": row["method"],
        "ours (× exact)": beside_exact(row["value"], row["ratio"]),
        "paper (× exact)": beside_exact(
            row["paper"], row["paper_ratio"], 2 if row["approximation"] in RANDOM_METHODS else 1
        ),
        "change from exact, points": signed(row["difference"]),
        OF_DIFFERENCE: change if value == DASH else value,
        "range over draws (number)": draws if (row["seeds"] or 1) > 1 else DASH,
    }


TRAINED_WITH_EACH = (
    "Ours are trained with each kernel, then evaluated with their attention replaced. "
    f"Rows that need no attention: {ALONE} lets each token see only itself; n-grams are counts of "
    "all training tokens, or of the tokens that the model read, smoothed by modified Kneser-Ney "
    "(Chen and Goodman, 1998). A model above the 5-gram of the tokens read has learned less than "
    "these counts."
)


def table_2(results: Results) -> Exhibit | None:
    """Shows the columns of the paper's table as rows, by kernel; None without causal models."""
    if not results.causal:
        return None
    models = [model for kernel in KERNEL_NAMES if (model := results.of_kernel(kernel))]
    trained = [
        row
        for kernel in KERNEL_NAMES
        if models
        for row in _causal_rows(results, kernel, results.of_kernel(kernel))
    ]
    decoders = [record for record in results.causal if not record.scale]
    others = [
        row
        for record in decoders
        for row in _causal_rows(results, str(record.kernel), record)
        if row["value"]
    ]
    rows = [*trained, *others, *_counting_rows(results)]
    return Exhibit(
        "table_2",
        "Table 2. Perplexity under approximate attention, for each kernel",
        "Perplexity, and in brackets its ratio to exact attention's: compare the ratios."
        f"{captions.seeds(results, tasks=['causal'])}",
        [
            "The paper's models have 156M parameters and were trained on WikiText-103. "
            f"{captions.keys(models or decoders, CAUSAL_LENGTH)} In brackets the share of the "
            "length; where the paper's number of keys is another share, a row has its share too.",
            *([TRAINED_WITH_EACH] if models else []),
            *([pretrained.TEXT_NOTE] if decoders else []),
            f"{captions.NOT_THE_SAME_EXPERIMENT} {captions.INTERVAL}",
            *captions.not_evaluated(results, [f"causal_{kernel}" for kernel in KERNEL_NAMES]),
        ],
        table=Table(
            pd.DataFrame(rows).dropna(axis="columns", how="all"),
            list(map(_causal_text, rows)),
            grouped=True,
        ),
    )


def _causal_rows(results: Results, kernel: str, record: Record | None) -> Iterator[Row]:
    """Yields the paper's perplexity and ours by column for a kernel; None if missing."""
    name, model = (record.model, not record.scale and record.model) if record else ("", "")
    columns, exact = (
        (*published.TABLE_2_COLUMNS, (ALONE, "sliding_window", 1)),
        exact_of(results, name),
    )
    paper = dict(zip((column for column, _, _ in columns), published.TABLE_2[kernel], strict=False))
    for column, approximation, r in columns:
        first: Row = {} if r is None else {"r": r}
        for size in sizes(record, approximation, first, CAUSAL_LENGTH):
            cell = results.find(name, approximation, **size) if size else exact
            change = results.find(name, approximation, results.changes, **size) if size else {}
            levels = ("value", "count", "own_low", "own_high", *of_trainings(cell, "own_"))
            added = [end for end in (*charts.END_COLUMNS, *of_trainings(change)) if end in change]
            yield (
                {"model": model or "trained here", "kernel": kernel}
                | {"column": column if size == first else f"{column[:3]}-{size['r']}"}
                | size
                | {"share": cell.get("share"), "paper": paper.get(column)}
                | (
                    {"paper_r": r, "paper_share": 100 * r / CAUSAL_LENGTH}
                    if r and column in paper
                    else {}
                )
                | {"paper_ratio": ratio(paper.get(column), paper["exact"])}
                | {end: cell.get(end) for end in levels}
                | {"ratio": ratio(cell.get("value"), exact.get("value"))}
                | {f"ratio_{end}": math.exp(change[end]) for end in added}
            )


def _counting_rows(results: Results) -> list[Row]:
    """Lists the count models, the same for every kernel: they share text and targets."""
    counts: dict[str, Row] = {}
    for record in results.causal:
        counts = baselines(results, record.model) | counts
    return [
        {"model": "counts", "kernel": "", "column": label}
        | {end: counts[name][end] for end in counts[name] if end not in CHANGE}
        for name, label in CAUSAL_COUNTS.items()
        if name in counts
    ]


def _causal_text(row: Row) -> dict[str, str]:
    value, change = ends(row, "own_"), ends(row, "ratio_", lambda end, _: times(end))
    kernel = KERNEL_LABELS.get(row["kernel"], row["kernel"])
    keys, its_keys = (
        DASH if missing(row.get(r)) else f"{row[r]:.0f} ({number(row[share])}%)"
        for r, share in (("r", "share"), ("paper_r", "paper_share"))
    )
    return {
        "model and kernel": ", ".join(filter(None, [row["model"], kernel])),
        "attention": row["column"],
        "keys (share)": keys,
        "measured (× exact)": beside_exact(row["value"], row.get("ratio")),
        OF_RATIO: change if value == DASH else value,
        "paper (× exact)": beside_exact(row.get("paper"), row.get("paper_ratio")),
        "its keys (share)": its_keys,
    }


def table_3(tokens: Row) -> Exhibit:
    """Shows one row per source, ours and the paper's: all, training and evaluation tokens."""
    sources, types = tokens.get("sources", {}), tokens.get("vocabulary_size")
    sizes = ("all", "training", "evaluation")
    counts = [
        *("training_documents", "evaluation_documents"),
        *("training_instances", "evaluation_instances"),
    ]
    data = pd.DataFrame(
        [
            *(_source_row(name, splits) for name, splits in sorted(sources.items())),
            *(
                {"whose": "paper"} | dict(zip(("corpus", *sizes), row, strict=True))
                for row in published.TABLE_3
            ),
        ],
        columns=["whose", "corpus", *sizes, *counts, "copied"],
    )
    display = data[["whose", "corpus"]].assign(
        **{f"{name} tokens": [tokens_count(count) for count in data[name]] for name in sizes},
        **{name.replace("_", " "): [whole(count) for count in data[name]] for name in counts},
        **{"copied words, %": [number(100 * share) for share in data["copied"].astype(float)]},
    )
    held = [splits.get("evaluation", {}) for splits in sources.values()]
    words, copied = (
        sum(split.get(name, 0) for split in held) for name in ("words", "copied_words")
    )
    return Exhibit(
        "table_3",
        "Table 3. Tokens of the training text",
        "Ours beside the paper's.",
        [
            "All: tokens of the source in training, validation and evaluation text together. "
            "Training and evaluation: tokens in the instances of the masked language models, a "
            "dash where they do not use the source. Copied: words of the evaluation text that lie "
            "in a 13-gram of the training text of any source"
            f"{f', {100 * copied / words:.1f}% in all' if words else ''}. Our vocabulary: "
            f"{'not recorded' if types is None else f'{types:,} types'}. The paper prints more "
            "training tokens than tokens for PubMed."
        ],
        table=Table(data, display),
        folded=True,
    )


def tokens_count(value: float | None) -> str:
    """Writes a count of tokens as the paper prints it: 1.53B, 1.02M, 482K."""
    if value is None or missing(value):
        return DASH
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(int(value))


def _source_row(name: str, splits: Mapping[str, Mapping[str, int]]) -> Row:
    row: Row = {"whose": "ours", "corpus": name}
    totals = [split["tokens"] for split in splits.values() if split.get("tokens") is not None]
    row["all"] = sum(totals) if totals else None
    for label, split in (("training", "train"), ("evaluation", "evaluation")):
        counts = splits.get(split, {})
        row[label] = counts.get("instance_tokens")
        row[f"{label}_documents"] = counts.get("documents")
        row[f"{label}_instances"] = counts.get("instances")
    words = splits.get("evaluation", {}).get("words")
    return row | {"copied": splits["evaluation"]["copied_words"] / words if words else None}


MASKED_ROWS = {
    "initialisation": "initialisation (init)",
    "instances": "training instances (INS)",
    "batch_size": "instances in a batch (BSZ)",
    "instance_length": "instance size (ISZ)",
    "length": "sequence length (SQL)",
    "learning_rate": "learning rate (LR)",
    "warmup_proportion": "linear warm-up, proportion (WRM)",
    "epochs": "epochs (EP)",
    "steps": "optimizer steps (STP)",
    "gradient_accumulation": "gradient accumulation (GAC)",
    "block_positions": "block part of the positions (POSq)",
    "dropout": "dropout",
    "optimizer": "optimizer",
    "beta_1": "β₁",
    "beta_2": "β₂",
    "momentum": "momentum (Muon)",
    "adamw_rate": "AdamW's learning rate, in parts of Muon's",
    "weight_decay": "weight decay",
    "max_grad_norm": "largest gradient norm",
    "seed": "seed",
    "schedule": "learning-rate schedule",
    "layers": "layers",
    "width": "hidden size",
    "heads": "heads",
    "feedforward": "feed-forward size",
    "block": "positions of the initial model (block)",
    "vocabulary_size": "vocabulary",
    "parameters": "parameters",
}
"""Names of hyperparameters in Table 4, with the paper's abbreviations"""
CAUSAL_ROWS = {
    "data": "data",
    "layers": "decoder layers",
    "width": "hidden size",
    "heads": "heads",
    "head_dim": "head size",
    "feedforward": "feed-forward size",
    "vocabulary_size": "vocabulary",
    "parameters": "parameters",
    "training_examples": "training examples",
    "length": "sequence length",
    "batch_size": "batch size",
    "epochs": "epochs",
    "steps": "optimizer steps",
    "learning_rate": "learning rate",
    "schedule": "learning-rate schedule",
    "warmup_steps": "warm-up steps",
    "optimizer": "optimizer",
    "beta_1": "β₁",
    "beta_2": "β₂",
    "momentum": "momentum (Muon)",
    "adamw_rate": "AdamW's learning rate, in parts of Muon's",
    "weight_decay": "weight decay",
    "max_grad_norm": "largest gradient norm",
    "dropout": "dropout",
    "context": "least context in evaluation",
    "seed": "seed",
}


def table_4(training: Mapping[str, Row]) -> list[Exhibit]:
    """Shows the masked models, and the causal ones, ours next to the paper's."""
    short, long = (_hyperparameters(training, f"masked_{name}") for name in ("short", "long"))
    causal = {
        f"ours, {kernel}": _hyperparameters(training, f"causal_{kernel}") for kernel in KERNEL_NAMES
    }
    causal = {name: settings for name, settings in causal.items() if settings}
    exhibits = [
        Exhibit(
            "table_4",
            "Table 4. Hyperparameters of the masked language models",
            "Ours beside the paper's.",
            [
                f"A {DASH} means: not stated, or not recorded. Our instances and batches count "
                "sequences of the model's full length (SQL), the paper's count instances of 512 "
                "tokens. The paper's numbers do not quite agree with each other: 2 epochs of 10M "
                "instances in batches of 8 are 2.5M steps, while 2.476M steps are 2 epochs of "
                "9.904M instances. The paper does not say whether its largest gradient norm is of "
                "the whole gradient or of each parameter; Bert-Adam's own clipping, which we use, "
                "is of each parameter."
            ],
            table=_settings(
                MASKED_ROWS,
                {"paper, RoBERTa-512": published.TABLE_4_SHORT, "ours, short": short}
                | {"paper, RoBERTa-4096": published.TABLE_4_LONG, "ours, long": long},
            ),
            folded=True,
        ),
        Exhibit(
            "table_4_causal",
            "Table 4, continued. Hyperparameters of the causal language models",
            "Ours beside the paper's.",
            [
                f"The paper's section A.2. A {DASH} means: not stated, or not recorded. The "
                "paper's 1,801,350 training examples are the lines of WikiText-103's training "
                "file, not blocks of 512 tokens."
            ],
            table=_settings(CAUSAL_ROWS, {"paper": published.CAUSAL_SETTINGS, **causal}),
            folded=True,
        ),
    ]
    return exhibits[: 1 + bool(causal)]


def _hyperparameters(training: Mapping[str, Row], model: str) -> Row:
    """Collects a model's hyperparameters, its size and steps, and the seeds of its trainings."""
    trainings = model_trainings(training, model)
    first = trainings.get(FIRST, {})
    settings = [metrics.get("hyperparameters", {}) for metrics in trainings.values()] or [{}]
    seeds = [values["seed"] for values in settings if "seed" in values]
    values = (
        {name: first.get(name) for name in ("parameters", "steps")}
        | settings[0]
        | ({"seed": ", ".join(map(str, seeds))} if len(seeds) > 1 else {})
    )
    return {name: value for name, value in values.items() if value is not None}


def model_trainings(training: Mapping[str, Row], model: str) -> dict[str, Row]:
    """Maps the names of a model's trainings to their measurements, starting with the first."""
    names = (name for name in sorted(training) if f"{name}_".startswith(f"{model}_"))
    return {name.removeprefix(model).strip("_") or FIRST: training[name] for name in names}


def _settings(rows: Mapping[str, str], columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """Tabulates hyperparameters by model; keys without a row of their own get rows at the end."""
    present = {key for settings in columns.values() for key in settings}
    labels = {key: label for key, label in rows.items() if key in present} | {
        key: key.replace("_", " ") for key in sorted(present - set(rows))
    }
    return Table(
        pd.DataFrame(
            [
                {"hyperparameter": key}
                | {name: values.get(key) for name, values in columns.items()}
                for key in labels
            ],
            dtype=object,
        ),
        [
            {"hyperparameter": label}
            | {name: setting_value(values.get(key)) for name, values in columns.items()}
            for key, label in labels.items()
        ],
    )


def setting_value(value: Any) -> str:
    """Writes a hyperparameter as text, with flags as y and n like Table 4."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else plain_text(str(value))
