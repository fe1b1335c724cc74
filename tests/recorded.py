"""Builds attention calls like those recorded from a model's layers."""

from dataclasses import replace

from torch import Tensor

from value_aware_attention.call import Call
from value_aware_attention.kernels import Exponential, Kernel


def recorded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel = Exponential(),
    is_causal: bool = False,
    first_row: int = 0,
    mask: Tensor | None = None,
) -> Call:
    """Builds a call whose rows before `first_row` only give context."""
    call = Call.of(query, key, value, kernel=kernel, attn_mask=mask, is_causal=is_causal)
    return replace(call, first_row=first_row)
