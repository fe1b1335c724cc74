"""Keeps keys whose values span the most of the space of weighted values."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.expected_attention import ExpectedAttention
from value_aware_attention.caches.method import CacheMethod, candidates
from value_aware_attention.caches.observed import Observed


class CapKV(ExpectedAttention):
    """Keeps the r keys with the largest w_j v_j' (I + sum_i w_i v_i v_i')^-1 v_j.

    CapKV (arXiv 2604.25975) as its author's press in kvpress has it: w = exp(5 c) of the cosine c
    of a key to the mean query, over the largest of them; the mean query is turned by the mean
    rotation of the `horizon` positions to come; the mean over the group. Its author looks at all
    queries but the first 4 (here at these too), with sinks = 4 and recent = 0; protected keys are
    left out. The unit I makes the choice depend on the scale of the values.
    """

    kernels = CacheMethod.kernels

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        key, value = (working_precision(x)[..., None, :, :] for x in (seen.key, seen.value))
        mean, _ = self._statistics(seen)
        cosine = cosine_similarity(mean[..., None, :], key, dim=-1)
        cosine = cosine.masked_fill(~candidates(seen)[..., None, :], -torch.inf)
        weights = (5 * (cosine - cosine.amax(dim=-1, keepdim=True))).exp().nan_to_num()
        factors = (weights + 1e-6).where(cosine > -torch.inf, 0.0)
        whole = (value.mT * factors[..., None, :]) @ value
        solved = torch.linalg.solve(whole + torch.eye(whole.shape[-1]).to(whole), value.mT).mT
        return (weights * (value * solved).sum(dim=-1)).mean(dim=-2)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * head_dim + keys * (head_dim + 2 * value_dim**2))
