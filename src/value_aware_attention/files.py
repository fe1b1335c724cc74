"""Writes files and folders whole or not at all, and checks them by sha256 when they are read.

A new file or folder is written next to its target under a hidden name, flushed to disk, then
renamed. The next writer removes the leftovers of a killed process. SHA256SUMS lists the checksums
of a folder's files, and a JSON object holds the checksum of its own content.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

CHECKSUMS = "SHA256SUMS"
"""Name of a folder's list of checksums, in the form that `sha256sum --check` reads"""
CHECKSUM_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
CARD = "README.md"
"""Name of a model's card, which has no checksum because people may edit it"""
CONTENT_SHA256 = "content_sha256"
"""Key of a JSON object for the checksum of its other content"""
FOLDERS_ABOVE = 3
"""Number of parent folders searched for the SHA256SUMS of a file (tokens lie two levels down)"""
PARTIAL_ENDING, OLD_ENDING, LOCK_ENDING = ".partial", ".old", ".lock"
"""Suffixes of hidden names: an unfinished file or folder, a folder being replaced, a lock"""
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Error numbers of file systems without locks, some of them on a network"""
NO_ROOM = {
    "No space left on device": "no space left",
    "Disk quota exceeded": "the quota is used up",
    "File too large": "files may not grow as large",
    # torch.save reports only this when its archive cannot grow
    "unexpected pos": "no space left",
    "iostream error": "no space left",
    "PytorchStreamWriter failed": "no space left",
}
"""Words in a library's error when a file cannot grow -> the reason"""


class DiskFull(OSError):
    """Names the folder whose disk is full, in one line."""


def write_text(path: Path | str, text: str) -> None:
    """Writes a UTF-8 file through `new_file`."""
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def new_file(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path to write; the file moves to `path` when the block succeeds.

    Several processes may write one file: each uses its own temporary name, and the last one wins.
    Raises DiskFull if there is no space left.
    """
    target = Path(path)
    for left_over in target.parent.glob(f".*{PARTIAL_ENDING}"):
        # The file of an ended process is unlocked. An error means that a process is writing it,
        # that it is a folder, or that the file system has no locks.
        with suppress(OSError), FileLock(left_over, blocking=False, fallback_to_soft=False):
            left_over.unlink(missing_ok=True)
    partial = target.with_name(f".{target.name}.{uuid4().hex[:12]}{PARTIAL_ENDING}")
    with _locked(partial), full_disk_named(target.parent):
        yield partial
        _flush(partial)
        os.replace(partial, target)
        _flush(target.parent)


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yields a temporary folder to fill; it replaces `path` when the block succeeds.

    It gets a SHA256SUMS, which marks it as written by this program, unless its subfolders have
    their own. The old or the new folder exists at every moment, under its own name or under a
    hidden name that the next call finds. Raises ValueError before it yields if another process
    writes there or `check_replaceable` refuses; DiskFull if the disk is full.
    """
    target = Path(path)
    target = target.resolve() if target.is_symlink() else target  # the link itself stays
    old = target.with_name(f".{target.name}{OLD_ENDING}")
    with _folder_beside(target) as partial:
        if old.exists() and not target.exists():  # a writer was killed between the two renames
            os.replace(old, target)
        check_replaceable(target)
        yield partial
        if unnamed(partial):
            write_checksums(partial)
        _flush(*partial.rglob("*"), partial)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.replace(target, old)
        os.replace(partial, target)
        _flush(target.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_files(path: Path | str, *, last: str) -> Iterator[Path]:
    """Yields a temporary folder to fill; its files are then moved into `path`, `last` at the end.

    Other files in `path` stay. Raises ValueError if another process writes there, DiskFull if the
    disk is full.
    """
    target = Path(path)
    with _folder_beside(target) as partial:
        yield partial
        files = sorted(partial.iterdir(), key=lambda file: (file.name == last, file.name))
        _flush(*files, partial)
        target.mkdir(exist_ok=True)
        for file in files:
            os.replace(file, target / file.name)
        _flush(target)


@contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """Yields an empty hidden folder next to `target`; it is locked, and removed at the end."""
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; a folder is written there")
    partial = target.with_name(f".{target.name}{PARTIAL_ENDING}")
    with held(target), full_disk_named(target.parent):
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed writer
        try:
            partial.mkdir()
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_replaceable(path: Path | str) -> None:
    """Raises ValueError for a folder that holds a file not written by this program.

    No SHA256SUMS in the folder names such a file. Empty and missing folders are fine.
    """
    folder = Path(path)
    if folder.is_dir() and (files := unnamed(folder)):
        raise ValueError(
            f"{folder} holds {files[0].relative_to(folder)}, which no {CHECKSUMS} there names, so "
            f"that it is not this program's to replace: give another folder, or move the file away"
        )


@contextmanager
def held(
    path: Path | str, run: str = "a run", instead: str = "write to another folder"
) -> Iterator[None]:
    """Locks `path` for this process; the system unlocks it when the process ends or is killed.

    Raises ValueError at once if another process holds the lock.
    """
    target = Path(path)
    refusal = f"{target} belongs to {run} that is still going: wait for it, or {instead}"
    with _locked(target.with_name(f".{target.name}{LOCK_ENDING}"), refusal):
        yield


@contextmanager
def _locked(file: Path, refusal: str | None = None) -> Iterator[None]:
    """Creates a lock file, held until the block or the process ends; the block removes it.

    If another process holds the lock, raises ValueError with `refusal`; without a refusal, waits.
    """
    lock = FileLock(file, blocking=refusal is None, fallback_to_soft=False)
    with full_disk_named(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()  # FileLock would try for ever in a folder like /proc, which takes no file
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(refusal) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def _flush(*paths: Path) -> None:
    """Flushes files and folder entries to disk; before that a rename may be lost."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Replaces the error that a library raises on a full disk by DiskFull."""
    try:
        yield
    except Exception as error:
        reason = _lack_of_room(error)
        if reason is None or isinstance(error, DiskFull):
            raise
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise DiskFull(f"{reason} in {folder} ({free:,} bytes are free)") from error


def _lack_of_room(error: BaseException | None) -> str | None:
    """Returns the reason if the error, or one in its chain of causes, is a lack of space."""
    while error is not None:
        for words, reason in NO_ROOM.items():
            if words in str(error):
                return reason
        error = error.__cause__ or error.__context__
    return None


def write_checksums(folder: Path) -> None:
    """Writes the SHA256SUMS of all files below a folder except cards."""
    lines = (
        f"{checksum(file)}  {file.relative_to(folder).as_posix()}\n"
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in (CARD, CHECKSUMS)
    )
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def check_checksums(path: Path | str, remedy: str = "make it again") -> None:
    """Raises ValueError if a file, or a file below a folder, has changed since it was written.

    A file passes unchecked if no SHA256SUMS in its folder or the three above it names it.
    """
    path = Path(path)
    folders = (path, *path.parents[:FOLDERS_ABOVE])
    root = next((folder for folder in folders if (folder / CHECKSUMS).is_file()), path)
    for name, written in listed(root, remedy).items():
        if (file := root / name).is_relative_to(path):
            if not file.is_file():
                raise ValueError(f"{file} is missing: {remedy}")
            if checksum(file) != written:
                raise ValueError(f"{file} has changed since it was written: {remedy}")


def unnamed(folder: Path) -> list[Path]:
    """Lists the files below a folder that no SHA256SUMS at or below it names, except cards."""
    files = sorted(file for file in folder.rglob("*") if not file.is_dir())
    named = {
        file.parent / name
        for file in files
        if file.name == CHECKSUMS
        for name in listed(file.parent)
    }
    cards = {file.with_name(CARD) for file in named}
    return [file for file in files if file.name != CHECKSUMS and file not in named | cards]


def listed(folder: Path, remedy: str = "move it away") -> dict[str, str]:
    """Reads a folder's SHA256SUMS, name -> sha256; {} if there is none.

    Raises ValueError for a malformed line and for a name outside the folder.
    """
    file = folder / CHECKSUMS
    if not file.is_file():
        return {}
    with reading(file, remedy):
        text = file.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            raise ValueError("it has no last line" if text else "it is empty")
        sums = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not (columns := CHECKSUM_LINE.fullmatch(line)):
                raise ValueError(f"line {number} is no sha256 with a name")
            name = PurePosixPath(columns[2])
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"line {number} names {name}, which lies outside of its folder")
            sums[str(name)] = columns[1]
    return sums


def checksum(file: Path) -> str:
    """Returns the sha256 of a file in hexadecimal digits; an unchanged file is read only once."""
    state = file.stat()
    return _checksum(file, state.st_size, state.st_mtime_ns, state.st_ino)


@lru_cache(maxsize=1024)
def _checksum(file: Path, size: int, written: int, inode: int) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def save_json(path: Path | str, text: str) -> None:
    """Writes the text of a JSON object with its checksum, through `new_file`."""
    write_text(path, with_checksum(text))


def load_json(path: Path | str, *keys: str, remedy: str = "make it again") -> dict[str, Any]:
    """Reads a JSON object that has these keys.

    Raises ValueError with the file's name for anything else (also for NaN and infinity), and for
    content that does not match its checksum.
    """
    with reading(path, remedy):
        content = from_json(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
        content = without_checksum(content)
        for key in keys:
            content[key]
    return content


def to_json(content: object, **options: Any) -> str:
    """Serializes numbers, text, lists and dictionaries; `options` are those of `json.dumps`.

    Raises ValueError with the key path of the first number that is not finite.
    """
    _refuse_not_finite(content)
    return json.dumps(content, allow_nan=False, **options)


def from_json(text: str) -> Any:
    """Parses JSON; raises ValueError for anything else, also for NaN and numbers above 1e308."""
    content = json.loads(text)
    _refuse_not_finite(content)
    return content


def _refuse_not_finite(content: object, keys: str = "") -> None:
    """Raises ValueError for NaN and infinity, with their key path: "cells.0.value"."""
    if isinstance(content, float) and not math.isfinite(content):
        raise ValueError(f"{keys or 'the number'} is {content}, which JSON does not have")
    if isinstance(content, Mapping):
        entries: Iterable[tuple[object, object]] = content.items()
    else:
        entries = enumerate(content) if isinstance(content, (list, tuple)) else ()
    for key, entry in entries:
        _refuse_not_finite(entry, f"{keys}.{key}" if keys else str(key))


def with_checksum(text: str) -> str:
    """Adds the sha256 of a JSON object's content as its last key; the rest of the text stays.

    The layout and the order of the keys do not change the checksum.
    """
    end = text.rindex("}")
    body = text[:end].rstrip()
    line = f'"{CONTENT_SHA256}": "{_digest(json.loads(text))}"'
    indent = "\n " if "\n" in text[len(body) : end] else ""
    return f"{body},{indent}{line}{text[len(body) :]}"


def without_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the checksum from an object; an object without a checksum is returned unchanged.

    Raises ValueError if the content does not match the checksum.
    """
    rest = {key: value for key, value in content.items() if key != CONTENT_SHA256}
    if CONTENT_SHA256 in content and content[CONTENT_SHA256] != _digest(rest):
        raise ValueError("it has changed since it was written")
    return rest


def _digest(content: object) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def reading(path: Path | str, remedy: str = "make it again") -> Iterator[None]:
    """Turns any error caused by a damaged file into a ValueError with the file's name.

    An error that already names the file, or that the file cannot be opened, stays as it is.
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damaged bytes raise all kinds of errors, in Rust even Exception
        if str(path) in str(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = f"it has no {error}" if isinstance(error, KeyError) else lines[0]
        raise ValueError(f"{path} is damaged ({what}): {remedy}") from error
