"""Corpora: every document once, copied passages by a slow count, and docstrings of packages."""

import importlib
import inspect
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import assert_refused
from value_aware_attention.texts import read_texts
from value_aware_study.data.corpora import (
    NGRAM,
    _passages,
    copied_words,
    without_copies,
    write_corpus,
)
from value_aware_study.data.text import Docstrings, Document, TextFiles


def written(folder, source):
    return [list(read_texts(folder / source / f"{s}.jsonl")) for s in ("train", "evaluation")]


def test_writes_every_document_once_and_counts_it(tmp_path):
    documents = [Document(f"document {i} é") for i in range(200)]
    counts = write_corpus({"a": documents}, tmp_path / "corpus", 0, 0.1)
    train, evaluation = written(tmp_path / "corpus", "a")
    assert sorted(train + evaluation) == sorted(document.text for document in documents)
    assert counts["a"]["train"]["documents"] == len(train)
    assert counts["a"]["evaluation"]["characters"] == sum(map(len, evaluation))
    assert 8 <= len(evaluation) <= 36  # mean 20, standard deviation 4.2


def test_a_split_depends_on_the_seed_and_not_on_other_sources(tmp_path):
    a, b = ([Document(f"{name} {i}") for i in range(50)] for name in "ab")
    write_corpus({"a": a}, tmp_path / "alone", 3, 0.2)
    write_corpus({"b": b, "a": a}, tmp_path / "both", 3, 0.2)
    write_corpus({"a": a}, tmp_path / "other", 4, 0.2)
    alone, both, other = (written(tmp_path / name, "a") for name in ("alone", "both", "other"))
    assert alone == both != other


@given(count=st.integers(2, 12), seed=st.integers(0, 2**32), fraction=st.floats(0.001, 0.3))
def test_a_small_source_has_an_evaluation_document(tmp_path_factory, count, seed, fraction):
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    documents = [Document(str(i)) for i in range(count)]
    try:
        write_corpus({"a": documents}, folder, seed, fraction)
    except ValueError as error:  # every document was drawn
        assert "no train documents" in str(error)
        return
    train, evaluation = written(folder, "a")
    assert evaluation and sorted(train + evaluation, key=int) == [str(i) for i in range(count)]


def test_the_one_evaluation_document_is_drawn(tmp_path):
    documents = [Document(str(i)) for i in range(5)]
    drawn = set()
    for seed in range(20):
        write_corpus({"a": documents}, tmp_path / "corpus", seed, 1e-9)
        drawn.update(written(tmp_path / "corpus", "a")[1])
    assert len(drawn) > 3


def test_empty_documents_go_and_a_failure_leaves_the_old_corpus_whole(tmp_path):
    good = [Document("  \n"), Document("x", "train"), Document("y", "evaluation")]
    write_corpus({"a": good}, tmp_path / "corpus", 0, 0.5)

    def failing():
        yield Document("z", "train")
        raise RuntimeError("the disk is on fire")

    failed = {"a": failing()}, tmp_path / "corpus", 0, 0.5
    assert_refused("on fire", write_corpus, *failed, error=RuntimeError)
    assert written(tmp_path / "corpus", "a") == [["x"], ["y"]]
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize(
    ("documents", "fraction", "message"),
    [
        ([], 0.5, "source 'a' has no train documents"),
        ([Document("x", "train")], 0.5, "source 'a' has no evaluation documents"),
        ([Document("x")], 0.5, "source 'a' has no train documents"),
        *(([], share, "evaluation_fraction must lie between 0 and 1") for share in (0, 1, -0.1)),
    ],
)
def test_an_empty_split_or_no_fraction_is_one_line(tmp_path, documents, fraction, message):
    assert_refused(message, write_corpus, {"a": documents}, tmp_path / "corpus", 0, fraction)


def test_a_glob_and_an_evaluation_path(tmp_path):
    for name in ("train-1", "train-2", "test"):
        (tmp_path / f"{name}.txt").write_text(name)
    source = TextFiles(f"{tmp_path}/train-*.txt", evaluation_path=tmp_path / "test.txt")
    assert list(source) == [
        Document("train-1", "train"),
        Document("train-2", "train"),
        Document("test", "evaluation"),
    ]


def test_what_is_left_out_is_printed(tmp_path, capsys):
    for name in ("a.jsonl", "b.pdf"):
        (tmp_path / name).write_text('{"body": "x", "text": "y"}')
    assert list(TextFiles(tmp_path, field="body")) == [Document("x")]
    assert capsys.readouterr().out == f"{tmp_path}: text files read: 1; left out: .pdf (1)\n"


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


def texts_of(source):
    return [document.text for document in source]


@pytest.fixture
def package(tmp_path, monkeypatch):
    files = {
        "__init__.py": '"""The package."""\nraise SystemExit("imported")',
        "b.py": '''
            """Second."""
            class C:
                """A class.

                Flush.
                    Indented.
                """
                def f():
                    "Method."
                async def g():
                    """Second."""
            if True:
                try:
                    def hidden():
                        """Hidden in a branch."""
                except ValueError:
                    x = """not a docstring"""
        ''',
        "a/__init__.py": "",
        "a/nested.py": '"""Nested \\ud800 surrogate."""',
        "a/broken.py": '"""Broken."""\ndef f(:',
        "tests/test_b.py": '"""A test."""',
        "a/test_nested.py": '"""Another test."""',
    }
    for name, source in files.items():
        file = tmp_path / "toy_package" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    return "toy_package"


def test_one_document_a_module_without_repeats_and_tests(package):
    assert texts_of(Docstrings(package=package)) == [
        "The package.",
        "Nested  surrogate.",
        "Second.\n\nA class.\n\nFlush.\n    Indented.\n\nMethod.\n\nHidden in a branch.",
    ]


def test_a_single_module(tmp_path, monkeypatch):
    (tmp_path / "toy_module.py").write_text('"""Alone."""')
    monkeypatch.syspath_prepend(tmp_path)
    assert texts_of(Docstrings(package="toy_module")) == ["Alone."]


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.part"])
def test_a_missing_package_is_named(name):
    assert_refused(f"package '{name}' is not installed", texts_of, Docstrings(package=name))


def test_docstrings_equal_those_of_the_imported_module():
    module = importlib.import_module("networkx.algorithms.bridges")
    names = ["bridges", "has_bridges", "local_bridges"]
    expected = [inspect.getdoc(module), *(inspect.getdoc(getattr(module, n)) for n in names)]
    document = "\n\n".join(text.strip() for text in expected)
    assert any(document == text for text in texts_of(Docstrings(package="networkx.algorithms")))
