"""Copied passages agree with a slow, obvious count over sets of word tuples."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from value_aware_study.data.corpora import (
    NGRAM,
    _passages,
    copied_words,
    without_copies,
    write_corpus,
)
from value_aware_study.data.text import Document

SENTENCE = " ".join(f"word{i}" for i in range(20))
OTHER = " ".join(f"other{i}" for i in range(20))


def grams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def counted(train: list[str], text: str) -> tuple[int, int]:
    copied_from = set().union(*(grams(re.findall(r"\w+", t.lower())) for t in train))
    words = re.findall(r"\w+", text.lower())
    copied = {
        i + j
        for i in range(len(words) - NGRAM + 1)
        if tuple(words[i : i + NGRAM]) in copied_from
        for j in range(NGRAM)
    }
    return len(copied), len(words)


def texts():
    words = st.lists(st.sampled_from(["a", "B", "c.", "\n", "-"]), max_size=60)
    return st.lists(words.map(" ".join), max_size=4)


@given(train=texts(), groups=st.lists(texts(), max_size=3))
def test_copied_words_are_those_of_the_definition(train, groups):
    expected = []
    for group in groups:
        counts = [counted(train, text) for text in group]
        expected.append((sum(c for c, _ in counts), sum(n for _, n in counts)))
    assert copied_words(iter(train), groups) == expected


def test_case_and_punctuation_make_no_difference():
    assert copied_words([SENTENCE.upper().replace(" ", ", ")], [[SENTENCE]]) == [(20, 20)]


ENTRY = f"Parameters\n----------\nx : int\n    {SENTENCE}\n"
SHORT = ["", "one", "a few words", " ".join(12 * ["word"]), " ".join(13 * ["word"])]
HALF = f"{SENTENCE} {' '.join(OTHER.split()[:15])}"  # goes, for more than half is copied


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        pytest.param([SENTENCE, OTHER, SENTENCE], [SENTENCE, OTHER, ""], id="the first stays"),
        pytest.param(
            [ENTRY, f"Title\n\n{ENTRY}y : int\n    {OTHER}\n"],
            [ENTRY, f"Title\n\ny : int\n    {OTHER}"],
            id="an entry of a list goes and its neighbours stay",
        ),
        pytest.param(
            [SENTENCE, f"{OTHER} {SENTENCE.rpartition(' ')[0]}"],
            [SENTENCE, f"{OTHER} {SENTENCE.rpartition(' ')[0]}"],
            id="less than half is copied",
        ),
        pytest.param(
            [f"{SENTENCE}\n\n{SENTENCE}"], [f"{SENTENCE}\n\n{SENTENCE}"], id="one repeats itself"
        ),
        pytest.param([SENTENCE, HALF, OTHER], [SENTENCE, "", OTHER], id="a copy of what went"),
        pytest.param(SHORT, SHORT, id="too short for a 13-gram"),
    ],
)
def test_passages_that_are_mostly_copied_from_what_was_kept_go(texts, kept):
    documents = without_copies([Document(text) for text in texts], set())
    assert [document.text for document in documents] == kept


@given(st.text(alphabet="ab \n\t", max_size=80))
def test_passages_joined_are_the_text(text):
    assert "".join(_passages(text)) == text


def test_a_corpus_without_copies_holds_every_passage_once(tmp_path):
    passages = [" ".join(f"{i}x{j}" for j in range(20)) for i in range(40)]
    documents = [Document(f"{passages[i]}\n\n{passages[(7 * i) % 40]}") for i in range(40)]
    with_copies, without = (
        write_corpus({"a": documents}, tmp_path / str(removed), 0, 0.3, remove_copies=removed)
        for removed in (False, True)
    )
    assert with_copies["a"]["evaluation"]["copied_words"] > 0
    assert without["a"]["evaluation"]["copied_words"] == 0
    assert without["a"]["evaluation"]["words"] > 0


def test_validation_documents_are_drawn_beside_the_evaluation_documents(tmp_path):
    documents = [Document(f"document {i}") for i in range(400)]
    plain = write_corpus({"a": documents}, tmp_path / "plain", 0, 0.1)
    drawn = write_corpus({"a": documents}, tmp_path / "drawn", 0, 0.1, validation_fraction=0.2)
    texts = {s: (tmp_path / f"drawn/a/{s}.jsonl").read_text() for s in drawn["a"]}
    assert (tmp_path / "plain/a/evaluation.jsonl").read_text() == texts["evaluation"]
    counts = {split: text["documents"] for split, text in drawn["a"].items()}
    assert counts["train"] + counts["validation"] == plain["a"]["train"]["documents"]
    assert 50 < counts["validation"] < 110  # mean 80, standard deviation 8
