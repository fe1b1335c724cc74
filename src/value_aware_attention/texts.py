"""Reads texts from files, in the one way in which every command and app reads them.

    report = probe.probe(model, tokenizer, read_texts("notes.txt"))

Nothing here imports torch.
"""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, BinaryIO, cast

SUFFIXES = (".txt", ".md", ".jsonl", ".tokens")
"""Endings of text files in any case, `.gz` apart."""
ALLOWED = f"{', '.join(SUFFIXES)}, plain or .gz"


def read_texts(
    path: Path | str, *, field: str = "text", show: Callable[[str], None] | None = None
) -> Iterator[str]:
    r"""Reads the texts of a file, of all files below a folder, or of those that a glob matches.

    `.txt` and `.md`: one text a file. `.jsonl`: the string `field` of each line. `.tokens`:
    WikiText's format, one text per level-1 heading ` = Title = `. Each is plain or `.gz`, UTF-8
    with or without a byte order mark, and `\r\n` is read as `\n`; a lone `\r` stays. Files come in
    the order of their paths. Links are followed, and a folder that is reached twice is read once.
    Files of a folder or glob that are hidden or end otherwise are left out.

    Raises FileNotFoundError where there is no text, ValueError for a file that is named and ends
    otherwise, or whose content is not what its name says.

    Args:
        path: File, folder or glob (`*`, `?`, `[...]`, and `**` for any folders).
        field: Of a `.jsonl` line, the key of its text.
        show: Is given one line that counts what is left out, if anything is. None: nothing is
            shown.
    """
    left_out: Counter[str] = Counter()
    files = sorted(text_paths(Path(path), left_out))
    if left_out and show is not None:
        show(f"{path}: text files read: {len(files)}; left out: {_counted(left_out)}")
    for file in files:
        with _reading(file) as lines:
            for text in _texts(file, lines, field):
                if "\0" in text:
                    raise ValueError(f"{file} is binary, not text: it holds a zero byte")
                yield text


def _counted(left_out: Counter[str]) -> str:
    return ", ".join(f"{kind} ({count})" for kind, count in left_out.most_common())


def text_paths(path: Path, left_out: Counter[str] | None = None) -> Iterator[Path]:
    """Yields the text files that a path names, and counts in `left_out` what else is there.

    Raises FileNotFoundError where there is none, ValueError for a file that ends otherwise.
    """
    left_out = Counter() if left_out is None else left_out
    if path.is_file() and suffix(path) not in SUFFIXES:
        raise ValueError(f"{path}: unknown suffix, allowed are {ALLOWED}")
    is_empty = True
    for file in _files(path):
        if reason := "" if file == path else _why_not(file):
            left_out[reason] += 1
        else:
            is_empty = False
            yield file
    if is_empty:
        there = f"; left out: {_counted(left_out)}" if left_out else ""
        raise FileNotFoundError(
            f"{path}: no such file, or a folder or glob without {ALLOWED}{there}"
        )


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from _below(path)
    else:
        places = set()
        for file in _matches(Path(path.anchor), path.relative_to(path.anchor).parts):
            if (place := (os.path.realpath(file.parent), file.name)) not in places:
                places.add(place)
                yield file


def _below(folder: Path) -> Iterator[Path]:
    return chain.from_iterable(entries for _, entries in _walk(folder))


def _walk(top: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yields each folder that is not hidden, with its files and hidden folders.

    Each real folder comes once, under a path without links below `top` if it has one.
    """
    visited: set[str] = set()
    tops = [top]
    for start in tops:  # it grows by the links that are met
        for name, folders, files in os.walk(start, onerror=_refuse):
            if (real := os.path.realpath(name)) in visited:
                folders.clear()
                continue
            visited.add(real)
            hidden = [folder for folder in folders if folder.startswith(".")]
            folders[:] = sorted(set(folders).difference(hidden))
            tops += [Path(name, folder) for folder in folders if Path(name, folder).is_symlink()]
            yield Path(name), [Path(name, entry) for entry in (*files, *hidden)]


def _refuse(error: OSError) -> None:
    """Raises the error of an unreadable folder, which `os.walk` would skip."""
    raise error


def _matches(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yields what a glob matches; a folder among it is read as one that is named."""
    if not parts:
        yield from _below(folder) if folder.is_dir() else [folder]
    elif os.path.lexists(folder / parts[0]):  # a name may hold a bracket
        yield from _matches(folder / parts[0], parts[1:])
    elif parts[0] == "**":
        for inner, _ in _walk(folder) if parts[1:] else [(folder, [])]:
            yield from _matches(inner, parts[1:])
    elif folder.is_dir():
        entries = sorted(folder.glob(parts[0]), key=lambda entry: (entry.is_symlink(), entry))
        for entry in entries:
            is_hidden = entry.name.startswith(".")
            yield from [entry] if is_hidden else _matches(entry, parts[1:])


def _why_not(path: Path) -> str:
    """Says why a path in a folder is not read; "" for a text, and for a broken link to one."""
    if path.name.startswith("."):
        return "hidden folder" if path.is_dir() else "hidden"
    if suffix(path) not in SUFFIXES:
        return (
            (suffix(path) or path.suffix or "without a suffix") if path.exists() else "broken link"
        )
    return "" if path.is_file() or not path.exists() else "not a file"


def suffix(file: Path) -> str:
    """Returns the suffix of a file's name without `.gz`, in lower case."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _texts(file: Path, lines: Iterator[str], field: str) -> Iterator[str]:
    match suffix(file):
        case ".jsonl":
            return map(_with_line_feeds, _json_texts(file, lines, field))
        case ".tokens":
            return articles(lines)
        case _:
            return iter(["".join(lines)])


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


def _json_texts(file: Path, lines: Iterable[str], field: str) -> Iterator[str]:
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
def _reading(file: Path) -> Iterator[Iterator[str]]:
    try:
        is_packed = file.suffix.lower() == ".gz"
        with gzip.open(file) if is_packed else file.open("rb") as raw:
            # newline="\n" splits at line feeds alone: WikiText has lines with other separators
            lines: IO[str] = TextIOWrapper(cast(BinaryIO, raw), encoding="utf-8-sig", newline="\n")
            yield map(_with_line_feeds, lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a complete gzip file: {error}") from None


def _with_line_feeds(text: str) -> str:
    r"""Replaces `\r\n`, so that a text is the same whichever system wrote it."""
    return text.replace("\r\n", "\n")
