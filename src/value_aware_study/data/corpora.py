"""Corpora: named sources of documents, written as JSON lines per source and split (A.1, Table 3).

Copied passages can be removed. Words of evaluation text that also occur in training text are
counted. Nothing here imports torch.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from value_aware_attention.files import new_folder
from value_aware_attention.texts import read_texts
from value_aware_study.data.text import SPLITS, Document
from value_aware_study.safe_text import inside

Counts = dict[str, int]

NGRAM = 13
"""Words in an n-gram that counts as copied if it occurs twice (GPT-3, Brown et al. 2020)."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)


def write_corpus(
    sources: Mapping[str, Iterable[Document]],
    folder: Path,
    seed: int,
    evaluation_fraction: float,
    *,
    validation_fraction: float = 0.0,
    remove_copies: bool = False,
) -> dict[str, dict[str, Counts]]:
    """Writes every source to `folder`/<source>/<split>.jsonl, one `{"text": ...}` a line.

    A document without a split goes to evaluation with probability `evaluation_fraction`, and to
    validation with `validation_fraction`, drawn from (seed, source, position). Each source gets at
    least one evaluation document. Empty documents are dropped. With `remove_copies`, passages that
    occur in earlier documents of any source are dropped too. The folder appears only once all of it
    is written.

    Returns documents and characters per source and split. For evaluation text it also returns the
    words, and how many of them lie in a 13-gram of the training text of any source.
    """
    if not 0 < evaluation_fraction < 1:
        raise ValueError(f"evaluation_fraction must lie between 0 and 1, not {evaluation_fraction}")
    if not 0 <= validation_fraction < 1 - evaluation_fraction:
        raise ValueError(
            f"validation_fraction must be at least 0 and leave training documents beside an "
            f"evaluation_fraction of {evaluation_fraction}, not {validation_fraction}"
        )
    if not sources:
        raise ValueError("a corpus needs at least one source, none was given")
    with new_folder(folder) as partial:
        hashes: set[int] = set()
        counts = {
            name: _write_source(
                name,
                without_copies(documents, hashes) if remove_copies else documents,
                inside(partial, name),
                seed,
                (evaluation_fraction, validation_fraction),
            )
            for name, documents in sources.items()
        }
        for name, copied in _overlap(partial, list(sources)).items():
            counts[name]["evaluation"] |= copied
    return counts


def _write_source(
    name: str,
    documents: Iterable[Document],
    folder: Path,
    seed: int,
    fractions: tuple[float, float],
) -> dict[str, Counts]:
    folder.mkdir(parents=True)
    progress = tqdm(documents, desc=name, unit=" documents", mininterval=1.0, disable=None)
    counts: dict[str, Counts] = {split: {"documents": 0, "characters": 0} for split in SPLITS}
    with ExitStack() as stack:
        files = {
            split: stack.enter_context((folder / f"{split}.jsonl").open("w", encoding="utf-8"))
            for split in SPLITS
        }
        for document in _assigned(progress, f"{seed} {name}", *fractions):
            split = document.split or "train"
            files[split].write(json.dumps({"text": document.text}, ensure_ascii=False) + "\n")
            counts[split]["documents"] += 1
            counts[split]["characters"] += len(document.text)
    for split in ("train", "evaluation"):
        if not counts[split]["documents"]:
            raise ValueError(
                f"source {name!r} has no {split} documents: give it more documents"
                " (a .txt file is one) or name its splits"
            )
    return counts


def _overlap(folder: Path, names: list[str]) -> dict[str, Counts]:
    """Counts the words of each source's evaluation text, and those copied from training text."""
    held_out = [list(read_texts(folder / name / "evaluation.jsonl")) for name in names]
    train = chain.from_iterable(read_texts(folder / name / "train.jsonl") for name in names)
    return {
        name: {"words": total, "copied_words": copied}
        for name, (copied, total) in zip(names, copied_words(train, held_out), strict=True)
    }


def _assigned(
    documents: Iterable[Document], key: str, evaluation: float, validation: float
) -> Iterator[Document]:
    """Yields the non-empty documents with a split; the last is evaluation if none else is."""
    spare: tuple[float, str] | None = None
    evaluated = False
    for position, document in enumerate(documents):
        if not document.text.strip():
            continue
        split, drawn = document.split, _uniform(f"{key} {position}")
        if split is None and drawn < evaluation + validation:
            split = "evaluation" if drawn < evaluation else "validation"
        if split is not None:
            yield Document(document.text, split)
            evaluated |= split == "evaluation"
        elif spare is None:
            spare = drawn, document.text
        else:
            spare, (_, text) = sorted([spare, (drawn, document.text)])
            yield Document(text, "train")
    if spare is not None:
        yield Document(spare[1], "train" if evaluated else "evaluation")


def _uniform(key: str) -> float:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64


def without_copies(documents: Iterable[Document], earlier: set[int]) -> Iterator[Document]:
    """Removes passages that occur in earlier documents; a document may end up empty.

    A passage is removed if at least half of its words lie in a 13-gram of earlier documents.
    `earlier` holds the hashes of these 13-grams; each document adds those of the text it keeps. A
    passage is a paragraph or a list entry: an unindented line and the indented lines below it.
    Copies within one document stay, as they never lie in two splits.
    """
    for document in documents:
        passages = list(_passages(document.text))
        words = [_words(passage) for passage in passages]
        hashes = _ngrams([word for passage in words for word in passage]).tolist()
        copied = _covered(np.fromiter((h in earlier for h in hashes), bool, len(hashes)))
        ends = np.cumsum([len(passage) for passage in words])
        shares = [
            copied[end - len(passage) : end].mean() if passage and hashes else 0.0  # no 13-gram
            for passage, end in zip(words, ends, strict=True)
        ]
        if max(shares) < 0.5:
            text = document.text
        else:
            text = "".join(
                p for p, share in zip(passages, shares, strict=True) if share < 0.5
            ).strip()
            hashes = _ngrams(_words(text)).tolist()
        earlier.update(hashes)
        yield Document(text, document.split)


def copied_words(train: Iterable[str], groups: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Counts, per group of texts, the words in a 13-gram of the training texts, and all words.

    Words are runs of letters and digits, in lower case. The training texts are read once, one at a
    time; memory grows only with the groups.
    """
    words = [[_words(text) for text in texts] for texts in groups]
    held = [[_ngrams(text) for text in texts] for texts in words]
    asked = np.unique(np.concatenate([_ngrams([]), *(h for texts in held for h in texts)]))
    occurs = np.zeros(len(asked), bool)
    for text in train if len(asked) else ():
        hashes = _ngrams(_words(text))
        places = np.searchsorted(asked, hashes) % len(asked)
        occurs[places[asked[places] == hashes]] = True
    return [
        (
            sum(int(_covered(occurs[np.searchsorted(asked, h)]).sum()) for h in hashes),
            sum(map(len, texts)),
        )
        for hashes, texts in zip(held, words, strict=True)
    ]


def _passages(text: str) -> Iterator[str]:
    """Splits a text into passages with their trailing blank lines; joined they give the text."""
    passage: list[str] = []
    for line in text.splitlines(keepends=True):
        ends = passage and passage[-1][0].isspace()  # after a blank or an indented line
        if ends and not line.isspace() and (passage[-1].isspace() or not line[0].isspace()):
            yield "".join(passage)
            passage = []
        passage.append(line)
    yield "".join(passage)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _ngrams(words: list[str]) -> NDArray[np.uint64]:
    """Hashes all len(words) - 12 13-grams. Hashes differ between processes."""
    words_hashed = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
    count = max(0, len(words) - NGRAM + 1)
    hashes = np.zeros(count, np.uint64)
    for offset in range(NGRAM):
        hashes = hashes * FACTOR + words_hashed[offset : offset + count]
    return hashes


def _covered(ngrams: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Marks the words that lie in a true n-gram; n-gram i starts at word i."""
    if not len(ngrams):
        return np.zeros(0, bool)
    return np.convolve(ngrams, np.ones(NGRAM, np.int64)) > 0
