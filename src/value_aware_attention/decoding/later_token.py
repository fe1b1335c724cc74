"""Computes attention of a few later tokens with later_token.cpp, compiled on first use.

It serves the exponential kernel in fp32 on a CPU, without gradients, on as many threads as torch
uses. Everything else is computed in torch, as is everything on a machine without a compiler.
"""

import ctypes
from pathlib import Path
from typing import TypeGuard

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention import native
from value_aware_attention.decoding.pages import Pages
from value_aware_attention.kernels import Exponential, Kernel

TOKEN_SOURCE = Path(__file__).with_name("later_token.cpp")
LARGEST_CALL = 32  # tokens of a call, above which matrix products of torch are faster
PER_THREAD = 2**20  # products of two numbers that are worth another thread


class _Call(ctypes.Structure):
    """Mirrors `Call` of later_token.cpp, which does not compile unless both have the same size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "bias")),
        *((name, ctypes.c_void_p) for name in ("page_key", "page_value", "page_bias")),
        *((name, ctypes.c_void_p) for name in ("page_spans", "visible", "output")),
        ("query_strides", ctypes.c_int64 * 3),
        ("visible_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64 * 2) for name in ("key_strides", "value_strides")),
        *((name, ctypes.c_int64) for name in ("texts", "heads", "groups", "rows", "dim", "width")),
        *((name, ctypes.c_int64) for name in ("slots", "first", "threads")),
        ("scale", ctypes.c_float),
    )


TOKEN_CONSTANTS = ("-ffp-contract=fast", "-pthread", f"-DSIZE_OF_CALL={ctypes.sizeof(_Call)}")


def attend(
    query: Float[Tensor, "B heads N D"],
    key: Float[Tensor, "B H M D"],
    value: Float[Tensor, "B H M V"],
    kernel: Kernel,
    visible: Bool[Tensor, "#B #heads #N L"] | None,
    first: int,
    *,
    pages: Pages | None,
    bias: Float[Tensor, "B H R"] | None,
    slots: int,
) -> Float[Tensor, "B heads N V"] | None:
    """Computes `KeptLayer.attend`; returns None if torch has to compute it."""
    stored = () if pages is None or pages.scale is not None else (pages.key, pages.value)
    if (
        not _is_served(kernel, query, key, value, *stored)
        or (library := native.library(TOKEN_SOURCE, *TOKEN_CONSTANTS)) is None
    ):
        return None
    pages = None if pages is None else pages.restored()
    paged = (None, None) if pages is None else (pages.key, pages.value)
    (texts, query_heads, rows, dim), (_, heads, _, width) = query.shape, value.shape
    query = query if query.stride(3) == 1 else query.contiguous()
    key = key if key.stride()[2:] == (dim, 1) else key.contiguous()
    value = value if value.stride()[2:] == (width, 1) else value.contiguous()
    output = query.new_empty(texts, rows, query_heads, width)
    if visible is not None:
        visible = visible.expand(texts, query_heads, rows, -1)
    spans, page_bias, bias = None, None, None if bias is None else bias.float().contiguous()
    if pages is not None:
        spans, page_bias = pages.spans, None if pages.bias is None else pages.bias.float()
    tensors = (query, key, value, bias, *paged, page_bias, spans, visible, output)
    groups, slots_of_all = query_heads // heads, key[..., 0].numel() + (pages.slots if pages else 0)
    threads = 1 + slots_of_all * groups * rows * (dim + width) // PER_THREAD
    call = _Call(
        *[None if x is None else x.data_ptr() for x in tensors],
        query.stride()[:3], (0, 0, 0, 0) if visible is None else visible.stride(),
        key.stride()[:2], value.stride()[:2], texts, heads, groups, rows, dim, width, slots, first,
        min(torch.get_num_threads(), threads), kernel.scale_for(dim),
    )  # fmt: skip
    library.attend(ctypes.byref(call))
    return output.transpose(1, 2)


def _is_served(kernel: Kernel, query: Tensor, *others: Tensor) -> TypeGuard[Exponential]:
    """Returns whether the compiled code computes attention of these tensors."""
    return (
        type(kernel) is Exponential
        and query.shape[2] <= LARGEST_CALL
        and query.is_cpu
        and {x.dtype for x in (query, *others)} == {torch.float32}
        and not (torch.is_grad_enabled() and any([x.requires_grad for x in (query, *others)]))
    )
