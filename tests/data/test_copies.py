"""Copied passages agree with a slow, obvious count over sets of word tuples."""

import re

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
    """Counts copied words by the definition."""
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


def kept(*texts: str) -> list[str]:
    return [d.text for d in without_copies([Document(text) for text in texts], set())]


def test_a_copied_document_ends_up_empty_and_the_first_one_stays():
    assert kept(SENTENCE, OTHER, SENTENCE) == [SENTENCE, OTHER, ""]


def test_a_copied_entry_of_a_list_goes_and_its_neighbours_stay():
    first = f"Parameters\n----------\nx : int\n    {SENTENCE}\n"
    second = f"Title\n\nParameters\n----------\nx : int\n    {SENTENCE}\ny : int\n    {OTHER}\n"
    assert kept(first, second)[1] == f"Title\n\ny : int\n    {OTHER}"


def test_a_passage_of_which_less_than_half_is_copied_stays():
    text = f"{OTHER} {SENTENCE.rpartition(' ')[0]}"
    assert kept(SENTENCE, text) == [SENTENCE, text]


def test_a_document_may_repeat_itself():
    text = f"{SENTENCE}\n\n{SENTENCE}"
    assert kept(text) == [text]


def test_a_copy_of_what_was_removed_is_measured_against_what_was_kept():
    half = f"{SENTENCE} {' '.join(OTHER.split()[:15])}"  # goes, for more than half is copied
    assert kept(SENTENCE, half, OTHER) == [SENTENCE, "", OTHER]


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


def test_a_text_too_short_for_a_13_gram_is_kept() -> None:
    """It holds no copied passage, however often it stands in the corpus."""
    texts = ["", "one", "a few words", " ".join(12 * ["word"]), " ".join(13 * ["word"])]
    documents = list(without_copies((Document(text, "train") for text in texts), set()))
    assert [document.text for document in documents] == texts
