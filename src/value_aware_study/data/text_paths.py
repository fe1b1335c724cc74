"""Which files of text there are; none is opened for it."""

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["suffix", "text_paths"]

SUFFIXES = (".txt", ".jsonl", ".tokens")


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
    """Raises what a walk would pass over: a folder that cannot be read."""
    raise error


def _can_be_text(file: Path) -> bool:
    """Whether it is a file, or a link to one that is gone, which must not be passed over."""
    return file.is_file() or not file.exists()


def suffix(file: Path) -> str:
    """How a file's name ends, `.gz` apart."""
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
