"""The paper's Tables 1 to 4, with our numbers beside the published ones."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from value_aware_attention.measurement.record import EndMetric, estimate
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.published import (
    CAUSAL_SETTINGS,
    SHORT_EXACT,
    TABLE_1,
    TABLE_2,
    TABLE_2_COLUMNS,
    TABLE_3,
    TABLE_4_LONG,
    TABLE_4_SHORT,
)
from value_aware_study.report.results import KERNELS, RANGE, Results
from value_aware_study.report.words import (
    DASH,
    KERNEL_LABELS,
    interval,
    missing,
    number,
    ratio,
    setting_label,
    setting_value,
    signed,
    times,
    tokens_count,
    whole,
)

ENDS = ("low", "high")
OWN = ("own_low", "own_high", "own_trained_low", "own_trained_high")
"""Columns of the interval over units of the value itself, and of its range over trainings"""
CHANGE = tuple(f"difference{end}" for end in ("", "_low", "_high", "_trained_low", "_trained_high"))
MASKED_MEASURES = ("value", *OWN, *CHANGE, "seeds", "seeds_low", "seeds_high", "count")
MASKED = ("masked_long", "masked_short")
RANDOM = ("lsh", "orf")
"""Methods of which all our settings are shown, and two digits of the paper's numbers."""
ALONE = "itself alone (window 1)"
MASKED_COUNTS = {
    "unigram": "counts: most frequent token",
    "shown_token": "counts: the token shown",
    "both_neighbours": "counts: both neighbours",
    "4grams": "counts: 4-grams on both sides",
    "4grams_shown_token": "counts: 4-grams, the token shown",
}
MASKED_BESIDE = (
    f"The last rows need no attention: {ALONE} lets each token see nothing else, and counts of all "
    "training tokens choose the most frequent token, the likeliest given the token shown in its "
    "place (masking leaves one token in ten as it is), the likeliest between both neighbours, and "
    "the likeliest between three tokens on each side, by Kneser-Ney 4-grams, without and with the "
    "token shown. A model that errs more than the last row has learned less than these counts."
)
CAUSAL_COUNTS = {
    **{name: name for name in ("unigram", "bigram", "trigram")},
    "trigram_tokens_read": "trigram, tokens read",
    "5gram": "5-gram",
    "5gram_tokens_read": "5-gram, tokens read",
}
OF_DIFFERENCE, OF_RATIO = "95% interval (±: of the difference)", "95% interval (×: of the ratio)"
"""Columns of the paired intervals; exact attention and counts have their own there"""
COUNTING = "counts"
"""Stands for a kernel in the rows of Table 2 that need none"""
CAUSAL_BESIDE = (
    f"The last rows need no attention: {ALONE} lets each token see nothing else; "
    "n-grams are counts of all training tokens, or of the tokens that the model read, smoothed by "
    "modified Kneser-Ney (Chen and Goodman, 1998). A model above the 5-gram of the tokens read has "
    "learned less than these counts."
)
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
"""Names of hyperparameters in Table 4, with the paper's abbreviations."""
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

Column = tuple[str, Mapping[str, Any]]
Row = dict[str, Any]


def table_1(results: Results) -> Exhibit | None:
    """Shows the paper's rows, our other LSH and ORF, and baselines without attention."""
    models = results.models(*MASKED)
    if not models:
        return None
    exact = exact_of(results, "masked_long")
    rows = [
        *_approximate_rows(results, exact),
        _masked_row("short model, exact", SHORT_EXACT, exact_of(results, "masked_short"), "exact"),
        *_without_attention(results),
    ]
    for row in rows:
        row["ratio"] = ratio(row["value"], exact.get("value"))
        row["paper_ratio"] = ratio(row["paper"], TABLE_1[0].error)
    return Exhibit(
        "table_1",
        "Table 1. Masked-LM error under approximate attention",
        "Masked tokens predicted wrongly, %, and in brackets the ratio to exact attention's."
        f"{captions.seeds(results, tasks=['masked'])}",
        [
            "OVO: optimal value-oblivious with r keys a query; OVA: optimal value-aware; in LSH a "
            "query sees r keys in each hash round. The paper's model is RoBERTa-4096, and "
            "RoBERTa-512 in the row of the short model; its ORF is ours as written in A.1. "
            f"{captions.keys(results.models('masked_long'), 4096)} LSH with as many keys as the "
            "sequence sees all of them.",
            MASKED_BESIDE,
            *_worse_than_no_text(rows),
            f"{captions.NOT_THE_SAME_EXPERIMENT} {captions.INTERVAL} {captions.SEEDS}",
            *captions.not_evaluated(results, MASKED),
        ],
        table=Table(
            pd.DataFrame(rows).drop(columns="approximation").dropna(axis="columns", how="all"),
            pd.DataFrame(list(map(_masked_text, rows))),
        ),
    )


def baselines(results: Results, model: str) -> dict[str, Row]:
    """Returns scores of count models, or of another model, on the targets of a model, by name."""
    return {
        name: vars(one) | own_interval(one, m.metric)
        for m in results.models(model)
        for name, one in m.baselines.items()
    }


def exact_of(results: Results, model: str) -> Row:
    """Returns the setting of exact attention, with its own interval; {} for no model."""
    found = results.find(model, "exact")
    found |= {f"own_{end}": found[end] for end in RANGE if end in found}
    for record in results.models(model):
        found |= own_interval(record.cells[0], record.metric)
    return found


def own_interval(one: EndMetric, metric: str) -> Row:
    """Computes the 95% interval over units of a mean loss, not of its change from another."""
    totals, counts = np.array(one.unit_totals), np.array(one.unit_counts)
    if metric == "perplexity":
        own = estimate(totals, counts)
        return {f"own_{end}": math.exp(x) for end in ENDS if (x := getattr(own, end)) is not None}
    own = estimate(100 * totals, counts, least=0.0, most=100.0)
    return {"own_low": own.low, "own_high": own.high}


def beside_exact(value: Any, share: Any, digits: int = 1) -> str:
    """Writes "1,031.1 (× 33.8)": a value, and its ratio to exact attention's where it has one."""
    beside = "" if missing(value) or missing(share) else f" ({times(share)})"
    return f"{number(value, digits)}{beside}"


def ends(row: Row, begun: str, text: Callable[..., str] = number) -> str:
    """Writes "1.0 to 2.5; seeds 1.2 to 1.4": an interval, with the range over trainings if known.

    `begun` begins the names of the row's columns.
    """
    own, seeds = (
        interval(row.get(f"{name}low"), row.get(f"{name}high"), text=text)
        for name in (begun, f"{begun}trained_")
    )
    return own if seeds == DASH else f"{own}; seeds {seeds}"


def _masked_row(label: str, paper: float | None, ours: Row, approximation: str = "") -> Row:
    """Makes a row of Table 1; with `approximation` "exact" it has no change."""
    row = {"method": label, "approximation": approximation, "paper": paper}
    row |= {name: ours.get(name) for name in MASKED_MEASURES}
    return row | (dict.fromkeys(CHANGE) if approximation == "exact" else {})


def _without_attention(results: Results) -> list[Row]:
    """Lists the short model on the same text, itself alone, and count models."""
    short, long = baselines(results, "masked_short"), baselines(results, "masked_long")
    on_long = short.get("longer_text", {})
    alone = results.find("masked_long", "sliding_window", r=1)
    return [
        _masked_row("short model, exact, same text", None, on_long, "exact"),
        _masked_row(ALONE, None, alone, "sliding_window"),
        *(_masked_row(label, None, long.get(name, {})) for name, label in MASKED_COUNTS.items()),
    ]


def _approximate_rows(results: Results, exact: Row) -> list[Row]:
    """Returns the paper's cells in the paper's order, then our other LSH and ORF cells.

    Ranges over trainings are of the change from exact attention, and of its own value.
    """
    rows, frame = [], results.changes[results.changes["model"] == "masked_long"]
    frame = frame.assign(value=frame["value"] + exact.get("value", 0.0))
    frame = frame.rename(columns={end: f"difference_{end}" for end in RANGE})
    for cell in TABLE_1:
        ours = results.find("masked_long", cell.approximation, frame, **cell.parameters)
        label = setting_label({"approximation": cell.approximation, **cell.parameters})
        ours = exact if cell.approximation == "exact" else ours
        rows.append(_masked_row(label, cell.error, ours, cell.approximation))
    shown, random = {row["method"] for row in rows}, frame[frame["approximation"].isin(RANDOM)]
    ordered = random.sort_values(["approximation", "rounds", "r", "features"])
    for ours in ordered.to_dict("records"):
        if (label := setting_label(ours)) not in shown:
            rows.append(_masked_row(label, None, ours, ours["approximation"]))
    return rows


def _worse_than_no_text(rows: Sequence[Row]) -> list[str]:
    """Names the ORF that errs more than the most frequent token, where exact attention does not."""
    value = {row["method"]: row["value"] for row in rows}
    least = value.get(MASKED_COUNTS["unigram"])
    orf = (row["method"] for row in rows if row["approximation"] == "orf")
    if least is None or (value["exact"] or 0.0) >= least:
        return []
    worse = [name for name in orf if (value[name] or 0.0) > least]
    named = ", ".join(f"{name} ({number(value[name])})" for name in worse)
    return worse and [
        f"More often wrong than the most frequent token alone ({number(least)}): {named}. The "
        "layers after such attention meet outputs that training never showed them (docs/methods)."
    ]


def _masked_text(row: Row) -> dict[str, str]:
    several = row["seeds"] is not None and row["seeds"] > 1
    draws = f"{interval(row['seeds_low'], row['seeds_high'])} ({row['seeds']})"
    digits = 2 if row["approximation"] in RANDOM else 1
    of_change = ends(row, "difference_", signed)
    return {
        "method": row["method"],
        "ours (× exact)": beside_exact(row["value"], row["ratio"]),
        "paper (× exact)": beside_exact(row["paper"], row["paper_ratio"], digits),
        "change from exact, points": signed(row["difference"]),
        OF_DIFFERENCE: own if (own := ends(row, "own_")) != DASH else of_change,
        "range over draws (number)": draws if several else DASH,
    }


def table_2(results: Results) -> Exhibit | None:
    """Shows the columns of the paper's table as rows, by kernel; None without causal models."""
    if not results.causal:
        return None
    rows = [row for kernel in KERNELS for row in _causal_rows(results, kernel)]
    rows += _counting_rows(results)
    models = [model for kernel in KERNELS if (model := results.of_kernel(kernel))]
    return Exhibit(
        "table_2",
        "Table 2. Perplexity under approximate attention, for each kernel",
        "Perplexity, and in brackets its ratio to exact attention's: compare the ratios."
        f"{captions.seeds(results, tasks=['causal'])}",
        [
            "One model trained with each kernel, then evaluated with its attention replaced. The "
            "paper's models have 156M parameters and were trained on WikiText-103. "
            f"{captions.keys(models, 512)}",
            CAUSAL_BESIDE,
            *_worse_than_alone(rows),
            f"{captions.NOT_THE_SAME_EXPERIMENT} {captions.INTERVAL}",
            *captions.not_evaluated(results, [f"causal_{kernel}" for kernel in KERNELS]),
        ],
        table=Table(
            pd.DataFrame(rows).dropna(axis="columns", how="all"),
            pd.DataFrame(list(map(_causal_text, rows))),
        ),
    )


def _causal_rows(results: Results, kernel: str) -> Iterator[Row]:
    """Yields the paper's perplexity and ours by column for a kernel, None for missing ones."""
    model = results.of_kernel(kernel)
    name = model.model if model else ""
    paper = dict(zip((column for column, _, _ in TABLE_2_COLUMNS), TABLE_2[kernel], strict=True))
    ours, changes = _causal_cells(results, name), _causal_cells(results, name, results.changes)
    exact = ours["exact"] = exact_of(results, name)
    for column, cell in ours.items():
        change = {} if column == "exact" else changes[column]
        logs = {f"ratio_{end}": change[end] for end in (*ENDS, *RANGE) if end in change}
        yield (
            {"kernel": kernel, "column": column, "paper": paper.get(column)}
            | {end: cell.get(end) for end in ("value", "count", *OWN)}
            | {"ratio": ratio(cell.get("value"), exact.get("value"))}
            | {name: math.exp(end) for name, end in logs.items()}
            | {"paper_ratio": ratio(paper.get(column), paper["exact"])}
        )


def _counting_rows(results: Results) -> list[Row]:
    """Lists the count models, which are those of every kernel: the same text and targets."""
    counts: dict[str, Row] = {}
    for record in results.causal:
        counts = baselines(results, record.model) | counts
    return [
        {"kernel": COUNTING, "column": label}
        | {end: counts[name].get(end) for end in ("value", "count", *OWN)}
        for name, label in CAUSAL_COUNTS.items()
        if name in counts
    ]


def _worse_than_alone(rows: Sequence[Row]) -> list[str]:
    """Names the kernels where one key by weight loses more than a token that sees itself alone."""
    value = {(row["kernel"], row["column"]): row.get("value") for row in rows}
    pairs = ((kernel, value[kernel, "OVO-1"], value[kernel, ALONE]) for kernel in KERNELS)
    worse = [
        f"{kernel} ({number(one)} against {number(alone)})"
        for kernel, one, alone in pairs
        if one is not None and alone is not None and one > alone
    ]
    return worse and [
        "The one key of most weight (OVO-1) loses more than a token that sees itself alone with "
        f"{', '.join(worse)}: it puts the whole weight on another token, which in flat attention "
        "has little (docs/methods)."
    ]


def _causal_cells(
    results: Results, model: str, among: pd.DataFrame | None = None
) -> dict[str, Row]:
    """Returns the setting of every column, by its name."""
    columns = [*TABLE_2_COLUMNS, (ALONE, "sliding_window", 1)]
    return {
        column: results.find(model, approximation, among, **({} if r is None else {"r": r}))
        for column, approximation, r in columns
    }


def _causal_text(row: Row) -> dict[str, str]:
    of_ratio = ends(row, "ratio_", lambda value, _: times(value))
    return {
        "kernel": KERNEL_LABELS.get(row["kernel"], row["kernel"]),
        "attention": row["column"],
        "ours (× exact)": beside_exact(row["value"], row.get("ratio")),
        "paper (× exact)": beside_exact(row.get("paper"), row.get("paper_ratio")),
        OF_RATIO: own if (own := ends(row, "own_")) != DASH else of_ratio,
    }


def table_3(tokens: Mapping[str, Any]) -> Exhibit:
    """Shows one row a source, ours and the paper's: all, training and evaluation tokens."""
    ours = [_source_row(name, parts) for name, parts in sorted(tokens.get("sources", {}).items())]
    paper = [
        {"whose": "paper", "corpus": name, "all": all_, "training": train, "evaluation": held}
        for name, all_, train, held in TABLE_3
    ]
    head = ["whose", "corpus", "all", "training", "evaluation"]
    counts = ["training_documents", "evaluation_documents", "training_instances"]
    columns = [*head, *counts, "evaluation_instances", "copied"]
    data = pd.DataFrame([*ours, *paper], columns=columns)
    display = data[["whose", "corpus"]].copy()
    for name in ("all", "training", "evaluation"):
        display[f"{name} tokens"] = [tokens_count(value) for value in data[name]]
    for name in (*counts, "evaluation_instances"):
        display[name.replace("_", " ")] = [whole(value) for value in data[name]]
    display["copied words, %"] = [
        DASH if pd.isna(value) else f"{100 * value:.1f}" for value in data["copied"]
    ]
    return Exhibit(
        "table_3",
        "Table 3. Tokens of the training text",
        "Ours beside the paper's.",
        [
            "All: tokens of the source in training, validation and evaluation text together. "
            "Training and evaluation: tokens in the instances of the masked language models, a "
            "dash where they do not use the source. Copied: words of the evaluation text that lie "
            f"in a 13-gram of the training text of any source{_copied(tokens)}. Our vocabulary: "
            f"{_vocabulary(tokens)}. The paper prints more training tokens than tokens for PubMed."
        ],
        table=Table(data, display),
        folded=True,
    )


def _copied(tokens: Mapping[str, Any]) -> str:
    """Computes the share over all sources, where it was counted."""
    counts = [parts.get("evaluation", {}) for parts in tokens.get("sources", {}).values()]
    words = sum(part.get("words", 0) for part in counts)
    copied = sum(part.get("copied_words", 0) for part in counts)
    return f", {100 * copied / words:.1f}% in all" if words else ""


def _vocabulary(tokens: Mapping[str, Any]) -> str:
    size = tokens.get("vocabulary_size")
    return "not recorded" if size is None else f"{size:,} types"


def _source_row(name: str, parts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    row: dict[str, Any] = {"whose": "ours", "corpus": name}
    totals = [part["tokens"] for part in parts.values() if part.get("tokens") is not None]
    row["all"] = sum(totals) if totals else None
    for label, split in (("training", "train"), ("evaluation", "evaluation")):
        part = parts.get(split, {})
        row[label] = part.get("instance_tokens")
        row[f"{label}_documents"] = part.get("documents")
        row[f"{label}_instances"] = part.get("instances")
    words = parts.get("evaluation", {}).get("words")
    row["copied"] = parts["evaluation"]["copied_words"] / words if words else None
    return row


def _hyperparameters(training: Mapping[str, Mapping[str, Any]], model: str) -> dict[str, Any]:
    """Collects a model's hyperparameters, its size and steps, and the seeds of its trainings."""
    metrics = training.get(model, {})
    again = (training[name] for name in sorted(training) if name.startswith(f"{model}_"))
    settings = [one.get("hyperparameters", {}) for one in (metrics, *again)]
    seeds = [one["seed"] for one in settings if "seed" in one]
    every = {"seed": ", ".join(map(str, seeds))} if len(seeds) > 1 else {}
    totals = {name: metrics.get(name) for name in ("parameters", "steps")}
    known = totals | metrics.get("hyperparameters", {}) | every
    return {name: value for name, value in known.items() if value is not None}


def _settings(rows: Mapping[str, str], columns: Sequence[Column]) -> Table:
    """Tabulates hyperparameters by model; keys that no row names get rows at the end."""
    others = sorted({key for _, values in columns for key in values} - set(rows))
    labels = {**rows, **{key: key.replace("_", " ") for key in others}}
    used = {key: label for key, label in labels.items() if any(key in v for _, v in columns)}
    text = [
        {"hyperparameter": label}
        | {column: setting_value(values.get(key)) for column, values in columns}
        for key, label in used.items()
    ]
    data = [
        {"hyperparameter": key} | {column: values.get(key) for column, values in columns}
        for key in used
    ]
    return Table(pd.DataFrame(data, dtype=object), pd.DataFrame(text))


def table_4(training: Mapping[str, Mapping[str, Any]]) -> list[Exhibit]:
    """Shows the masked models, and the causal ones, ours beside the paper's."""
    return [_masked(training), _causal(training)]


def _masked(training: Mapping[str, Mapping[str, Any]]) -> Exhibit:
    columns: list[Column] = [
        ("paper, RoBERTa-512", TABLE_4_SHORT),
        ("ours, short", _hyperparameters(training, "masked_short")),
        ("paper, RoBERTa-4096", TABLE_4_LONG),
        ("ours, long", _hyperparameters(training, "masked_long")),
    ]
    return Exhibit(
        "table_4",
        "Table 4. Hyperparameters of the masked language models",
        "Ours beside the paper's.",
        [
            f"A {DASH} means: not stated, or not recorded. Our instances and batches count "
            "sequences of the model's full length (SQL), the paper's count instances of 512 "
            "tokens. The paper's numbers do not quite agree with each other: 2 epochs of 10M "
            "instances in batches of 8 are 2.5M steps, while 2.476M steps are 2 epochs of 9.904M "
            "instances. The paper does not say whether its largest gradient norm is of the whole "
            "gradient or of each parameter; Bert-Adam's own clipping, which we use, is of each "
            "parameter."
        ],
        table=_settings(MASKED_ROWS, columns),
        folded=True,
    )


def _causal(training: Mapping[str, Mapping[str, Any]]) -> Exhibit:
    ours = {kernel: _hyperparameters(training, f"causal_{kernel}") for kernel in KERNELS}
    trained = {kernel: values for kernel, values in ours.items() if values}
    columns: list[Column] = [("paper", CAUSAL_SETTINGS)]
    columns += [(f"ours, {kernel}", values) for kernel, values in trained.items()] or [("ours", {})]
    return Exhibit(
        "table_4_causal",
        "Table 4, continued. Hyperparameters of the causal language models",
        "Ours beside the paper's.",
        [
            f"The paper's section A.2. A {DASH} means: not stated, or not recorded. The paper's "
            "1,801,350 training examples are the lines of WikiText-103's training file, not blocks "
            "of 512 tokens."
        ],
        table=_settings(CAUSAL_ROWS, columns),
        folded=True,
    )
