"""Finds a short passage of whole sentences in texts, and tokenizes it for a model to read alone."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

FEWEST, MOST = 32, 48
"""Tokens of a passage, special ones included"""
CONSIDERED = 200
"""Number of passages among which the one of the most common words is taken"""
PARAGRAPHS, SENTENCES = re.compile(r"\n\s*\n"), re.compile(r"(?<=[.?!])\s+")
PROSE = re.compile(r"(?!.*--)[A-Z][\w ,;'()-]+[.?!]")


class Passage(NamedTuple):
    """Holds a text in a model's tokens, and what a reader sees of each."""

    ids: list[int]
    shown: list[str]
    """Parts of the text; one that begins a word begins with a space."""


def passage(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[list[int], list[int]],
    most: int = MOST,
) -> Passage:
    """Takes whole sentences of `FEWEST` to `most` tokens, or else as many whole words as fit.

    Of the first `CONSIDERED` passages it is the one with the most words for its tokens. The first
    sentence of a text is left out, since a window may begin in its midst; `ends` are the special
    tokens before and after it. Raises ValueError for texts without a word.
    """
    before, after = ends
    most = max(1, most - len(before) - len(after))
    texts = list(texts)
    found = list(islice(_passages(texts, tokenizer, most), CONSIDERED))
    text = max(found, key=lambda one: len(one.split()) / _length(one, tokenizer), default="")
    inner = _tokenized(text or _words(texts, tokenizer, most), tokenizer, most)
    special = [[f" {one}" for one in tokenizer.convert_ids_to_tokens(ids)] for ids in ends]
    return Passage([*before, *inner.ids, *after], [*special[0], *inner.shown, *special[1]])


def _passages(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, most: int) -> Iterator[str]:
    """Yields runs of whole sentences of one paragraph that are long enough."""
    fewest = min(FEWEST, most * 2 // 3)
    for text in texts:
        for place, paragraph in enumerate(PARAGRAPHS.split(text)):
            run = ""
            for sentence in SENTENCES.split(paragraph.strip())[not place :]:
                sentence = " ".join(sentence.split())
                run = f"{run} {sentence}".strip() if PROSE.fullmatch(sentence) else ""
                count = _length(run, tokenizer) if run else 0
                if fewest <= count <= most:
                    yield run
                if count >= fewest:
                    run = ""


def _words(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, most: int) -> str:
    """Returns whole words of the longest text, without its first and last, which may be cut."""
    words = max(texts, key=len, default="").split()
    if not words:
        raise ValueError("the text is empty")
    words = (words[1:-1] or words)[:most]
    while len(words) > 1 and _length(" ".join(words), tokenizer) > most:
        words.pop()
    return " ".join(words)


def _length(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokenized(text: str, tokenizer: PreTrainedTokenizerBase, most: int) -> Passage:
    asked = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
    read = tokenizer(text, add_special_tokens=False, verbose=False, **asked)
    ids = list(read["input_ids"])[:most]
    if not tokenizer.is_fast:
        return Passage(ids, [str(tokenizer.decode([one])) for one in ids])
    padded = f" {text}"  # so that every word has a space before it
    shown = []
    for start, end in read["offset_mapping"][:most]:
        begins = padded[start].isspace() or padded[start + 1 : start + 2].isspace()
        shown.append(" " * begins + text[start:end].strip())
    return Passage(ids, shown)
