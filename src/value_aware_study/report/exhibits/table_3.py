"""Tokens of each source: all, in training instances, in evaluation instances (Table 3)."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import DASH, tokens_count, whole
from value_aware_study.report.published import TABLE_3

__all__ = ["exhibit"]


def exhibit(tokens: Mapping[str, Any]) -> Exhibit:
    """One row a source, ours and the paper's: all, training and evaluation tokens."""
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
    note = (
        "All: tokens of the source in training, validation and evaluation text together. Training "
        "and evaluation: tokens in the instances of the masked language models, a dash where they "
        "do not use the source. Copied: words of the evaluation text that lie in a 13-gram of the "
        f"training text of any source{_copied(tokens)}. Our vocabulary: {_vocabulary(tokens)}. The "
        "paper prints more training tokens than tokens for PubMed."
    )
    return Exhibit(
        "table_3",
        "Table 3. Tokens of the training text",
        "Ours beside the paper's.",
        [note],
        table=Table(data, display),
        folded=True,
    )


def _copied(tokens: Mapping[str, Any]) -> str:
    """The share over all sources, where it was counted."""
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
