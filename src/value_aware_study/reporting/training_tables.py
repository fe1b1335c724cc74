"""Tables 3 and 4: the text and the hyperparameters of the training, beside the paper's."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from value_aware_study.reporting.published import (
    CAUSAL_SETTINGS,
    TABLE_3,
    TABLE_4_LONG,
    TABLE_4_SHORT,
)
from value_aware_study.reporting.results import KERNELS
from value_aware_study.reporting.table import (
    DASH,
    Table,
    setting_value,
    tokens_count,
    whole,
)

# Key of the `hyperparameters` dictionary -> the row's name, with the paper's abbreviation.
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


def table_3(tokens: Mapping[str, Any]) -> Table:
    """Tokens of each source: all, in training instances, in evaluation instances (Table 3)."""
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
    size = tokens.get("vocabulary_size")
    vocabulary = "not recorded" if size is None else f"{size:,} types"
    caption = (
        "All: tokens of the source in training, validation and evaluation text together. Training "
        "and evaluation: tokens in the instances of the masked language models, a dash where they "
        "do not use the source. Copied: words of the evaluation text that lie in a 13-gram of the "
        f"training text of any source{_copied(tokens)}. Our vocabulary: {vocabulary}. The "
        "paper prints more training tokens than tokens for PubMed."
    )
    return Table("table_3", "Table 3. Tokens of the training text", caption, data, display)


def _copied(tokens: Mapping[str, Any]) -> str:
    """The share over all sources, where it was counted."""
    counts = [parts.get("evaluation", {}) for parts in tokens.get("sources", {}).values()]
    words = sum(part.get("words", 0) for part in counts)
    copied = sum(part.get("copied_words", 0) for part in counts)
    return f", {100 * copied / words:.1f}% in all" if words else ""


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
    """A model's hyperparameters, with what else its metrics say about its size and length."""
    metrics = training.get(model, {})
    totals = {name: metrics.get(name) for name in ("parameters", "steps")}
    known = totals | metrics.get("hyperparameters", {})
    return {name: value for name, value in known.items() if value is not None}


def _settings_table(
    name: str, title: str, caption: str, rows: Mapping[str, str], columns: Sequence[Column]
) -> Table:
    """Hyperparameters down, models across; a key that no row names gets a row at the end."""
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
    return Table(name, title, caption, pd.DataFrame(data, dtype=object), pd.DataFrame(text))


def table_4(training: Mapping[str, Mapping[str, Any]]) -> Table:
    """Hyperparameters of the masked language models beside Table 4 of the paper."""
    columns: list[Column] = [
        ("paper, RoBERTa-512", TABLE_4_SHORT),
        ("ours, short", _hyperparameters(training, "masked_short")),
        ("paper, RoBERTa-4096", TABLE_4_LONG),
        ("ours, long", _hyperparameters(training, "masked_long")),
    ]
    caption = (
        f"A {DASH} is not stated, or not recorded. Our instances and batches count sequences of "
        "the model's full length (SQL), the paper's count instances of 512 tokens. The paper's "
        "numbers do not quite agree with each other: 2 epochs of 10M instances in batches of 8 are "
        "2.5M steps, while 2.476M steps are 2 epochs of 9.904M instances. The paper does not say "
        "whether its largest gradient norm is of the whole gradient or of each parameter; "
        "Bert-Adam's own clipping, which we use, is of each parameter."
    )
    title = "Table 4. Hyperparameters of the masked language models"
    return _settings_table("table_4", title, caption, MASKED_ROWS, columns)


def table_4_causal(training: Mapping[str, Mapping[str, Any]]) -> Table:
    """Hyperparameters of the causal language models beside section A.2 of the paper."""
    ours = {kernel: _hyperparameters(training, f"causal_{kernel}") for kernel in KERNELS}
    trained = {kernel: values for kernel, values in ours.items() if values}
    columns: list[Column] = [("paper", CAUSAL_SETTINGS)]
    columns += [(f"ours, {kernel}", values) for kernel, values in trained.items()] or [("ours", {})]
    caption = (
        f"The paper's section A.2. A {DASH} is not stated, or not recorded. The paper's 1,801,350 "
        "training examples are the lines of WikiText-103's training file, not blocks of 512 tokens."
    )
    title = "Table 4, continued. Hyperparameters of the causal language models"
    return _settings_table("table_4_causal", title, caption, CAUSAL_ROWS, columns)
