"""Searches with active_set.cpp, compiled on first use, on as many threads as torch uses.

Without a C++ compiler `library` returns None, and the search runs in torch.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention import native
from value_aware_attention.approximations.closest_combination.problem import (
    BEAM,
    INDEPENDENCE,
    KEY_GROUPS,
    LOOKS,
    NEARLY,
    SEARCHES,
    SMALLEST_DISTANCE,
    WIDE_SHARE,
    Problem,
)

SEARCH_SOURCE = Path(__file__).with_name("active_set.cpp")
LANES = 8
QUERIES_PER_TASK = 96


class _Call(ctypes.Structure):
    """Mirrors `Call` of active_set.cpp, which does not compile unless both have the same size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("value", "packed", "norms", "output", "weights")),
        *((name, ctypes.c_void_p) for name in ("zero", "visible", "mean")),
        ("keys", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("dim", "width", "r", "search", "sizes")),
        *((name, ctypes.c_double) for name in ("independence", "wide", "smallest")),
        *((name, ctypes.c_int32) for name in ("beam", "looks")),
        ("nearly", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("chosen", "mass", "error")),
    )


SEARCH_CONSTANTS = (f"-DTILE={KEY_GROUPS}", f"-DSIZE_OF_CALL={ctypes.sizeof(_Call)}")


def library() -> ctypes.CDLL | None:
    """Returns the compiled search; None if it cannot be built."""
    return native.library(SEARCH_SOURCE, *SEARCH_CONSTANTS)


def search(problem: Problem, r: int, effort: str, sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns indices and weights (H, N, sizes, r) of the best set of each size; sizes is 1 or r.

    Also returns a mask (H, N) of the unfinished rows, which this precision does not resolve.
    """
    heads, queries = problem.output.shape[:2]
    device, dtype = problem.value.device, problem.value.dtype
    chosen = torch.empty(heads, queries, sizes, r, dtype=torch.int64, device=device)
    mass = torch.empty(heads, queries, sizes, r, dtype=dtype, device=device)
    error = torch.empty(heads, queries, sizes, dtype=dtype, device=device)
    _run("solve", problem, r, SEARCHES.index(effort), chosen, mass, error)
    return chosen, mass, error[..., 0].isnan()


def weigh(problem: Problem, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Solves for the weights (H, N, R) on these keys, like `weigh` of batched.py."""
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
    # ctypes releases the GIL during a call, so the threads run in parallel.
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
    """Lays out one head's tensors for SIMD: rows padded with zeros, values also in tiles."""
    value, output = problem.value[head], problem.output[head]
    keys, dim = value.shape
    spare = -(dim + 1) % LANES + 1
    tiles = pad(value, (0, 0, 0, -keys % KEY_GROUPS)).unflatten(0, (-1, KEY_GROUPS)).mT.contiguous()
    visible = None if problem.visible is None else problem.visible[head].contiguous()
    tensors = (
        pad(value, (0, spare)),
        tiles,
        pad(value.square().sum(-1), (0, -keys % KEY_GROUPS)),
        pad(output, (0, spare)),
        problem.weights[head].contiguous(),
        zero,
        visible,
        None if problem.mean is None else pad(problem.mean[head], (0, spare)),
    )
    keep_alive.extend(tensor for tensor in tensors if tensor is not None)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    chosen, mass, error = results
    sizes = 1 if chosen.dim() == 2 else chosen.shape[1]
    return _Call(
        *addresses, keys, len(tiles), dim, dim + spare, r, effort, sizes,
        INDEPENDENCE[value.dtype], WIDE_SHARE[value.dtype], SMALLEST_DISTANCE, BEAM, LOOKS, NEARLY,
        chosen.data_ptr(), mass.data_ptr(), error.data_ptr(),
    )  # fmt: skip
