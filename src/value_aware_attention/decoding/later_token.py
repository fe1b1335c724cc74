"""Computes attention of a few later tokens with later_token.cpp, compiled on first use.

It serves the exponential kernel in fp32 on a CPU, without gradients, on as many threads as torch
uses. Everything else, and a machine without a compiler, is served in torch.
"""

import ctypes
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention import native
from value_aware_attention.decoding.pages import Pages
from value_aware_attention.kernels import Exponential, Kernel

TOKEN_SOURCE = Path(__file__).with_name("later_token.cpp")
MOST_ROWS = 32
"""Tokens of a call above which matrix products of torch are faster"""
PER_THREAD = 2**20
"""Products of two numbers that are worth another thread"""


class _Call(ctypes.Structure):
    """Mirrors `Call` of later_token.cpp, which does not compile unless both have the same size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "bias")),
        *((name, ctypes.c_void_p) for name in ("page_key", "page_value", "page_bias")),
        *((name, ctypes.c_void_p) for name in ("page_first", "page_count", "visible", "output")),
        ("query_strides", ctypes.c_int64 * 3),
        ("visible_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("texts", "heads", "groups", "rows", "dim", "width")),
        *((name, ctypes.c_int64) for name in ("slots", "first", "threads")),
        ("scale", ctypes.c_float),
    )


CONSTANTS = ("-ffp-contract=fast", "-pthread", f"-DSIZE_OF_CALL={ctypes.sizeof(_Call)}")


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
    """Computes `KeptLayer.attend`; returns None where torch has to."""
    if type(kernel) is not Exponential or query.shape[2] > MOST_ROWS:
        return None
    of_pages = () if pages is None else (pages.key, pages.value)
    if any(not x.is_cpu or x.dtype != torch.float32 for x in (query, key, value)) or (
        torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, *of_pages))
    ):
        return None
    library = native.library(TOKEN_SOURCE, *CONSTANTS)
    if library is None:
        return None
    texts, query_heads, rows, dim = query.shape
    heads, width = value.shape[1], value.shape[-1]
    query = query if query.stride(3) == 1 else query.contiguous()
    key, value = _in_rows(key), _in_rows(value)
    output = query.new_empty(texts, rows, query_heads, width)
    first_slots = None if bias is None else bias.float().contiguous()
    visible_strides = (0, 0, 0, 0)
    if visible is not None:
        visible = visible.expand(texts, query_heads, rows, -1)
        visible_strides = visible.stride()
    paged: list[Tensor | None] = [None] * 5
    if pages is not None:
        page_bias = pages.bias.float() if pages.is_weighted and pages.bias is not None else None
        paged = [pages.key, pages.value, page_bias, *pages.spans]
    addresses = (query, key, value, first_slots, *paged, visible, output)
    products = query_heads * rows * texts * (dim + width) * (slots + first + rows)
    products += 0 if pages is None else pages.slots * (query_heads // heads) * rows * (dim + width)
    call = _Call(
        *(None if x is None else x.data_ptr() for x in addresses),
        query.stride()[:3], visible_strides, key.stride(1), value.stride(1),
        texts, heads, query_heads // heads, rows, dim, width, slots, first,
        min(torch.get_num_threads(), 1 + products // PER_THREAD), kernel.scale_for(dim),
    )  # fmt: skip
    library.attend(ctypes.byref(call))
    return output.transpose(1, 2)


def _in_rows(x: Float[Tensor, "B H M D"]) -> Float[Tensor, "B H M D"]:
    """Returns x with its caches at equal distances and the rows of each without gaps."""
    _, heads, _, dim = x.shape
    of_text, of_cache, *of_row = x.stride()
    return x if of_text == heads * of_cache and of_row == [dim, 1] else x.contiguous()
