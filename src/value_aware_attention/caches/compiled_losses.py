"""Computes the losses of single keys with single_losses.cpp, on as many threads as torch uses."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention import native
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import available
from value_aware_attention.caches.observed import Observed
from value_aware_attention.error import typical_unit
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial

LOSSES_SOURCE = Path(__file__).with_name("single_losses.cpp")
BLOCK = 2**16
"""Weights of a block: in fp32 a quarter of a MiB, half of a small L2 cache"""
ROWS_OF_TILE = 12
"""The rows of a block are a multiple of this, so that the compiled product has no remainder"""


class _Call(ctypes.Structure):
    """Mirrors `Call` of single_losses.cpp, which does not compile unless both have the same
    size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "columns", "centre")),
        *((name, ctypes.c_void_p) for name in ("metric", "beside", "mass", "log_scale")),
        *((name, ctypes.c_void_p) for name in ("visible", "output", "loss")),
        *((name, ctypes.c_int64) for name in ("groups", "rows", "dim", "keys", "padded")),
        *((name, ctypes.c_int64) for name in ("value_dim", "width", "block", "degree")),
        *((name, ctypes.c_int64) for name in ("group_stride", "row_stride")),
        ("unit", ctypes.c_double),
    )


def library() -> ctypes.CDLL | None:
    """Returns the compiled losses; None if they cannot be built."""
    return native.library(
        LOSSES_SOURCE, f"-DSIZE_OF_CALL={ctypes.sizeof(_Call)}", "-ffp-contract=fast"
    )


def is_compiled(observed: Observed) -> bool:
    """Returns whether the compiled code computes these losses: fp32 on a CPU, without gradients."""
    tensors = (observed.query, observed.key, observed.value)
    return (
        type(observed.kernel) in (Exponential, Polynomial, Elu)
        and all(x.device.type == "cpu" and x.dtype != torch.float64 for x in tensors)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and min(observed.query.numel(), observed.key.numel(), observed.value.numel()) > 0
        and library() is not None
    )


def compiled_losses(
    observed: Observed, *, projected: bool
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch G W V"]]:
    """Computes the losses and outputs of `single_losses`, for which `is_compiled` holds."""
    loaded = library()
    assert loaded is not None
    tile, keys, width = loaded.tile_width(), observed.keys, observed.value.shape[-1]
    spare, extra = -keys % tile, -width % tile
    query, key, degree = _features(observed)
    value, centre, unit = centred(observed)
    padded_value = pad(value, (0, extra, 0, spare)).contiguous()
    columns = padded_value.unflatten(-1, (-1, tile)).transpose(1, 2).contiguous()
    caches, groups, rows, dim = query.shape
    output = value.new_empty(caches, groups, rows, width)
    loss = value.new_empty(caches, keys, dtype=torch.float64)
    visible, strides = _visible(observed)
    tensors = (
        query.contiguous(), pad(key, (0, 0, 0, spare)).unflatten(1, (-1, tile)).mT.contiguous(),
        padded_value, columns, pad(centre, (0, extra)).contiguous(),
        _metric(observed, extra) if projected else None, *_beside(observed),
    )  # fmt: skip
    block = min(rows, max(1, BLOCK // (keys + spare) // ROWS_OF_TILE) * ROWS_OF_TILE)
    sizes = (groups, rows, dim, keys, keys + spare, width, width + extra, block, degree, *strides)
    units = unit.flatten().tolist()

    def run(cache: int) -> None:
        parts = (None if x is None else x[cache] for x in tensors)
        addresses = (
            None if x is None else x.data_ptr()
            for x in (*parts, visible[cache], output[cache], loss[cache])
        )
        loaded.single_losses(ctypes.byref(_Call(*addresses, *sizes, units[cache])))

    if torch.get_num_threads() == 1:
        list(map(run, range(caches)))
    else:  # ctypes releases the GIL during a call, so the threads run in parallel
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(run, range(caches)))
    loss *= unit[..., 0].double().square()
    return loss.view(*observed.batch, keys), output.view(*observed.query.shape[:-1], width)


def centred(
    observed: Observed,
) -> tuple[Float[Tensor, "C M V"], Float[Tensor, "C 1 V"], Float[Tensor, "C 1 1"]]:
    """Returns the centred values of each cache, their mean, both in a unit, and the unit."""
    value = _by_cache(working_precision(observed.value), 2)
    if observed.available is None:
        centre = value.mean(dim=-2, keepdim=True)
        value = value - centre
    else:
        allowed = _by_cache(available(observed), 1)[..., None]
        centre = value.where(allowed, 0.0).sum(dim=-2, keepdim=True)
        centre = centre / allowed.sum(dim=-2, keepdim=True).clamp_min(1)
        value = (value - centre).where(allowed, 0.0)
    unit = typical_unit(value)  # squares of values may leave the range of fp32
    return value / unit, centre / unit, unit


def _features(
    observed: Observed,
) -> tuple[Float[Tensor, "C G W D"], Float[Tensor, "C M D"], int]:
    """Returns vectors and an exponent: a weight is this power of their product; -1 means exp."""
    kernel: Kernel = observed.kernel
    query = _by_cache(working_precision(observed.query), 3)
    key = _by_cache(working_precision(observed.key), 2)
    match kernel:
        case Exponential():
            return query * kernel.scale_for(query.shape[-1]), key, -1
        case Polynomial():
            return query, key, kernel.degree
        case _:
            assert isinstance(kernel, Elu)
            return kernel.features(query), kernel.features(key), 1


def _metric(observed: Observed, extra: int) -> Float[Tensor, "C G W W"] | None:
    """Returns W_o W_o^T of each head, padded with zeros: ||x W_o||^2 = x metric x."""
    if observed.projection is None:
        return None
    projection = working_precision(observed.projection)
    metric = pad(projection @ projection.mT, (0, extra, 0, extra))
    return _by_cache(metric.expand(*observed.query.shape[:-2], -1, -1), 3).contiguous()


def _beside(observed: Observed) -> list[Tensor | None]:
    """Returns the values, mass and log-scale (C, G, W, .) of the state beside."""
    if observed.beside is None:
        return [None] * 3
    state, shape = observed.beside, observed.query.shape[:-1]
    return [
        _by_cache(working_precision(x).expand(*shape, -1), 3).contiguous()
        for x in (state.values, state.total, state.log_scale)
    ]


def _by_cache(x: Tensor, dims: int) -> Tensor:
    """Flattens the leading dimensions and keeps the last `dims`."""
    return x.reshape(-1, *x.shape[-dims:])


def _visible(observed: Observed) -> tuple[list[Tensor | None], tuple[int, int]]:
    """Returns the visible pairs (G, W, M) of each cache, and their strides by group and row."""
    visible = observed.visible
    if visible is None:
        return [None] * observed.batch.numel(), (0, 0)
    visible = visible if visible.stride(-1) == 1 else visible.contiguous()
    visible = visible.expand(*observed.query.shape[:-1], observed.keys)  # without a copy
    group, row, _ = visible.stride()[-3:]
    return [visible[place] for place in np.ndindex(*observed.batch)], (group, row)
