"""Files and folders that appear whole or not at all, whenever a process or the machine ends.

What is written lies beside its place under a hidden name; it is flushed to the disk, then renamed.
What a process that is gone left behind goes when the next one writes there.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from value_aware_attention.storage.checksums import CHECKSUMS, unnamed, write_checksums
from value_aware_attention.storage.full_disk import full_disk_named

__all__ = [
    "check_replaceable",
    "held",
    "new_file",
    "new_files",
    "new_folder",
    "remove_left_overs",
    "write_text",
]

PARTIAL, OLD, LOCK = ".partial", ".old", ".lock"


def write_text(path: Path | str, text: str) -> None:
    """Writes a file of UTF-8 as `new_file` does."""
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def new_file(path: Path | str) -> Iterator[Path]:
    """Yields the name of a file to fill, which takes its place at `path` when all succeeded.

    Several processes may write one file: each has a name of its own, and the last one stays.
    Raises DiskFull, which names the folder.
    """
    target = Path(path)
    with full_disk_named(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    remove_left_overs(target.parent)
    with _own(target) as partial, full_disk_named(target.parent):
        yield partial
        _flush(partial)
        os.replace(partial, target)
        _flush(target.parent)


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yields a folder to fill, which takes the place of `path` when all succeeded.

    It gets the SHA256SUMS by which it is known as this program's, unless its parts have theirs. At
    every moment the old folder or the new one is there, under its own name or under a hidden one
    that the next call finds. Raises ValueError, before anything is yielded, where another process
    is at it or `check_replaceable` refuses, DiskFull where the disk is full.
    """
    target = Path(path)
    target = target.resolve() if target.is_symlink() else target  # the link itself stays
    with _aside(target) as (partial, old):
        check_replaceable(target)
        yield partial
        if unnamed(partial):
            write_checksums(partial)
        check_replaceable(target)  # somebody may have put files there meanwhile
        _flush_all(partial)
        if target.exists():
            os.replace(target, old)
        os.replace(partial, target)
        _flush(target.parent)


def check_replaceable(path: Path | str) -> None:
    """Raises ValueError for a folder that holds a file which this program has not written.

    Such a file is named by no SHA256SUMS of the folder. An empty folder may be replaced, and one
    that does not exist be made.
    """
    folder = Path(path)
    if folder.is_dir() and (files := unnamed(folder)):
        raise ValueError(
            f"{folder} holds {files[0].relative_to(folder)}, which no {CHECKSUMS} there names, so "
            f"that it is not this program's to replace: give another folder, or move the file away"
        )


@contextmanager
def new_files(path: Path | str, *, last: str) -> Iterator[Path]:
    """Yields a folder to fill, whose files take their places in the folder `path`; `last` at last.

    Other files of that folder stay. Raises ValueError where another process is at it, DiskFull
    where the disk is full, IsADirectoryError, before a file is replaced, for a folder in its place.
    """
    target = Path(path)
    with _aside(target) as (partial, _):
        yield partial
        files = sorted(partial.iterdir(), key=lambda file: (file.name == last, file.name))
        for file in files:
            if (target / file.name).is_dir():
                raise IsADirectoryError(
                    f"{target / file.name} is a folder; a file is written there"
                )
        _flush_all(partial)
        target.mkdir(exist_ok=True)
        for file in files:
            os.replace(file, target / file.name)
        _flush(target)


@contextmanager
def held(
    path: Path | str, run: str = "a run", instead: str = "write to another folder"
) -> Iterator[None]:
    """Keeps other processes from `path`; the system ends it with the process, however killed.

    Raises ValueError, at once, where another process has it.
    """
    target = Path(path)
    lock = target.with_name(f".{target.name}{LOCK}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{target} belongs to {run} that is still going: wait for it, or {instead}"
        ) from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def remove_left_overs(folder: Path) -> None:
    """Removes the unfinished files of processes that are gone: nobody has them locked."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.startswith(".") and e.name.endswith(PARTIAL)]
    for file in (folder / name for name in names):
        try:
            descriptor = os.open(file, os.O_RDWR)
        except OSError:  # gone meanwhile, or a folder, which `new_folder` removes
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink(missing_ok=True)
        except OSError:  # somebody writes it, or there are no locks to tell
            pass
        finally:
            os.close(descriptor)


@contextmanager
def _own(target: Path) -> Iterator[Path]:
    """An empty file beside `target` that is locked for as long as its process lives."""
    partial = target.with_name(f".{target.name}.{uuid4().hex[:12]}{PARTIAL}")
    with full_disk_named(target.parent):
        descriptor = _locked(partial, fcntl.LOCK_EX)
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def _aside(target: Path) -> Iterator[tuple[Path, Path]]:
    """An empty folder beside `target`, and the name under which the old one waits to be removed."""
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; a folder is written there")
    partial, old = (target.with_name(f".{target.name}{suffix}") for suffix in (PARTIAL, OLD))
    with full_disk_named(target.parent), held(target):
        _settle(target, partial, old)
        try:
            with full_disk_named(target.parent):
                partial.mkdir()
                yield partial, old
        finally:
            _settle(target, partial, old)


def _settle(target: Path, partial: Path, old: Path) -> None:
    """Puts an old folder back that no new one has replaced; removes what is not to stay.

    Raises ValueError for a folder under the old one's name that this user's program did not leave.
    """
    if old.exists():
        if unnamed(old) or old.stat().st_uid != os.geteuid():
            raise ValueError(f"{old} is in the way and not this program's: move it away")
        if not target.exists():
            os.replace(old, target)
    shutil.rmtree(partial, ignore_errors=True)
    if old.exists():
        os.replace(old, partial)  # so that a name of an old folder is always that of a whole one
        shutil.rmtree(partial, ignore_errors=True)


def _locked(path: Path, how: int) -> int:
    """Opens the file at `path`, made where there is none, with a lock on it.

    Raises BlockingIOError where another process has it and `how` is not to wait.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:  # some network file systems have no locks
            return descriptor
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # the one that had it before has removed it


def _flush_all(folder: Path) -> None:
    """Flushes every file and folder below a folder, and the folder itself."""
    for path in folder.rglob("*"):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """Flushes a file's bytes, or a folder's names: a rename is on the disk only when they are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
