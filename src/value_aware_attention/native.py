"""Compiles C++ on first use, for loops whose steps are too short for tensors."""

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


@cache
def library(source: Path, *constants: str) -> ctypes.CDLL | None:
    """Builds a source once per machine, with macros defined; None where it cannot be built.

    A library is code, so it is loaded only from a folder that nobody else can write, and only
    unchanged. Where no such folder can be written every process builds its own.
    """
    log = logging.getLogger(__name__)
    compiler = (
        shlex.split(os.environ.get("CXX", ""))
        or [path for name in ("c++", "clang++") if (path := shutil.which(name))][:1]
    )
    if not compiler:
        log.warning("no C++ compiler: value-aware search runs in torch")
        return None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return ctypes.CDLL(str(_build([*compiler, *FLAGS, *constants], source, Path(scratch))))
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode(errors="replace").strip()
        log.warning(
            "%s cannot build the value-aware search, which runs in torch: %s", compiler[0], message
        )
    except OSError as error:
        log.warning("the value-aware search runs in torch: %s", error)
    return None


def _build(command: list[str], source: Path, scratch: Path) -> Path:
    """Finds the library of this source, compiler and kind of processor, or compiles it.

    It is kept in the user's cache; in `scratch`, with a warning, where that cannot be.
    """
    # The macros tell the compiler's version and every instruction set that "native" stands for.
    macros = [*command, "-dM", "-E", "-x", "c++", os.devnull]
    kind = subprocess.run(macros, capture_output=True, check=True).stdout
    digest = sha256(source.read_bytes() + kind + " ".join(command).encode()).hexdigest()[:16]
    name = f"{source.stem}-{digest}.so"
    try:
        folder = _cache()
        target, written = folder / name, folder / f"{name}.sha256"
        if _is_whole(target, written):
            return target
        # Built in the folder that it is moved to: the move is one step on every disk.
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            built = _compile(command, source, Path(beside) / name)
            with built.open("rb") as file:  # after a loss of power it is whole or not there
                os.fsync(file.fileno())
            line = _line(built)
            built.replace(target)
        write_text(written, line)
        return target
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logging.getLogger(__name__).warning(
            "%s: the value-aware search is compiled again in every process; set XDG_CACHE_HOME to "
            "a folder of yours",
            error,
        )
        return _compile(command, source, scratch / name)


def _cache() -> Path:
    """Creates the user's cache folder; PermissionError where others could put a library there."""
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = above / "value_aware_attention"
    # On many systems a user's own group may write to ~/.cache: it has no other member.
    for made, bits in ((above, 0o002), (folder, 0o022)):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(made, bits):
            raise PermissionError(
                f"others can write to {made} (`chmod go-w` it, once you trust what is in it)"
            )
    return folder


def _is_ours(path: Path, bits: int = 0o022) -> bool:
    """Tells whether a path is this user's or root's, and gives others none of the mode's bits."""
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & bits


def _is_whole(library: Path, written: Path) -> bool:
    """Tells whether a library is ours, and as it was when its sha256 was written beside it."""
    is_ours = library.is_file() and written.is_file() and _is_ours(library)
    return is_ours and written.read_bytes() == _line(library).encode()


def _line(library: Path) -> str:
    """Formats the sha256 of a library as `sha256sum --check` reads it."""
    return f"{checksum(library)}  {library.name}\n"


def _compile(command: list[str], source: Path, target: Path) -> Path:
    subprocess.run([*command, str(source), "-o", str(target)], capture_output=True, check=True)
    target.chmod(0o700)
    return target
