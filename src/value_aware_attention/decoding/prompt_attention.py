"""Computes a prompt's attention together with its state, so that a choice does not repeat it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from value_aware_attention.attention import AttentionState
from value_aware_attention.hugging_face.attending import repeated
from value_aware_attention.hugging_face.layers import check_call


def attention_and_state(
    function: Callable[..., tuple[Tensor, Tensor | None]], module: nn.Module, query: Tensor,
    key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None, dropout: float,
    **options: Any,
) -> tuple[tuple[Tensor, Tensor | None], AttentionState | None]:  # fmt: skip
    """Calls an attention function of transformers; also returns each query's state over its past.

    PyTorch's fused attention on a CPU returns the log of its normaliser, which the function drops.
    The state is None where that kernel does not compute the call: on other devices, below fp32,
    with a mask or gradients, for parts of a prompt and for other attention functions.
    """
    tensors = (query, key, value)
    if (
        function is not sdpa_attention_forward
        or mask is not None
        or not getattr(module, "is_causal", False)
        or options.get("is_causal") is False
        or query.shape[2] != key.shape[2]
        or len({x.shape[-1] for x in tensors}) > 1
        or any(x.device.type != "cpu" or x.dtype != torch.float32 for x in tensors)
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        or torch.is_autocast_enabled("cpu")
    ):
        return (
            function(module, query, key, value, mask, scaling=scaling, dropout=dropout, **options),
            None,
        )
    check_call(dropout, options)
    output, log_total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, *repeated(query, key, value), 0.0, True, scale=scaling
    )
    log_total = log_total[..., None]
    state = AttentionState(output, torch.ones_like(log_total), log_total)
    return (output.transpose(1, 2).contiguous(), None), state
