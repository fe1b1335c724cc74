"""Corpora: named sources of documents, written as JSON lines per source and split (A.1, Table 3).

Nothing here imports torch, and `datasets` only where a hub data set is read: the corpus stage
starts at once.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tqdm import tqdm

from value_aware_attention.data.docstrings import Docstrings
from value_aware_attention.data.documents import SPLITS, Document, Split
from value_aware_attention.data.hub import HubArticles, HubDocuments
from value_aware_attention.data.text_files import TextFiles

__all__ = [
    "SPLITS",
    "Docstrings",
    "Document",
    "HubArticles",
    "HubDocuments",
    "Split",
    "TextFiles",
    "read_texts",
    "write_corpus",
]

Counts = dict[str, int]


def write_corpus(
    sources: Mapping[str, Iterable[Document]], folder: Path, seed: int, evaluation_fraction: float
) -> dict[str, dict[str, Counts]]:
    """Write every source to `folder`/<source>/{train,evaluation}.jsonl, one `{"text": ...}` a line.

    A document without a split goes to evaluation with probability `evaluation_fraction`, drawn
    from (seed, source, position), and at least one does. Empty documents are dropped. The folder
    appears only when all of it is written. Returns documents and characters per source and split.
    """
    if not 0 < evaluation_fraction < 1:
        raise ValueError(f"evaluation_fraction must lie between 0 and 1, not {evaluation_fraction}")
    if not sources:
        raise ValueError("a corpus needs at least one source, none was given")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        counts = {
            name: _write_source(name, documents, partial / name, seed, evaluation_fraction)
            for name, documents in sources.items()
        }
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return counts


def read_texts(files: Iterable[Path]) -> Iterator[str]:
    """The texts of files written by `write_corpus`, one after the other."""
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def _write_source(
    name: str, documents: Iterable[Document], folder: Path, seed: int, fraction: float
) -> dict[str, Counts]:
    folder.mkdir(parents=True)
    progress = tqdm(documents, desc=name, unit=" documents", mininterval=1.0)
    with ExitStack() as stack:
        writers: dict[Split, _Writer] = {
            split: stack.enter_context(_Writer(folder / f"{split}.jsonl")) for split in SPLITS
        }
        for document in _assigned(progress, f"{seed} {name}", fraction):
            writers[document.split or "train"].write(document.text)
    for split, writer in writers.items():
        if not writer.counts["documents"]:
            raise ValueError(
                f"source {name!r} has no {split} documents: give it more documents"
                " (a .txt file is one) or name its splits"
            )
    return {split: writer.counts for split, writer in writers.items()}


def _assigned(documents: Iterable[Document], key: str, fraction: float) -> Iterator[Document]:
    """Documents with a split, empty ones dropped; the one next to be evaluated comes last."""
    next_to_go: tuple[float, str] | None = None
    evaluated = False
    for position, document in enumerate(documents):
        if not document.text.strip():
            continue
        if document.split is not None:
            yield document
            evaluated |= document.split == "evaluation"
            continue
        drawn = (_uniform(f"{key} {position}"), document.text)
        if drawn[0] < fraction:
            yield Document(document.text, "evaluation")
            evaluated = True
        elif next_to_go is None:
            next_to_go = drawn
        else:
            next_to_go, other = min(next_to_go, drawn), max(next_to_go, drawn)
            yield Document(other[1], "train")
    if next_to_go is not None:
        yield Document(next_to_go[1], "train" if evaluated else "evaluation")


def _uniform(key: str) -> float:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class _Writer:
    """JSON lines, counted."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")
        self.counts: Counts = {"documents": 0, "characters": 0}

    def write(self, text: str) -> None:
        self.file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        self.counts["documents"] += 1
        self.counts["characters"] += len(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()
