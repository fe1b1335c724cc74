"""sha256 of files beside them, in the form that `sha256sum --check SHA256SUMS` reads."""

from functools import lru_cache
from hashlib import file_digest
from pathlib import Path

from value_aware_attention.storage.atomic import write_text
from value_aware_attention.storage.reading import reading

__all__ = ["CHECKSUMS", "check_checksums", "checksum", "write_checksums"]

CHECKSUMS = "SHA256SUMS"
FOLDERS_ABOVE = 3
"""In which a file's checksum is looked for: tokens lie in <length>/<source>/."""
BY_HAND = ".md"
"""What people may change: a model's card"""


def write_checksums(folder: Path) -> None:
    """Writes the sha256 of every file below a folder, its texts for people left out."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    lines = (
        f"{checksum(file)}  {file.relative_to(folder).as_posix()}\n"
        for file in files
        if file.suffix != BY_HAND and file.name != CHECKSUMS
    )
    write_text(folder / CHECKSUMS, "".join(lines))


def check_checksums(path: Path | str, remedy: str = "make it again") -> None:
    """Raises ValueError where a file, or one below a folder, has changed since it was written.

    What no SHA256SUMS names, in its folder or the three above it, is taken as it is.
    """
    given = Path(path)
    for folder in (given, *given.parents[:FOLDERS_ABOVE]):
        if not (folder / CHECKSUMS).is_file():
            continue
        for name, written in _listed(folder / CHECKSUMS, remedy).items():
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


def _listed(file: Path, remedy: str) -> dict[str, str]:
    """Name -> sha256."""
    with reading(file, remedy):
        text = file.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            raise ValueError("it has no last line" if text else "it is empty")
        lines = text.splitlines()
        parts = (line.split("  ", 1) for line in lines)
        listed = {name: digest for digest, name in parts}
    return listed
