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
    if not _is_served(query, key, value, kernel, pages):
        return None
    library = native.library(TOKEN_SOURCE, *CONSTANTS)
    if library is None:
        return None
    texts, query_heads, rows, dim = query.shape
    heads, width = value.shape[1], value.shape[3]
    query = query if query.stride(3) == 1 else query.contiguous()
    key, value = _in_rows(key), _in_rows(value)
    output = query.new_empty(texts, rows, query_heads, width)
    visible_strides, addresses = (0, 0, 0, 0), [query.data_ptr(), key.data_ptr(), value.data_ptr()]
    addresses += [0, 0, 0, 0, 0, 0, 0, output.data_ptr()]
    keys = texts * heads * key.shape[2]
    if bias is not None:
        bias = bias.float().contiguous()
        addresses[3] = bias.data_ptr()
    if pages is not None:
        keys += pages.slots
        addresses[4:9] = _addresses(pages)
    if visible is not None:
        visible = visible.expand(texts, query_heads, rows, -1)
        visible_strides, addresses[9] = visible.stride(), visible.data_ptr()
    groups = query_heads // heads
    threads = 1 + keys * groups * rows * (dim + width) // PER_THREAD
    call = _Call(
        *addresses, query.stride()[:3], visible_strides, key.stride(1), value.stride(1), texts,
        heads, groups, rows, dim, width, slots, first, min(torch.get_num_threads(), threads),
        kernel.scale_for(dim),
    )  # fmt: skip
    library.attend(ctypes.byref(call))
    return output.transpose(1, 2)


def _is_served(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, pages: Pages | None
) -> bool:
    """Returns whether the compiled code computes attention of these tensors."""
    tensors = (query, key, value) if pages is None else (query, key, value, pages.key, pages.value)
    if type(kernel) is not Exponential or query.shape[2] > MOST_ROWS or not query.is_cpu:
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if pages is not None and pages.bias is not None and pages.bias.dtype != torch.float32:
        return False
    return query.dtype == key.dtype == value.dtype == torch.float32


def _addresses(pages: Pages) -> list[int]:
    """Returns where the keys, values, log-weights and spans of pages lie; 0 without log-weights."""
    bias = 0 if pages.bias is None or not pages.is_weighted else pages.bias.data_ptr()
    spans = pages.spans.data_ptr()
    after = spans + pages.caches * pages.spans.itemsize
    return [pages.key.data_ptr(), pages.value.data_ptr(), bias, spans, after]


def _in_rows(x: Float[Tensor, "B H M D"]) -> Float[Tensor, "B H M D"]:
    """Returns x with its caches at equal distances and the rows of each without gaps."""
    of_text, of_cache, *of_row = x.stride()
    is_in_rows = of_text == x.shape[1] * of_cache and of_row == [x.shape[3], 1]
    return x if is_in_rows else x.contiguous()
