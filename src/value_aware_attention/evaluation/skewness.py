"""How skewed attention is: the property that section 3 argues from, per layer of a real model."""

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.approximation import Inputs
from value_aware_attention.attention import visibility
from value_aware_attention.evaluation.task import LayerCall

__all__ = ["skewness", "skewness_of"]


def skewness(call: LayerCall) -> dict[str, float]:
    """`skewness_of` all rows of a layer from its first on, block by block of them."""
    tensors = (call.query, call.key, call.value)
    visible = visibility(*tensors, attn_mask=call.attn_mask, is_causal=call.is_causal)
    shapes, rows, first = [], [], 0
    for block in Inputs(*tensors, call.kernel, visible, call.is_causal).blocks():
        weights = block.weights()[..., max(0, call.first_row - first) :, :]
        first += block.query.shape[-2]
        if weights.shape[-2]:
            shapes.append(skewness_of(weights))
            rows.append(weights.shape[-2])
    return {
        name: sum(n / sum(rows) * shape[name] for n, shape in zip(rows, shapes, strict=True))
        for name in shapes[0]
    }


def skewness_of(weights: Float[Tensor, "*batch N M"]) -> dict[str, float]:
    """Means over rows of attention weights alpha.

    `largest_weight`: max_i alpha_i; `rows_over_half`: share of rows with a weight above 0.5, where
    section 3 expects values to matter least; `effective_keys`: exp(entropy of alpha);
    `keys_for_90_percent`: the fewest keys that hold 90% of the mass.
    """
    largest = weights.amax(dim=-1)
    ordered = weights.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    return {
        "largest_weight": largest.mean().item(),
        "rows_over_half": (largest > 0.5).float().mean().item(),
        "effective_keys": torch.special.entr(weights).sum(dim=-1).exp().mean().item(),
        "keys_for_90_percent": (1 + (ordered < 0.9).sum(dim=-1)).float().mean().item(),
    }
