"""Kernel attention over a pattern by FlexAttention: one fused loop over blocks of 128 x 128 pairs.

A kernel is a change of the score, because softmax over log-similarities is kernel attention; a
pattern is a block mask. Each kernel and pattern is compiled as a function of its own, on first use.
"""

import os
import shutil
from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from value_aware_attention.approximations.approximation import Inputs
from value_aware_attention.approximations.patterns import Pattern
from value_aware_attention.kernels import Elu, Exponential, Polynomial

__all__ = ["block_mask", "flex_pattern_attention", "obstacle"]

KERNELS = (Exponential, Polynomial, Elu)
BLOCK = 128
SHAPES = 64
"""Shapes, dtypes and masks that one kernel and pattern may be compiled for."""


def obstacle(inputs: Inputs) -> str | None:
    """Why FlexAttention cannot take this call; None where it can."""
    tensors = inputs.query, inputs.key, inputs.value
    device = inputs.query.device.type
    if not isinstance(inputs.kernel, KERNELS):
        return f"it knows the kernels Exponential, Polynomial and Elu, not {inputs.kernel}"
    if any(x.dtype == torch.float64 for x in tensors):
        return "it computes in fp32, bf16 or fp16, not fp64"
    if device == "cuda":
        narrow = min(inputs.query.shape[-1], inputs.value.shape[-1]) < 16
        return "on CUDA it needs head_dim and value_dim >= 16" if narrow else None
    if device != "cpu":
        return f"it runs on cpu and cuda, not on {device}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "it has no gradients on the CPU"
    return None if _has_compiler() else "it needs a C++ compiler on the CPU"


@lru_cache(maxsize=1)
def _has_compiler() -> bool:
    return bool(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++"))


def flex_pattern_attention(
    inputs: Inputs, pattern: Pattern, dtype: torch.dtype
) -> Float[Tensor, "*batch N V"]:
    """Eq. 1 over the pairs of the pattern that `inputs.visible` does not hide.

    On CUDA the products are taken in `dtype`, that of the caller's tensors, and summed in fp32.
    """
    assert isinstance(inputs.kernel, KERNELS)
    query, key, value = inputs.query, inputs.key, inputs.value
    if isinstance(inputs.kernel, Elu):
        query, key = inputs.kernel.features(query), inputs.kernel.features(key)
    if query.device.type == "cuda":
        query, key, value = (x.to(dtype) for x in (query, key, value))
    four = [_four_dimensional(x, inputs.batch) for x in (query, key, value)]
    visible = inputs.visible
    if visible is not None:
        visible = visible.expand(*visible.shape[:-2], query.shape[-2], inputs.keys)
        visible = _four_dimensional(visible, inputs.batch)
    blocks = block_mask(pattern, query.shape[-2], inputs.keys, query.device)
    with torch._dynamo.config.patch(accumulated_recompile_limit=2**16):
        output = _compiled(inputs.kernel, pattern)(*four, visible, blocks)
    return output.reshape(*inputs.batch, *output.shape[-2:])


def _four_dimensional(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    heads = batch[-1] if batch else 1
    return x.expand(*batch, *x.shape[-2:]).reshape(-1, heads, *x.shape[-2:])


@lru_cache(maxsize=64)
def block_mask(pattern: Pattern, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Which blocks of pairs the pattern fills, and which in part; no N x M mask is held."""
    position = torch.arange(keys + -keys % BLOCK)
    inside = position < keys
    offset = keys - queries
    full, part = [], []
    for rows in torch.arange(queries).split(BLOCK):
        seen = pattern(rows[:, None] + offset, position) & inside
        seen = seen.expand(len(rows), -1).unflatten(-1, (-1, BLOCK))
        full.append(seen.all(dim=-1).all(dim=0) & (len(rows) == BLOCK))
        part.append(seen.any(dim=-1).any(dim=0) & ~full[-1])
    count, columns = _counted(torch.stack(part), device)
    full_count, full_columns = _counted(torch.stack(full), device)
    return BlockMask.from_kv_blocks(
        count,
        columns,
        full_count,
        full_columns,
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: pattern(query + offset, key),
        seq_lengths=(queries, keys),
    )


def _counted(blocks: Bool[Tensor, "rows columns"], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are kept, and their columns first."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    numbers = blocks.sum(dim=-1), columns
    count, indices = (x.to(device, torch.int32)[None, None] for x in numbers)
    return count, indices


@lru_cache(maxsize=256)
def _compiled(kernel: Exponential | Polynomial | Elu, pattern: Pattern) -> Callable[..., Tensor]:
    """A compiled function of its own, which `pattern` only names.

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
    def similarity(score: Tensor) -> Tensor:
        """The log-similarity of a (scaled) product; a product of 0 has no gradient, not NaN."""
        if isinstance(kernel, Exponential):
            return score
        logarithm = score.abs().clamp_min(torch.finfo(torch.float32).tiny).log()
        return kernel.degree * logarithm if isinstance(kernel, Polynomial) else logarithm

    def attention(
        query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, blocks: BlockMask
    ) -> Tensor:
        def masked(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            scores = similarity(score)
            if visible is None:
                return scores
            return torch.where(visible[batch, head, i, j], scores, -torch.inf)

        scale = kernel.scale_for(query.shape[-1]) if isinstance(kernel, Exponential) else 1.0
        return flex_attention(query, key, value, masked, block_mask=blocks, scale=scale)

    return attention
