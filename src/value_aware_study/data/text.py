"""Sources of documents: local files, docstrings of installed packages, data sets of the hub.

Nothing here imports torch, and `datasets` only when a hub data set is read: the corpus stage
starts at once.
"""

import ast
import gzip
import inspect
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, Literal, cast
from unittest.mock import patch

Split = Literal["train", "validation", "evaluation"]
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")

SUFFIXES = (".txt", ".jsonl", ".tokens")
"""Endings of text files, `.gz` apart."""

TEST_FOLDERS = {"test", "tests", "testing", "_testing"}
"""Folders of a package that `Docstrings` leaves out."""


@dataclass(frozen=True)
class Document:
    """Holds a text and its publisher's split; None leaves the choice to `write_corpus`."""

    text: str
    split: Split | None = None


@dataclass(frozen=True)
class TextFiles:
    """Reads local text: a file, a folder (read recursively) or a glob; each file plain or `.gz`.

    `.txt`: one document a file. `.jsonl`: the string `field` of each line. `.tokens`: WikiText's
    format, one document per level-1 heading ` = Title = `. All are UTF-8, with or without a byte
    order mark. With `evaluation_path`, `path` is the train split and `evaluation_path` the
    evaluation split.
    """

    path: str | Path
    evaluation_path: str | Path | None = None
    field: str = "text"

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


def text_paths(path: Path) -> Iterator[Path]:
    """Yields the text files that a path names: a file, all below a folder, or those of a glob.

    Raises FileNotFoundError where there is none, ValueError for one that ends otherwise.
    """
    allowed = f"{', '.join(SUFFIXES)}, plain or .gz"
    found = False
    for file in _files(path):
        if suffix(file) not in SUFFIXES:
            raise ValueError(f"{file}: unknown suffix, allowed are {allowed}")
        found = True
        yield file
    if not found:
        raise FileNotFoundError(f"{path}: no such file, or a folder or glob without {allowed}")


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for folder, _, names in os.walk(path, onerror=_refuse):
            found = (Path(folder, name) for name in names)
            yield from (one for one in found if suffix(one) in SUFFIXES and _can_be_text(one))
    elif path.is_file():
        yield path
    elif "*" in str(path):
        root = Path(path.anchor)  # "" for a relative path
        yield from root.glob(str(path.relative_to(root)))


def _refuse(error: OSError) -> None:
    """Raises the error of an unreadable folder, which `os.walk` would skip."""
    raise error


def _can_be_text(file: Path) -> bool:
    """Tells whether this is a file or a broken link, which must not be skipped unseen."""
    return file.is_file() or not file.exists()


def suffix(file: Path) -> str:
    """Returns the suffix of a file's name without `.gz`."""
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


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
        except UnicodeEncodeError as error:  # JSON can escape a lone surrogate
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


@dataclass(frozen=True, kw_only=True)
class Docstrings:
    """Reads the docstrings of an installed package: one document per module, in the order of paths.

    The package is found and parsed, never imported; test folders are left out, and a docstring
    that occurs again in the package is kept once. The same version gives the same bytes.
    """

    package: str

    def __iter__(self) -> Iterator[Document]:
        seen: set[str] = set()
        for docstrings in map(docstrings_of, _modules(self.package)):
            if fresh := [one for one in dict.fromkeys(docstrings) if one not in seen]:
                seen.update(fresh)
                yield Document("\n\n".join(fresh))


def docstrings_of(file: Path) -> list[str]:
    """Returns a Python file's docstrings in source order, cleaned; none if it does not parse."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []  # packages ship templates and files for other versions of Python
    return list(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        # a lone surrogate is legal in a Python literal and cannot be written as UTF-8
        if text := text.encode(errors="ignore").decode().replace("\0", "").strip():
            yield text
    # a definition is a statement: expressions, most of the tree, are never entered
    for block in ("body", "orelse", "handlers", "finalbody"):
        children = getattr(node, block, None)
        for child in children if isinstance(children, list) else ():
            yield from _docstrings(child)


def _modules(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # the parent of a dotted name
        spec = None
    if spec is None:
        raise ValueError(f"package {package!r} is not installed: name one that is")
    if not spec.submodule_search_locations:
        return [Path(spec.origin or "")]
    files = {
        file.relative_to(location).as_posix(): file
        for location in spec.submodule_search_locations
        for file in Path(location).rglob("*.py")
    }
    return [file for name, file in sorted(files.items()) if not _is_test(PurePosixPath(name))]


def _is_test(file: PurePosixPath) -> bool:
    return not TEST_FOLDERS.isdisjoint(file.parts) or file.name.startswith("test_")


@dataclass(frozen=True, kw_only=True)
class HubDocuments:
    """Loads a data set of the Hugging Face hub whose rows are documents: the text in `field`.

    `path` and `name` are those of `datasets.load_dataset` (which since version 4 runs no loading
    script); a local folder laid out like the hub's repository works as well. `splits` maps the
    data set's splits to ours; null leaves the choice to `write_corpus`. `cache` is the folder of
    the loaded data set; None = that of `datasets`. Downloaded files stay in the hub's own cache:
    after a lost connection the next iteration downloads only files that are missing there, and a
    data set that was loaded once is read without the hub.
    """

    path: str
    name: str | None
    splits: Mapping[str, Split | None]
    field: str
    cache: str | Path | None = None

    def __iter__(self) -> Iterator[Document]:
        for hub_split, split in self.splits.items():
            for text in self._texts(self._rows(hub_split)):
                yield Document(text, split)

    def _texts(self, rows: Iterator[str]) -> Iterator[str]:
        return rows

    def _rows(self, hub_split: str) -> Iterator[str]:
        for row in self._load(hub_split):
            text = row.get(self.field)
            if not isinstance(text, str):
                columns = ", ".join(row)
                raise ValueError(f"{self.path} has no texts in {self.field!r}, only {columns}")
            yield text

    def _load(self, hub_split: str) -> Any:
        import datasets  # slow to import: the other sources do without

        from value_aware_attention.hugging_face.saved import hub_answers  # as slow

        silent = not Path(self.path).exists() and not hub_answers()
        options = {"split": hub_split, "cache_dir": self.cache and str(self.cache)}
        given = f"data set {self.path!r}, name {self.name!r}, split {hub_split!r}"
        try:
            # where the hub does not answer, its client would try again for minutes
            with patch("datasets.config.HF_HUB_OFFLINE", silent or datasets.config.HF_HUB_OFFLINE):
                # sizes in a data set's card may be out of date
                return datasets.load_dataset(
                    self.path, self.name, verification_mode="no_checks", **options
                )
        except (FileNotFoundError, ConnectionError) as error:
            later = "the hub does not answer; with a network, the same command continues"
            raise FileNotFoundError(
                f"data set {self.path!r} is neither a folder here nor reachable on the hub: "
                + (later if silent else _first_line(error))
            ) from None
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{given} cannot be loaded: {_first_line(error)}") from None
        except Exception as error:  # of whichever HTTP client `datasets` uses
            raise ConnectionError(
                f"{given}, stopped ({type(error).__name__}: {_first_line(error)}); "
                "the same command continues with the files that are missing"
            ) from error


class HubArticles(HubDocuments):
    """Loads a data set whose rows are the lines of WikiText: rows are joined into articles."""

    def _texts(self, rows: Iterator[str]) -> Iterator[str]:
        return articles(rows)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
