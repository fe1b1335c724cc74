"""Local text files and WikiText's format."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, BinaryIO, cast

from value_aware_study.data.documents import Document, Split
from value_aware_study.data.text_paths import suffix, text_paths


class TextFiles:
    """Reads local text: a file, a folder (read recursively) or a glob; each file plain or `.gz`.

    `.txt`: one document a file. `.jsonl`: the string `field` of each line. `.tokens`: WikiText's
    format, one document per level-1 heading ` = Title = `. All are UTF-8, with or without a byte
    order mark. With `evaluation_path`, `path` is the train split and `evaluation_path` the
    evaluation split.
    """

    def __init__(
        self, path: str | Path, *, evaluation_path: str | Path | None = None, field: str = "text"
    ) -> None:
        self.path = path
        self.evaluation_path = evaluation_path
        self.field = field

    def __iter__(self) -> Iterator[Document]:
        split: Split | None = None if self.evaluation_path is None else "train"
        yield from self._documents(self.path, split)
        if self.evaluation_path is not None:
            yield from self._documents(self.evaluation_path, "evaluation")

    def _documents(self, path: str | Path, split: Split | None) -> Iterator[Document]:
        for file in sorted(text_paths(Path(path))):
            with _reading(file) as lines:
                for text in self._texts(file, lines):
                    if "\0" in text:
                        raise ValueError(f"{file} is binary, not text: it holds a zero byte")
                    yield Document(text, split)

    def _texts(self, file: Path, lines: IO[str]) -> Iterator[str]:
        match suffix(file):
            case ".jsonl":
                return _json_texts(file, lines, self.field)
            case ".tokens":
                return articles(lines)
            case _:
                return iter([lines.read()])


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Joins WikiText's lines into articles; every line is kept, its end is a token of the corpus.

    An article starts at a level-1 heading (` = Title = `, a section has ` = = `) between two empty
    lines; without the empty lines, formulas and scores would pass for headings.
    """
    article: list[str] = []
    before = ""
    for line, after in pairwise(chain((line.rstrip("\n") for line in lines), [""])):
        starts = _is_title(line) and not before.strip() and not after.strip()
        if starts and any(text.strip() for text in article):
            yield "\n".join(article)
            article = []
        article.append(line)
        before = line
    if any(text.strip() for text in article):
        yield "\n".join(article)


def _is_title(line: str) -> bool:
    text = line.strip()
    is_heading = len(text) > 4 and text.startswith("= ") and text.endswith(" =")
    return is_heading and not text.startswith("= =") and not text.endswith("= =")


def _json_texts(file: Path, lines: IO[str], field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise ValueError(f"{file}, line {number}, is not JSON: {reason}") from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise ValueError(f"{file}, line {number}, has no field {field!r} with a text")
        try:
            row[field].encode()
        except UnicodeEncodeError as error:  # JSON has names for halves of characters
            half = ascii(row[field][error.start])[1:-1]
            raise ValueError(
                f"{file}, line {number}, has {half} in {field!r}, half of a character, which is no "
                "UTF-8"
            ) from None
        yield row[field]


@contextmanager
def _reading(file: Path) -> Iterator[IO[str]]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as raw:
            # newline="\n" splits at line feeds alone: WikiText has lines with other separators
            yield TextIOWrapper(cast(BinaryIO, raw), encoding="utf-8-sig", newline="\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a complete gzip file: {error}") from None
