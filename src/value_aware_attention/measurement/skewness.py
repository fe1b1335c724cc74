"""Skewness of attention weights, from which section 3 argues, by layer of a real model."""

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.call import Call
from value_aware_attention.measurement.recorded import error_rows

__all__ = ["skewness", "skewness_of"]


def skewness(call: Call) -> dict[str, float]:
    """Computes `skewness_of` the rows on which a layer's errors are measured, block by block."""
    shapes, rows = [], []
    for block in error_rows(call).blocks():
        shapes.append(skewness_of(block.weights))
        rows.append(block.query.shape[-2])
    return {
        name: sum(n / sum(rows) * shape[name] for n, shape in zip(rows, shapes, strict=True))
        for name in shapes[0]
    }


def skewness_of(weights: Float[Tensor, "*batch N M"]) -> dict[str, float]:
    """Averages measures of skewness over rows of attention weights alpha.

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
