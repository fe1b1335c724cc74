"""Searches by active_set.cpp, compiled on first use, on as many threads as torch has.

Without a C++ compiler `library` is None, and the search runs in torch.
"""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention.approximations.closest_combination.problem import (
    BEAM,
    GROUPS,
    INDEPENDENCE,
    LOOKS,
    NEARLY,
    SEARCHES,
    SMALLEST,
    WIDE,
    Problem,
)
from value_aware_attention.files import checksum, write_text

SOURCE = Path(__file__).with_name("active_set.cpp")
LANES = 8
QUERIES_PER_TASK = 96


class _Call(ctypes.Structure):
    """Mirrors `Call` of active_set.cpp, which does not compile unless both have the same size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("value", "packed", "norms", "output", "weights")),
        *((name, ctypes.c_void_p) for name in ("zero", "visible")),
        ("keys", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("dim", "width", "r", "search", "sizes")),
        *((name, ctypes.c_double) for name in ("independence", "wide", "smallest")),
        *((name, ctypes.c_int32) for name in ("beam", "looks")),
        ("nearly", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("chosen", "mass", "error")),
    )


CONSTANTS = (f"-DTILE={GROUPS}", f"-DSIZE_OF_CALL={ctypes.sizeof(_Call)}")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", *CONSTANTS)


@cache
def library() -> ctypes.CDLL | None:
    """Builds the compiled search once per machine and source; None where it cannot be built.

    A library is code, so it is loaded only from a folder that nobody else can write, and only
    unchanged. Where no such folder can be written every process builds its own.
    """
    log = logging.getLogger(__name__)
    compiler = shlex.split(os.environ.get("CXX", "")) or _installed_compiler()
    if not compiler:
        log.warning("no C++ compiler: value-aware search runs in torch")
        return None
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return ctypes.CDLL(str(_build(compiler, Path(scratch))))
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        log.warning(
            "%s cannot build the value-aware search, which runs in torch: %s", compiler[0], said
        )
    except OSError as error:
        log.warning("the value-aware search runs in torch: %s", error)
    return None


def _installed_compiler() -> list[str]:
    found = shutil.which("c++") or shutil.which("clang++")
    return [found] if found else []


def _build(compiler: list[str], scratch: Path) -> Path:
    """Finds the library of this source, compiler and kind of processor, or compiles it.

    It is kept in the user's cache; in `scratch`, with a warning, where that cannot be.
    """
    # The macros tell the compiler's version and every instruction set that "native" stands for.
    macros = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    kind = subprocess.run(macros, capture_output=True, check=True).stdout
    digest = sha256(SOURCE.read_bytes() + kind + " ".join(FLAGS).encode()).hexdigest()[:16]
    name = f"active_set-{digest}.so"
    try:
        folder = _cache()
        target, written = folder / name, folder / f"{name}.sha256"
        if _is_whole(target, written):
            return target
        # Built in the folder that it is moved to: the move is one step on every disk.
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            built = _compile(compiler, Path(beside) / name)
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
        return _compile(compiler, scratch / name)


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
    if not (library.is_file() and written.is_file() and _is_ours(library)):
        return False
    return written.read_bytes() == _line(library).encode()


def _line(library: Path) -> str:
    """Formats the sha256 of a library as `sha256sum --check` reads it."""
    return f"{checksum(library)}  {library.name}\n"


def _compile(compiler: list[str], target: Path) -> Path:
    command = [*compiler, *FLAGS, str(SOURCE), "-o", str(target)]
    subprocess.run(command, capture_output=True, check=True)
    target.chmod(0o700)
    return target


def search(problem: Problem, r: int, effort: str, sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns indices and weights (H, N, sizes, r) of the best set of each size; sizes is 1 or r.

    Also returns the rows (H, N) left undone, whose values this precision does not resolve.
    """
    heads, queries = problem.output.shape[:2]
    device, dtype = problem.value.device, problem.value.dtype
    chosen = torch.empty(heads, queries, sizes, r, dtype=torch.int64, device=device)
    mass = torch.empty(heads, queries, sizes, r, dtype=dtype, device=device)
    error = torch.empty(heads, queries, sizes, dtype=dtype, device=device)
    _run("solve", problem, r, SEARCHES.index(effort), chosen, mass, error)
    return chosen, mass, error[..., 0].isnan()


def weigh(problem: Problem, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Solves for the weights (H, N, R) on the keys named, as `weigh` of batched.py."""
    chosen = indices.contiguous()
    mass = problem.value.new_empty(chosen.shape)
    _run("weigh", problem, chosen.shape[-1], 0, chosen, mass, mass)
    return mass, mass[..., 0].isnan()


def _run(
    name: str, problem: Problem, r: int, effort: int, chosen: Tensor, mass: Tensor, error: Tensor
) -> None:
    loaded = library()
    if loaded is None:
        raise RuntimeError("the compiled search is not available here; use engine='torch'")
    kind = {torch.float32: "float", torch.float64: "double"}[problem.value.dtype]
    function = getattr(loaded, f"{name}_{kind}")
    keep_alive: list[Tensor] = []
    zero, tasks = problem.zero(), []
    for head in range(len(problem.value)):
        results = chosen[head], mass[head], error[head]
        call = _call(problem, head, r, effort, zero[head], results, keep_alive)
        for first in range(0, len(problem.output[head]), QUERIES_PER_TASK):
            last = min(first + QUERIES_PER_TASK, len(problem.output[head]))
            tasks.append((ctypes.byref(call), ctypes.c_int64(first), ctypes.c_int64(last)))
    # ctypes lets go of the interpreter while the library works, so that threads run side by side.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(lambda task: function(*task), tasks))


def _call(
    problem: Problem,
    head: int,
    r: int,
    effort: int,
    zero: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    keep_alive: list[Tensor],
) -> _Call:
    """Lays one head's tensors out for vectors: rows padded with zeros, values also in tiles."""
    value, output = problem.value[head], problem.output[head]
    keys, dim = value.shape
    spare = -(dim + 1) % LANES + 1
    tiles = pad(value, (0, 0, 0, -keys % GROUPS)).unflatten(0, (-1, GROUPS)).mT.contiguous()
    visible = None if problem.visible is None else problem.visible[head].contiguous()
    tensors = (
        pad(value, (0, spare)),
        tiles,
        pad(value.square().sum(-1), (0, -keys % GROUPS)),
        pad(output, (0, spare)),
        problem.weights[head].contiguous(),
        zero,
        visible,
    )
    keep_alive.extend(tensor for tensor in tensors if tensor is not None)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    chosen, mass, error = results
    sizes = 1 if chosen.dim() == 2 else chosen.shape[1]
    return _Call(
        *addresses, keys, len(tiles), dim, dim + spare, r, effort, sizes,
        INDEPENDENCE[value.dtype], WIDE[value.dtype], SMALLEST, BEAM, LOOKS, NEARLY,
        chosen.data_ptr(), mass.data_ptr(), error.data_ptr(),
    )  # fmt: skip
