"""Counts of documents, tokens and instances by source and split, for Table 3."""

from collections.abc import Mapping
from typing import Any

Counts = Mapping[str, Any]


def merged_counts(documents: Counts, causal: Counts, masked: Counts) -> dict[str, Any]:
    """Merges the counts of the corpus with those of the causal and of the masked tokens."""
    merged = {
        name: {
            split: documents[name][split]
            | causal["sources"].get(name, {}).get(split, {})
            | masked["sources"].get(name, {}).get(split, {})
            for split in splits
        }
        for name, splits in documents.items()
    }
    return {
        "sources": merged,
        "vocabulary_size": masked["vocabulary_size"],
        "causal_vocabulary_size": causal["vocabulary_size"],
    }
