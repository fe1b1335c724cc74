import gzip
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import value_aware_attention.data
from value_aware_attention.data.corpora import (
    Docstrings,
    Document,
    TextFiles,
    read_texts,
    write_corpus,
)
from value_aware_attention.data.text_files import articles


def written(folder, source):
    return [list(read_texts([folder / source / f"{s}.jsonl"])) for s in ("train", "evaluation")]


def texts(source):
    return [document.text for document in source]


class TestWriteCorpus:
    def test_writes_every_document_once_and_counts_it(self, tmp_path):
        documents = [Document(f"document {i} é") for i in range(200)]
        counts = write_corpus({"a": documents}, tmp_path / "corpus", 0, 0.1)
        train, evaluation = written(tmp_path / "corpus", "a")
        assert sorted(train + evaluation) == sorted(document.text for document in documents)
        assert counts["a"]["train"]["documents"] == len(train)
        assert counts["a"]["evaluation"]["characters"] == sum(map(len, evaluation))
        assert 8 <= len(evaluation) <= 36  # mean 20, standard deviation 4.2

    def test_same_seed_same_bytes_and_another_seed_another_split(self, tmp_path):
        documents = [Document(f"document {i}") for i in range(100)]
        for name, seed in (("first", 0), ("second", 0), ("other", 1)):
            write_corpus({"a": documents}, tmp_path / name, seed, 0.2)
        first, second, other = (
            (tmp_path / name / "a/evaluation.jsonl").read_bytes()
            for name in ("first", "second", "other")
        )
        assert first == second != other

    def test_split_does_not_depend_on_other_sources(self, tmp_path):
        a, b = ([Document(f"{name} {i}") for i in range(50)] for name in "ab")
        write_corpus({"a": a}, tmp_path / "alone", 3, 0.2)
        write_corpus({"b": b, "a": a}, tmp_path / "both", 3, 0.2)
        assert written(tmp_path / "alone", "a") == written(tmp_path / "both", "a")

    def test_published_splits_are_kept(self, tmp_path):
        documents = [Document("x", "train"), Document("y", "evaluation"), Document("z", "train")]
        write_corpus({"a": documents}, tmp_path / "corpus", 0, 0.5)
        assert written(tmp_path / "corpus", "a") == [["x", "z"], ["y"]]

    @given(count=st.integers(2, 12), seed=st.integers(0, 2**32), fraction=st.floats(0.001, 0.3))
    def test_a_small_source_has_an_evaluation_document(
        self, tmp_path_factory, count, seed, fraction
    ):
        folder = tmp_path_factory.mktemp("corpus") / "corpus"
        documents = [Document(str(i)) for i in range(count)]
        try:
            write_corpus({"a": documents}, folder, seed, fraction)
        except ValueError as error:  # every document was drawn
            assert "no train documents" in str(error)
            return
        train, evaluation = written(folder, "a")
        assert evaluation and sorted(train + evaluation, key=int) == [str(i) for i in range(count)]

    def test_empty_documents_are_dropped(self, tmp_path):
        documents = [Document("  \n"), Document("x", "train"), Document("y", "evaluation")]
        counts = write_corpus({"a": documents}, tmp_path / "corpus", 0, 0.5)
        assert counts["a"]["train"]["documents"] == 1

    def test_a_failure_leaves_the_old_corpus_and_no_half_written_one(self, tmp_path):
        good = [Document("x", "train"), Document("y", "evaluation")]
        write_corpus({"a": good}, tmp_path / "corpus", 0, 0.5)

        def failing():
            yield Document("z", "train")
            raise RuntimeError("the disk is on fire")

        with pytest.raises(RuntimeError):
            write_corpus({"a": failing()}, tmp_path / "corpus", 0, 0.5)
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
    def test_an_empty_split_is_one_line(self, tmp_path, documents, message):
        with pytest.raises(ValueError, match=message) as caught:
            write_corpus({"a": documents}, tmp_path / "corpus", 0, 0.5)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("fraction", [0, 1, -0.1])
    def test_evaluation_fraction_is_checked(self, tmp_path, fraction):
        with pytest.raises(ValueError, match="evaluation_fraction must lie between 0 and 1"):
            write_corpus({"a": []}, tmp_path / "corpus", 0, fraction)


class TestDocstrings:
    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        files = {
            "__init__.py": '"""The package."""\nraise SystemExit("imported")',
            "b.py": '''
                """Second."""
                class C:
                    """A class.

                    Flush.
                        Indented.
                    """
                    def f(self):
                        "Method."
                    async def g(self):
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

    def test_one_document_a_module_without_repeats_and_tests(self, package):
        assert texts(Docstrings(package=package)) == [
            "The package.",
            "Nested  surrogate.",
            "Second.\n\nA class.\n\nFlush.\n    Indented.\n\nMethod.\n\nHidden in a branch.",
        ]

    def test_the_package_is_not_imported(self, package):
        texts(Docstrings(package=package))
        assert package not in sys.modules

    def test_a_pool_of_processes_keeps_the_order(self, package, monkeypatch):
        alone = texts(Docstrings(package=package))
        monkeypatch.setattr("value_aware_attention.data.docstrings.FILES_WORTH_A_POOL", 1)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        assert texts(Docstrings(package=package)) == alone

    def test_a_single_module(self, tmp_path, monkeypatch):
        (tmp_path / "toy_module.py").write_text('"""Alone."""')
        monkeypatch.syspath_prepend(tmp_path)
        assert texts(Docstrings(package="toy_module")) == ["Alone."]

    @pytest.mark.parametrize("name", ["no_such_package", "no_such_package.part"])
    def test_a_missing_package_is_named(self, name):
        with pytest.raises(ValueError, match=f"package '{name}' is not installed"):
            texts(Docstrings(package=name))

    def test_docstrings_equal_those_of_the_imported_module(self):
        module = importlib.import_module("networkx.algorithms.bridges")
        names = ["bridges", "has_bridges", "local_bridges"]
        expected = [inspect.getdoc(module), *(inspect.getdoc(getattr(module, n)) for n in names)]
        found = "\n\n".join(text.strip() for text in expected)
        assert any(found == text for text in texts(Docstrings(package="networkx.algorithms")))


class TestTextFiles:
    def test_a_folder_of_every_kind_plain_and_compressed(self, tmp_path):
        (tmp_path / "a.txt").write_text("plain\r\ntext\n")
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep/b.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
        with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
            file.write("compressed")
        (tmp_path / "notes.md").write_text("ignored in a folder")
        assert texts(TextFiles(tmp_path)) == ["plain\r\ntext\n", "compressed", "one", "two"]

    def test_a_glob_and_an_evaluation_path(self, tmp_path):
        for name in ("train-1", "train-2", "test"):
            (tmp_path / f"{name}.txt").write_text(name)
        source = TextFiles(f"{tmp_path}/train-*.txt", evaluation_path=tmp_path / "test.txt")
        assert list(source) == [
            Document("train-1", "train"),
            Document("train-2", "train"),
            Document("test", "evaluation"),
        ]

    def test_a_relative_glob(self, tmp_path, monkeypatch):
        (tmp_path / "a.txt").write_text("a")
        monkeypatch.chdir(tmp_path)
        assert texts(TextFiles("*.txt")) == ["a"]

    def test_another_field(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')
        assert texts(TextFiles(tmp_path / "a.jsonl", field="body")) == ["x"]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.txt", b"\xff\xfe\x00", "a.txt is not UTF-8 text"),
            ("a.txt", b"ab\x00cd", "a.txt is binary"),
            ("a.txt.gz", b"not gzip", "a.txt.gz is not a complete gzip file"),
            ("a.txt.gz", gzip.compress(b"cut off" * 99)[:-9], "is not a complete gzip file"),
            ("a.pdf", b"%PDF", "a.pdf: unknown suffix, allowed are .txt, .jsonl, .tokens"),
            ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl, line 2, is not JSON"),
            ("a.jsonl", b'{"title": "x"}', "a.jsonl, line 1, has no field 'text' with a text"),
            ("a.jsonl", b'{"text": 3}', "a.jsonl, line 1, has no field 'text' with a text"),
        ],
    )
    def test_a_bad_file_is_named_in_one_line(self, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            texts(TextFiles(tmp_path / name))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("path", ["nowhere.txt", "nowhere/*.txt", "."])
    def test_a_missing_path_is_named(self, tmp_path, path):
        with pytest.raises(FileNotFoundError, match="no such file, or a folder or glob without"):
            texts(TextFiles(tmp_path / path))


class TestArticles:
    LINES = [
        " \n",
        " = One = \n",
        " \n",
        " Text , of <unk> . \n",
        " = 3 = \n",  # a score, not a title: no empty lines around it
        " \n",
        " = = Section = = \n",
        " \n",
        " = Two = \n",
        " \n",
        " Text . \n",
    ]

    def test_an_article_starts_at_a_title_between_empty_lines(self):
        first, second = articles(self.LINES)
        assert first.endswith(" = = Section = = \n ") and second == " = Two = \n \n Text . "

    @given(st.lists(st.sampled_from([*LINES, "\n", " = Three = \n"]), max_size=30))
    def test_no_line_is_lost(self, lines):
        joined = "\n".join(articles(lines))
        assert joined == ("".join(lines)[:-1] if "".join(lines).strip() else "")

    def test_tokens_files_are_read_as_articles(self, tmp_path):
        (tmp_path / "wiki.train.tokens").write_text("".join(self.LINES))
        assert len(texts(TextFiles(tmp_path))) == 2


def test_corpora_import_neither_torch_nor_datasets():
    code = """
import sys, types
package = types.ModuleType("value_aware_attention")  # without what its __init__ offers
package.__path__ = [sys.argv[1]]
sys.modules["value_aware_attention"] = package
import value_aware_attention.data.corpora
print([name for name in ("torch", "datasets", "transformers", "numpy") if name in sys.modules])
"""
    folder = Path(value_aware_attention.data.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_line_holds_a_json_text(tmp_path):
    write_corpus(
        {"a": [Document("é\n", "train"), Document("x", "evaluation")]}, tmp_path / "c", 0, 0.5
    )
    line = (tmp_path / "c/a/train.jsonl").read_text(encoding="utf-8")
    assert json.loads(line) == {"text": "é\n"} and line.endswith("}\n")
