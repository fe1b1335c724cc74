import gzip
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from value_aware_study.data.text import Document, TextFiles, articles


def texts(source):
    return [document.text for document in source]


def _packed(content: bytes) -> bytes:
    """Compresses without the time, so that a test has one name."""
    return gzip.compress(content, mtime=0)


def _torn(compressed: bytes) -> bytes:
    """Puts bytes in the middle that zlib cannot read."""
    return compressed[:12] + b"\xff" * 8 + compressed[20:]


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
            (
                "a.txt.gz",
                _packed(b"cut off" * 99)[:-9],
                "is not a complete gzip file",
            ),
            ("a.pdf", b"%PDF", "a.pdf: unknown suffix, allowed are .txt, .jsonl, .tokens"),
            ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl, line 2, is not JSON"),
            ("a.jsonl", b'{"title": "x"}', "a.jsonl, line 1, has no field 'text' with a text"),
            ("a.jsonl", b'{"text": 3}', "a.jsonl, line 1, has no field 'text' with a text"),
            (
                "a.jsonl",
                b'{"text": "x"}\n{"text": "y\\ud83d"}',
                r"line 2, has .ud83d in 'text', half",
            ),
            ("a.jsonl", b'{"text": "\xed\xa0\x80"}', "a.jsonl is not UTF-8 text"),
            ("a.jsonl", b"[" * 10**5, "a.jsonl, line 1, is not JSON: maximum recursion"),
            ("a.jsonl", b"1" * 10**5, "a.jsonl, line 1, is not JSON: Exceeds the limit"),
            ("a.jsonl", b'\xef\xbb\xbf{"text": 3}', "a.jsonl, line 1, has no field"),
            ("a.jsonl", '{"text": "x"}'.encode("utf-16"), "a.jsonl is not UTF-8 text"),
            ("a.jsonl", '{"text": "x"}'.encode("utf-16-le"), "a.jsonl, line 1, is not JSON"),
            ("a.txt", "text".encode("utf-16-be"), "a.txt is binary"),
            ("a.txt.gz", _packed("text".encode("utf-16")), "a.txt.gz is not UTF-8 text"),
            ("a.txt", "größe".encode("latin-1"), "a.txt is not UTF-8 text"),
            (
                "a.txt.gz",
                _torn(_packed(bytes(range(256)) * 9)),
                "is not a complete gzip file",
            ),
            ("a.tokens", b" = A = \n\0", "a.tokens is binary"),
        ],
    )
    def test_a_bad_file_is_named_in_one_line(self, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            texts(TextFiles(tmp_path / name))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
    @pytest.mark.parametrize(
        ("name", "content"),
        [("a.txt", "größe\n"), ("a.jsonl", '{"text": "größe\\n"}\n'), ("a.tokens", "größe\n\n")],
    )
    def test_a_byte_order_mark_is_no_text(self, tmp_path, name, content, packed):
        data = content.encode("utf-8-sig")
        file = tmp_path / (f"{name}.gz" if packed else name)
        file.write_bytes(_packed(data) if packed else data)
        assert texts(TextFiles(file)) == ["größe\n"]

    @pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", _packed(b"")])
    def test_an_empty_file_is_an_empty_text(self, tmp_path, content):
        file = tmp_path / ("a.txt.gz" if content[:1] == b"\x1f" else "a.txt")
        file.write_bytes(content)
        assert texts(TextFiles(tmp_path)) == [""]

    def test_folders_with_the_name_of_a_text_are_searched(self, tmp_path):
        (tmp_path / "a.txt").mkdir()
        (tmp_path / "a.txt/b.txt").write_text("b")
        (tmp_path / "again").symlink_to(tmp_path)
        assert texts(TextFiles(tmp_path)) == texts(TextFiles(tmp_path / "a.txt")) == ["b"]

    @pytest.mark.parametrize("target", ["gone", "b.txt"], ids=["dangling", "loop"])
    def test_a_link_that_leads_nowhere_is_not_passed_over(self, tmp_path, target):
        (tmp_path / "a.txt").write_text("a")
        (tmp_path / "b.txt").symlink_to(target)
        with pytest.raises(OSError, match=r"b\.txt"):
            texts(TextFiles(tmp_path))

    def test_a_folder_that_cannot_be_read_is_not_passed_over(self, tmp_path, monkeypatch):
        (tmp_path / "a.txt").write_text("a")
        (tmp_path / "locked").mkdir()
        scan = os.scandir

        def refuse(path):
            if str(path).endswith("locked"):
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse)  # nobody is locked out of a folder as root
        with pytest.raises(PermissionError, match="locked"):
            texts(TextFiles(tmp_path))

    @pytest.mark.parametrize("path", ["nowhere.txt", "nowhere/*.txt", "."])
    def test_a_missing_path_is_named(self, tmp_path, path):
        with pytest.raises(FileNotFoundError, match="no such file, or a folder or glob without"):
            texts(TextFiles(tmp_path / path))


LINES = [
    " \n",
    " = One = \n",
    " \n",
    " Text , of <unk> . \n",
    " = 3 = \n",  # a score, not a title: no empty line before it
    " \n",
    " = x = \n",  # a formula, not a title: no empty line after it
    " Text . \n",
    " \n",
    " = = Section = = \n",
    " \n",
    " = Two = \n",
    " \n",
    " Text . \n",
]


class TestArticles:
    def test_an_article_starts_at_a_title_between_empty_lines(self):
        first, second = articles(LINES)
        assert first.endswith(" = = Section = = \n ") and second == " = Two = \n \n Text . "

    @given(st.lists(st.sampled_from([*LINES, "\n", " = Three = \n"]), max_size=30))
    def test_no_line_is_lost(self, lines):
        joined = "\n".join(articles(lines))
        assert joined == ("".join(lines)[:-1] if "".join(lines).strip() else "")

    def test_tokens_files_are_read_as_articles(self, tmp_path):
        (tmp_path / "wiki.train.tokens").write_text("".join(LINES))
        assert len(texts(TextFiles(tmp_path))) == 2
