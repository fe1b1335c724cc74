"""One reader of text for every command: which files it reads, and what it makes of each."""

import gzip
import os
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import assert_refused
from value_aware_attention.texts import articles, read_texts


def _packed(content: bytes) -> bytes:
    """Compresses without the time, so that a test has one name."""
    return gzip.compress(content, mtime=0)


def _torn(compressed: bytes) -> bytes:
    """Puts bytes in the middle that zlib cannot read."""
    return compressed[:12] + b"\xff" * 8 + compressed[20:]


def test_a_folder_of_every_kind_plain_and_compressed(tmp_path):
    (tmp_path / "a.txt").write_text("plain\r\ntext\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("compressed")
    (tmp_path / "notes.md").write_text("of another editor")
    (tmp_path / "wiki.train.tokens").write_text("".join(LINES))
    read = list(read_texts(tmp_path))
    texts = ["plain\ntext\n", "compressed", "one", "two", "of another editor"]
    assert read == [*texts, *articles(LINES)]


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
        ("a.pdf", b"%PDF", "a.pdf: unknown suffix, allowed are .txt, .md, .jsonl, .tokens"),
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
def test_a_bad_file_is_named_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert_refused(message, list, read_texts(tmp_path / name))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", "größe\n"), ("a.jsonl", '{"text": "größe\\n"}\n'), ("a.tokens", "größe\n\n")],
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, content, packed):
    data = content.encode("utf-8-sig")
    file = tmp_path / (f"{name}.gz" if packed else name)
    file.write_bytes(_packed(data) if packed else data)
    assert list(read_texts(file)) == ["größe\n"]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", _packed(b"")])
def test_an_empty_file_is_an_empty_text(tmp_path, content):
    file = tmp_path / ("a.txt.gz" if content[:1] == b"\x1f" else "a.txt")
    file.write_bytes(content)
    assert list(read_texts(tmp_path)) == [""]


def test_folders_with_the_name_of_a_text_are_searched(tmp_path):
    (tmp_path / "a.txt").mkdir()
    (tmp_path / "a.txt/b.txt").write_text("b")
    (tmp_path / "again").symlink_to(tmp_path)
    assert list(read_texts(tmp_path)) == list(read_texts(tmp_path / "a.txt")) == ["b"]


@pytest.mark.parametrize("target", ["gone", "b.txt"], ids=["dangling", "loop"])
def test_a_link_that_leads_nowhere_is_not_passed_over(tmp_path, target):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(target)
    assert_refused(r"b\.txt", list, read_texts(tmp_path), error=OSError)


def refuse(scan, path):
    if str(path).endswith("locked"):
        raise PermissionError(13, "Permission denied", str(path))
    return scan(path)


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "locked").mkdir()
    for name in ("scandir", "listdir"):  # nobody is locked out of a folder as root
        monkeypatch.setattr(os, name, partial(refuse, getattr(os, name)))
    assert_refused("locked", list, read_texts(tmp_path), error=PermissionError)


@pytest.mark.parametrize("name", ["a.TXT", "a.Txt.GZ", "a.MD", "a.JSONL.gz", "a.TOKENS"])
def test_a_suffix_in_capitals_is_the_same(tmp_path, name):
    data = b'{"text": "a"}' if "json" in name.lower() else b"a"
    (tmp_path / name).write_bytes(_packed(data) if name.lower().endswith("gz") else data)
    assert list(read_texts(tmp_path)) == list(read_texts(tmp_path / name)) == ["a"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"one\r\ntwo\rthree\r\n"),
        ("a.md", b"one\r\ntwo\rthree\r\n"),
        ("a.jsonl", b'{"text": "one\\ntwo\\rthree\\n"}\r\n'),
        ("a.tokens", b"one\r\ntwo\rthree\r\n\r\n"),
    ],
)
def test_line_ends_of_windows_are_line_feeds(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert list(read_texts(tmp_path / name)) == ["one\ntwo\rthree\n"]


def fill(folder, *names):
    """Writes files whose text is their name."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)


NO_FILE = "no such file, or a folder or glob without [a-z., ]*gz$"


def test_linked_folders_are_read_and_each_once(tmp_path):
    fill(tmp_path, "texts/b/1.txt", "texts/c.txt", "disk/2.txt", "disk/deep/3.txt")
    for link, target in {
        "texts/a": "b",  # beside it, before it
        "texts/again": "../texts",
        "texts/disk": "../disk",
        "texts/part": "../disk/deep",
        "disk/back": "../texts",
    }.items():
        (tmp_path / link).symlink_to(target)
    expected = ["1.txt", "c.txt", "2.txt", "3.txt"]
    assert list(read_texts(tmp_path / "texts")) == expected
    for pattern in ("**", "**/*.txt", "*"):
        assert sorted(read_texts(tmp_path / "texts" / pattern)) == sorted(expected)


@pytest.mark.parametrize("pattern", [".", "**"])
def test_what_is_left_out_is_counted_in_a_line(tmp_path, pattern):
    fill(tmp_path, "1.txt", "a.pdf", "b.PDF", "c.csv.gz", ".x.txt", ".git/2.txt", "LICENSE")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    lines = []
    assert list(read_texts(tmp_path / pattern, show=lines.append)) == ["1.txt"]
    [line] = lines
    assert line == (
        f"{tmp_path / pattern}: text files read: 1; left out: .csv (1), .pdf (2), "
        "broken link (1), hidden (2), not a file (1), without a suffix (1)"
    )


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        *((pattern, NO_FILE) for pattern in ("nowhere.txt", "nowhere/*.txt", "empty")),
        *((pattern, r"without \.txt, .* left out: \.pdf \(2\)$") for pattern in (".", "*.pdf")),
    ],
)
def test_a_path_without_texts_is_named_with_what_is_there(tmp_path, pattern, line):
    fill(tmp_path, "a.pdf", "b.pdf")
    (tmp_path / "empty").mkdir()
    assert_refused(line, list, read_texts(tmp_path / pattern), error=FileNotFoundError)


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        ("?.txt", ["1.txt", "2.txt"]),
        ("[12].txt", ["1.txt", "2.txt"]),
        ("[!1].t?t", ["2.txt"]),
        ("deep/?.*", ["3.txt"]),
        ("d??p", ["3.txt"]),
        ("**/[13].txt", ["1.txt", "3.txt"]),
    ],
)
def test_globs(tmp_path, pattern, read):
    fill(tmp_path, "1.txt", "2.txt", "10.txt", "deep/3.txt", "deep/.h/5.txt", ".4.txt")
    assert list(read_texts(tmp_path / pattern)) == read


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


def test_an_article_starts_at_a_title_between_empty_lines():
    first, second = articles(LINES)
    assert first.endswith(" = = Section = = \n ") and second == " = Two = \n \n Text . "


@given(st.lists(st.sampled_from([*LINES, "\n", " = Three = \n"]), max_size=30))
def test_no_line_is_lost(lines):
    joined = "\n".join(articles(lines))
    assert joined == ("".join(lines)[:-1] if "".join(lines).strip() else "")
