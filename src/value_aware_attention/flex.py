"""Computes kernel attention by FlexAttention, one fused loop over blocks of 128 x 128 pairs.

A kernel is a change of the score, because softmax over log-similarities is kernel attention; a
pattern of positions is a block mask. Each kernel and pattern is compiled as a function of its own,
on first use. The tests run nothing here on CUDA: they compile the same functions for the CPU, and
test the score's gradient by itself.
"""

import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention.kernels import KERNELS, Elu, Exponential, Kernel, Polynomial

BLOCK = 128
SHAPES = 64
"""Most shapes, dtypes and masks for which one kernel and pattern is compiled"""

uncompiled = torch._disable_dynamo
"""`torch.compiler.disable`, which would import the compiler when a function is defined"""
PositionMask = Callable[[Tensor, Tensor], Tensor]
"""(query positions, key positions) -> the pairs that are kept; cached by its identity"""


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Shows each query the keys up to its own position."""
    return key <= query


def is_preferred(query: Float[Tensor, "... N D"], key: Float[Tensor, "... M D"]) -> bool:
    """Tells whether FlexAttention is the better choice for exact attention, where it supports it.

    It is on CUDA, from a whole block of queries on: eager attention holds N x M weights several
    times over. With fewer queries they are small, and every new length would cost a compilation.
    """
    return query.is_cuda and query.shape[-2] >= BLOCK and 0 not in (*query.shape, *key.shape)


@uncompiled  # it looks for programs, which cannot be traced into a compiled model
def unsupported_reason(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> str | None:
    """Returns why FlexAttention cannot take this call; None where it can."""
    tensors = query, key, value
    device = query.device.type
    if not isinstance(kernel, KERNELS):
        return f"it knows the kernels Exponential, Polynomial and Elu, not {kernel}"
    if any(x.dtype == torch.float64 for x in tensors):
        return "it computes in fp32, bf16 or fp16, not fp64"
    if len({x.dtype for x in tensors}) > 1:
        return "query, key and value must have one dtype"
    if device not in ("cpu", "cuda"):
        return f"it runs on cpu and cuda, not on {device}"
    if device == "cuda" and min(query.shape[-1], value.shape[-1]) < 16:
        return "on CUDA it needs head_dim and value_dim >= 16"
    if device == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "it has no gradients on the CPU"
    return missing_compiler(device)


@lru_cache(maxsize=4)
def missing_compiler(device: str) -> str | None:
    """Names what torch.compile lacks on a cpu or cuda device of this machine; None if nothing."""
    if device == "cuda":
        c = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        return None if c and find_spec("triton") else "it needs Triton and a C compiler on CUDA"
    cpp = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return None if cpp else "it needs a C++ compiler on the CPU"


def too_many_shapes() -> type[Exception]:
    """Returns the error of `flex_kernel_attention` past `SHAPES` shapes; imports the compiler."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def flex_kernel_attention(
    query: Float[Tensor, "*#batch N D"],
    key: Float[Tensor, "*#batch M D"],
    value: Float[Tensor, "*#batch M V"],
    kernel: Kernel,
    visible: Bool[Tensor, "*#batch #N #M"] | None = None,
    pattern: PositionMask | None = None,
) -> Float[Tensor, "*batch N V"]:
    """Computes Eq. 1 over the visible pairs (None = all) of the pattern (None = every pair).

    Positions of the queries are the last N of M. Products are taken in the inputs' dtype and summed
    in fp32, scores and features are fp32; a row that sees nothing gives zeros. For calls without an
    `unsupported_reason`; past SHAPES shapes for one kernel and pattern torch raises an error.
    """
    assert isinstance(kernel, KERNELS)
    leading = (x.shape[:-2] for x in (query, key, value))
    batch = tuple(torch.broadcast_shapes(*leading))
    queries, keys = query.shape[-2], key.shape[-2]
    four = [_four_dimensional(x, batch) for x in (query, key, value)]
    if visible is not None:
        visible = visible.expand(*visible.shape[:-2], queries, keys)
        visible = _four_dimensional(visible, batch)
    blocks = None if pattern is None else block_mask(pattern, queries, keys, query.device)
    with torch._dynamo.config.patch(accumulated_recompile_limit=2**16):
        output = _compiled(kernel, pattern)(*four, visible, blocks)
    return output.reshape(*batch, *output.shape[-2:])


def _four_dimensional(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    heads = batch[-1] if batch else 1
    return x.expand(*batch, *x.shape[-2:]).reshape(-1, heads, *x.shape[-2:])


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for later calls, and autograd saves no inference tensors
def block_mask(pattern: PositionMask, queries: int, keys: int, device: torch.device) -> Any:
    """Finds the blocks of pairs that the pattern fills, wholly or partly; no N x M mask is held.

    Returns a `BlockMask` of FlexAttention.
    """
    from torch.nn.attention.flex_attention import BlockMask  # it brings torch's compiler

    position = torch.arange(keys + -keys % BLOCK)
    inside = position < keys
    offset = keys - queries
    full, part = [], []
    for rows in torch.arange(queries).split(BLOCK):
        seen = pattern(rows[:, None] + offset, position) & inside
        seen = seen.expand(len(rows), -1).unflatten(-1, (-1, BLOCK))
        full.append(seen.all(dim=-1).all(dim=0) & (len(rows) == BLOCK))
        part.append(seen.any(dim=-1).any(dim=0) & ~full[-1])
    count, columns = _kv_blocks(torch.stack(part), device)
    full_count, full_columns = _kv_blocks(torch.stack(full), device)
    return BlockMask.from_kv_blocks(
        count,
        columns,
        full_count,
        full_columns,
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: pattern(query + offset, key),
        seq_lengths=(queries, keys),
    )


def _kv_blocks(blocks: Bool[Tensor, "rows columns"], device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts the blocks kept in each row, and puts their columns first."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    numbers = blocks.sum(dim=-1), columns
    count, indices = (x.to(device, torch.int32)[None, None] for x in numbers)
    return count, indices


@lru_cache(maxsize=256)
def _compiled(
    kernel: Exponential | Polynomial | Elu, pattern: PositionMask | None
) -> Callable[..., Tensor]:
    """Compiles a function for one kernel and pattern, of which `pattern` only tells them apart.

    Past a limit that functions share torch falls back to a dense path; fullgraph makes that an
    error.
    """
    return torch.compile(  # type: ignore[call-overload]  # the stubs lag behind the function
        _attention_by(kernel),
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,
        recompile_limit=SHAPES,
    )


def _attention_by(kernel: Exponential | Polynomial | Elu) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, blocks: Any
    ) -> Tensor:
        def score(product: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            scores = log_similarity(product, kernel)
            if visible is None:
                return scores
            return torch.where(visible[batch, head, i, j], scores, -torch.inf)

        if isinstance(kernel, Elu):
            query, key = (kernel.features(x.float()).to(x.dtype) for x in (query, key))
        scale = kernel.scale_for(query.shape[-1]) if isinstance(kernel, Exponential) else 1.0
        return flex_attention(query, key, value, score, block_mask=blocks, scale=scale)

    return attention


def log_similarity(
    product: Float[Tensor, "..."], kernel: Exponential | Polynomial | Elu
) -> Float[Tensor, "..."]:
    """Computes log kappa from the product of query and key: scaled (exponential), of features
    (elu).

    A product of 0 has no gradient, not NaN.
    """
    if isinstance(kernel, Exponential):
        return product
    logarithm = product.abs().clamp_min(torch.finfo(torch.float32).tiny).log()
    return kernel.degree * logarithm if isinstance(kernel, Polynomial) else logarithm
