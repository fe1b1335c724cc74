"""sha256 of files beside them, in the form that `sha256sum --check SHA256SUMS` reads."""

import re
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path, PurePosixPath

from value_aware_attention.storage.reading import reading

__all__ = [
    "CARD",
    "CHECKSUMS",
    "check_checksums",
    "checksum",
    "listed",
    "unnamed",
    "write_checksums",
]

CHECKSUMS = "SHA256SUMS"
FOLDERS_ABOVE = 3
"""Parent folders that are searched for a file's SHA256SUMS: tokens lie in <length>/<source>/."""
CARD = "README.md"
"""A model's card has no checksum, because people may edit it."""
LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write_checksums(folder: Path) -> None:
    """Writes the sha256 of every file below a folder that is being made, but of a card."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    lines = (
        f"{checksum(file)}  {file.relative_to(folder).as_posix()}\n"
        for file in files
        if file.name not in (CARD, CHECKSUMS)
    )
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def unnamed(folder: Path) -> list[Path]:
    """Lists the files below a folder that no SHA256SUMS at or below it names, but for cards."""
    files = sorted(file for file in folder.rglob("*") if not file.is_dir())
    named = {
        file.parent / name
        for file in files
        if file.name == CHECKSUMS
        for name in listed(file.parent)
    }
    cards = {one.with_name(CARD) for one in named}
    return [file for file in files if file.name != CHECKSUMS and file not in named | cards]


def check_checksums(path: Path | str, remedy: str = "make it again") -> None:
    """Raises ValueError where a file, or one below a folder, has changed since it was written.

    What no SHA256SUMS names, in its folder or the three above it, is taken as it is.
    """
    given = Path(path)
    for folder in (given, *given.parents[:FOLDERS_ABOVE]):
        if not (folder / CHECKSUMS).is_file():
            continue
        for name, written in listed(folder, remedy).items():
            file = folder / name
            if not file.is_relative_to(given):
                continue
            if not file.is_file():
                raise ValueError(f"{file} is missing: {remedy}")
            if checksum(file) != written:
                raise ValueError(f"{file} has changed since it was written: {remedy}")
        return


def checksum(file: Path) -> str:
    """sha256 of a file's bytes in hexadecimal digits, one pass over it for as long as it is."""
    state = file.stat()
    return _checksum(file, state.st_size, state.st_mtime_ns, state.st_ino)


@lru_cache(maxsize=1024)
def _checksum(file: Path, size: int, written: int, inode: int) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def listed(folder: Path, remedy: str = "move it away") -> dict[str, str]:
    """Reads a folder's SHA256SUMS, name -> sha256; {} where there is none.

    Raises ValueError for other lines than that, and for a name outside of the folder.
    """
    file = folder / CHECKSUMS
    if not file.is_file():
        return {}
    with reading(file, remedy):
        text = file.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            raise ValueError("it has no last line" if text else "it is empty")
        found = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not (parts := LINE.fullmatch(line)):
                raise ValueError(f"line {number} is no sha256 with a name")
            name = PurePosixPath(parts[2])
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"line {number} names {name}, which lies outside of its folder")
            found[str(name)] = parts[1]
    return found
