"""Compiles C++ on first use, for loops whose steps are too small for tensor operations."""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

from value_aware_attention.files import checksum, write_text

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
log = logging.getLogger(__name__)
SHARED_HEADER = Path(__file__).with_name("simd.h")
"""Header with vector operations that all sources include"""


@cache
def library(source: Path, *constants: str) -> ctypes.CDLL | None:
    """Builds a source once per machine, with these macros; returns None if it cannot be built.

    A library is code, so it is loaded only if unchanged and from a folder that nobody else can
    write. Without such a folder, each process builds its own copy.
    """
    if not (command := compiler()):
        return None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return ctypes.CDLL(str(_build([*command, *FLAGS, *constants], source, Path(scratch))))
    except subprocess.CalledProcessError as error:
        log.warning(
            "%s cannot build %s, which runs in torch: %s",
            command[0], source.stem, error.stderr.decode(errors="replace").strip(),
        )  # fmt: skip
    except OSError as error:
        log.warning("%s runs in torch: %s", source.stem, error)
    return None


@cache
def compiler() -> list[str]:
    """Returns the command of a C++ compiler; [], with a warning, if there is none."""
    command = (
        shlex.split(os.environ.get("CXX", ""))
        or [path for name in ("c++", "clang++") if (path := shutil.which(name))][:1]
    )
    if not command:
        log.warning("no C++ compiler: compiled code runs in torch instead, slower")
    return command


def _build(command: list[str], source: Path, scratch: Path) -> Path:
    """Finds the library for this source, compiler and processor type, or compiles it.

    It goes into the user's cache, or, if that fails, into `scratch` with a warning.
    """
    # The macros name the compiler's version and the instruction sets that "native" stands for.
    kind = subprocess.run(
        [*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, check=True
    ).stdout
    digest = sha256(
        source.read_bytes() + SHARED_HEADER.read_bytes() + kind + " ".join(command).encode()
    ).hexdigest()[:16]
    name = f"{source.stem}-{digest}.so"
    try:
        folder = _cache()
        target, written = folder / name, folder / f"{name}.sha256"
        if _is_whole(target, written):
            return target
        # Built in the target's folder, so that the move is atomic.
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            built = _compile(command, source, Path(beside) / name)
            with built.open("rb") as file:  # after a power loss it is complete or absent
                os.fsync(file.fileno())
            line = _line(built)
            built.replace(target)
        write_text(written, line)
        return target
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        log.warning(
            "%s: %s is compiled again in every process; set XDG_CACHE_HOME to a folder of yours",
            error, source.stem,
        )  # fmt: skip
        return _compile(command, source, scratch / name)


def _cache() -> Path:
    """Creates the user's cache folder; PermissionError if others could write a library there."""
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = above / "value_aware_attention"
    # On many systems ~/.cache is writable by the user's own group, which has no other member.
    for made, bits in ((above, 0o002), (folder, 0o022)):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(made, bits):
            raise PermissionError(
                f"others can write to {made} (`chmod go-w` it, once you trust what is in it)"
            )
    return folder


def _is_ours(path: Path, bits: int = 0o022) -> bool:
    """Returns whether this user or root owns a path and its mode has none of `bits`."""
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & bits


def _is_whole(library: Path, written: Path) -> bool:
    """Returns whether a library is ours and matches the sha256 that was written next to it."""
    return (
        library.is_file()
        and written.is_file()
        and _is_ours(library)
        and written.read_bytes() == _line(library).encode()
    )


def _line(library: Path) -> str:
    """Formats the sha256 of a library as `sha256sum --check` reads it."""
    return f"{checksum(library)}  {library.name}\n"


def _compile(command: list[str], source: Path, target: Path) -> Path:
    subprocess.run([*command, str(source), "-o", str(target)], capture_output=True, check=True)
    target.chmod(0o700)
    return target
