"""Reads texts from files; all commands and apps read them through this module.

    report = probe.probe(model, tokenizer, read_texts("notes.txt"))

Nothing here imports torch.
"""

import gzip
import json
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from glob import escape, glob
from io import TextIOWrapper
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO, cast

SUFFIXES = (".txt", ".md", ".jsonl", ".tokens")  # case-insensitive; `.gz` may follow
ALLOWED = f"{', '.join(SUFFIXES)}, plain or .gz"


def read_texts(
    path: Path | str, *, field: str = "text", show: Callable[[str], None] | None = None
) -> Iterator[str]:
    r"""Reads the texts of a file, of all files below a folder, or of all matches of a glob.

    `.txt` and `.md`: one text a file. `.jsonl`: the string `field` of each line. `.tokens`:
    WikiText's format, one text per level-1 heading ` = Title = `. Each is plain or `.gz`, in UTF-8
    with or without a byte order mark. `\r\n` is read as `\n`; nothing else is changed. Files come
    in the order of their paths. Links are followed; a folder reached twice is read once. Within a
    folder or glob, hidden files and files with other suffixes are skipped.

    When the first text is requested, raises FileNotFoundError if there is no such file, and
    ValueError if a named file has another suffix or if content does not match the suffix.

    Args:
        path: File, folder or glob (`*`, `?`, `[...]`, and `**` for any folders).
        field: Key of the text in a `.jsonl` line.
        show: Called with one line that counts the skipped files, if there are any.
    """
    counts: Counter[str] = Counter()
    files = sorted(text_paths(Path(path), counts))
    if show is not None and counts.total() > len(files):
        show(f"{path}: text files read: {len(files)}; left out: {_left_out(counts)}")
    for file in files:
        with _reading(file) as lines:
            for text in _texts(file, lines, field):
                if "\0" in text:
                    raise ValueError(f"{file} is binary, not text: it holds a zero byte")
                yield text


def text_paths(path: Path, counts: Counter[str] | None = None) -> Iterator[Path]:
    """Yields the text files that a path names; `counts` collects the other files by reason.

    Raises FileNotFoundError if there are none, ValueError for a file with another suffix.
    """
    if path.is_file() and suffix(path) not in SUFFIXES:
        raise ValueError(f"{path}: unknown suffix, allowed are {ALLOWED}")
    counts = Counter() if counts is None else counts
    for file in _files(path):
        reason = "" if file == path else _why_not(file)
        counts[reason] += 1
        if not reason:
            yield file
    if not counts[""]:
        raise FileNotFoundError(
            f"{path}: no such file, or a folder or glob without {ALLOWED}"
            f"{'; left out: ' * bool(counts.total())}{_left_out(counts)}"
        )


def _left_out(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} ({n})" for kind, n in sorted(counts.items()) if kind)


def _files(path: Path) -> Iterable[Path]:
    """Lists all files that a path names; for a folder that a glob matches, the files below it."""
    if path.exists():
        return _below(path)
    files = sorted(chain.from_iterable(_below(Path(match)) for match in _matches(str(path))))
    # a file below several matches is listed once, under its first path
    return {(os.path.realpath(file.parent), file.name): file for file in reversed(files)}.values()


def _below(path: Path) -> Iterable[Path]:
    return chain.from_iterable(files for _, files in _walk(path)) if path.is_dir() else [path]


def _matches(pattern: str) -> Iterable[str]:
    """Lists the matches of a glob; `**` does not follow loops of links."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob(pattern)
    place = parts.index("**")
    folders = (folder for top in glob(str(Path(*parts[:place]))) for folder, _ in _walk(Path(top)))
    patterns = (str(Path(escape(str(folder)), *parts[place + 1 :])) for folder in folders)
    return chain.from_iterable(map(_matches, patterns))


def _walk(top: Path) -> Iterator[tuple[Path, Iterable[Path]]]:
    """Yields each folder that is not hidden, with its files and its hidden folders.

    Each real folder comes once; folders behind links come last.
    """
    visited, waiting = set[str](), deque([top])
    while waiting:
        folder = waiting.popleft()
        if os.path.realpath(folder) in visited:
            continue
        visited.add(os.path.realpath(folder))
        entries = sorted(folder.iterdir())
        inner = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        waiting.extendleft(entry for entry in inner if not entry.is_symlink())
        waiting.extend(entry for entry in inner if entry.is_symlink())
        yield folder, set(entries).difference(inner)


def _why_not(path: Path) -> str:
    """Returns the reason for skipping a path in a folder; "" for a text or a broken link to one."""
    if path.name.startswith("."):
        return "hidden"
    if suffix(path) not in SUFFIXES:
        return suffix(path) or ("without a suffix" if path.exists() else "broken link")
    return "" if path.is_file() or not path.exists() else "not a file"


def suffix(file: Path) -> str:
    """Returns the suffix of a file's name without `.gz`, in lower case."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _texts(file: Path, lines: Iterator[str], field: str) -> Iterator[str]:
    match suffix(file):
        case ".jsonl":
            return _json_texts(file, lines, field)
        case ".tokens":
            return articles(lines)
        case _:
            return iter(["".join(lines)])


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Joins WikiText's lines into articles and keeps all line ends, which are tokens of the corpus.

    An article starts at a level-1 heading (` = Title = `; sections have ` = = `) between two empty
    lines. Without the empty lines, formulas and scores would count as headings.
    """
    article: list[str] = []
    for line, after in pairwise(chain((line.rstrip("\n") for line in lines), [""])):
        is_apart = not "".join([*article[-1:], after]).strip()
        if _is_title(line) and is_apart and any(text.strip() for text in article):
            yield "\n".join(article)
            article = []
        article.append(line)
    if any(text.strip() for text in article):
        yield "\n".join(article)


def _is_title(line: str) -> bool:
    text = line.strip()
    return (
        len(text) > 4
        and text.startswith("= ")
        and text.endswith(" =")
        and not (text.startswith("= =") or text.endswith("= ="))
    )


def _json_texts(file: Path, lines: Iterable[str], field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{file}, line {number}, is not JSON: {getattr(error, 'msg', error)}"
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise ValueError(f"{file}, line {number}, has no field {field!r} with a text")
        try:
            row[field].encode()
        except UnicodeEncodeError as error:  # JSON can escape a lone surrogate
            raise ValueError(
                f"{file}, line {number}, has {ascii(row[field][error.start])[1:-1]} in {field!r}, "
                f"half of a character, which is no UTF-8"
            ) from None
        yield row[field]


@contextmanager
def _reading(file: Path) -> Iterator[Iterator[str]]:
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as raw:
            # newline="\n" splits only at line feeds: WikiText has other separators within lines
            text = TextIOWrapper(cast(BinaryIO, raw), encoding="utf-8-sig", newline="\n")
            yield (line.replace("\r\n", "\n") for line in text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a complete gzip file: {error}") from None
