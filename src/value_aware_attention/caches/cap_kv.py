"""Keeps keys whose values span the most of the space of weighted values."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.expected_attention import ExpectedAttention
from value_aware_attention.caches.method import CacheMethod, available, protected
from value_aware_attention.caches.observed import Observed

SHARPNESS, EPSILON = 5.0, 1e-6


class CapKV(ExpectedAttention):
    """Keeps the r keys with the largest w_j v_j' (I + sum_i w_i v_i v_i')^-1 v_j.

    CapKV (arXiv 2604.25975) as its author's press in kvpress has it: w = exp(5 c) of the cosine c
    of a key to the mean query, which is turned by the mean rotation of the `horizon` positions to
    come; the mean over the group. It looks at all queries, and leaves protected keys out.
    """

    kernels = CacheMethod.kernels

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        key, value = working_precision(seen.key)[..., None, :, :], working_precision(seen.value)
        mean, _ = self._statistics(seen)
        counted = (available(seen) & ~protected(seen))[..., None, :]
        cosine = cosine_similarity(mean[..., None, :], key, dim=-1).masked_fill(
            ~counted, -torch.inf
        )
        weights = (SHARPNESS * (cosine - cosine.amax(dim=-1, keepdim=True))).exp().nan_to_num()
        scaled = ((weights + EPSILON) * counted)[..., None] * value[..., None, :, :]
        whole = torch.eye(value.shape[-1], device=value.device) + value[..., None, :, :].mT @ scaled
        solved = torch.linalg.solve(whole, value[..., None, :, :].mT).mT
        return (weights * (value[..., None, :, :] * solved).sum(dim=-1)).mean(dim=-2)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * head_dim + keys * (head_dim + 2 * value_dim**2))
