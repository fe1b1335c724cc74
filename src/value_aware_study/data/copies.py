"""Copied text: passages that a corpus holds already, and how much of a split is in another one."""

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from value_aware_study.data.documents import Document

__all__ = ["NGRAM", "copied_words", "without_copies"]

NGRAM = 13
"""Words of an n-gram that counts as copied where it occurs twice (GPT-3, Brown et al. 2020)."""

WORD = re.compile(r"\w+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


def without_copies(documents: Iterable[Document], seen: set[int]) -> Iterator[Document]:
    """Removes the passages that earlier documents hold; a document may end up empty.

    A passage goes if at least half of its words lie in a 13-gram of `seen`, the hashes of what
    earlier documents kept, to which each document adds its own. A passage is a paragraph, or an
    entry of a list: an unindented line and the indented ones below it. Copies within one document
    stay: they never lie in two splits.
    """
    for document in documents:
        parts = list(_passages(document.text))
        words = [_words(part) for part in parts]
        hashes = _ngrams([word for part in words for word in part]).tolist()
        copied = _covered(np.fromiter((h in seen for h in hashes), bool, len(hashes)))
        ends = np.cumsum([len(part) for part in words])
        shares = [
            copied[end - len(part) : end].mean() if part and hashes else 0.0  # no 13-gram: no copy
            for part, end in zip(words, ends, strict=True)
        ]
        kept = [part for part, share in zip(parts, shares, strict=True) if share < 0.5]
        text = document.text if len(kept) == len(parts) else "".join(kept).strip()
        seen.update(hashes if len(kept) == len(parts) else _ngrams(_words(text)).tolist())
        yield Document(text, document.split)


def copied_words(train: Iterable[str], groups: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Counts, per group of texts, the words in a 13-gram of the training texts, and all words.

    Words are runs of letters and digits without their case. The training texts are read once, one
    at a time; what is held grows with the groups alone.
    """
    words = [[_words(text) for text in texts] for texts in groups]
    held = [[_ngrams(text) for text in texts] for texts in words]
    known = np.unique(np.concatenate([_ngrams([]), *(h for texts in held for h in texts)]))
    found = np.zeros(len(known), bool)
    for text in train if len(known) else ():
        hashes = _ngrams(_words(text))
        places = np.searchsorted(known, hashes) % len(known)
        found[places[known[places] == hashes]] = True
    return [
        (
            sum(int(_covered(found[np.searchsorted(known, h)]).sum()) for h in hashes),
            sum(map(len, texts)),
        )
        for hashes, texts in zip(held, words, strict=True)
    ]


def _passages(text: str) -> Iterator[str]:
    """Splits a text into passages with the blank lines after them; joined they are the text."""
    passage: list[str] = []
    for line in text.splitlines(keepends=True):
        ends = passage and passage[-1][0].isspace()  # with a blank or an indented line
        if ends and not line.isspace() and (passage[-1].isspace() or not line[0].isspace()):
            yield "".join(passage)
            passage = []
        passage.append(line)
    yield "".join(passage)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _ngrams(words: list[str]) -> Hashes:
    """Hashes each of the len(words) - 12 13-grams, the same within a process only."""
    words_hashed = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
    count = max(0, len(words) - NGRAM + 1)
    hashes = np.zeros(count, np.uint64)
    for offset in range(NGRAM):
        hashes = hashes * FACTOR + words_hashed[offset : offset + count]
    return hashes


def _covered(ngrams: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tells whether each word lies in one of the true n-grams; n-gram i starts at word i."""
    if not len(ngrams):
        return np.zeros(0, bool)
    return np.convolve(ngrams, np.ones(NGRAM, np.int64)) > 0
