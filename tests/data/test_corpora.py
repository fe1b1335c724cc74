import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import assert_refused
from value_aware_attention.texts import read_texts
from value_aware_study.data.corpora import write_corpus
from value_aware_study.data.text import Document, TextFiles


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
    ("documents", "message"),
    [
        ([], "source 'a' has no train documents"),
        ([Document("x", "train")], "source 'a' has no evaluation documents"),
        ([Document("x")], "source 'a' has no train documents"),
    ],
)
def test_an_empty_split_is_one_line(tmp_path, documents, message):
    assert_refused(message, write_corpus, {"a": documents}, tmp_path / "corpus", 0, 0.5)


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_evaluation_fraction_is_checked(tmp_path, fraction):
    assert_refused(
        "evaluation_fraction must lie between 0 and 1",
        write_corpus,
        {"a": []},
        tmp_path / "corpus",
        0,
        fraction,
    )


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
