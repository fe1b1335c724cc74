"""Keys chosen for the output, weighted by attention: the other half of what value-aware gains."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import (
    Inputs,
    SparseApproximation,
    renormalised,
)
from value_aware_attention.approximations.ranked_keys import usable

__all__ = ["ValueAwareKeysAttentionWeights"]

QUERIES_AT_ONCE = 128


class ValueAwareKeysAttentionWeights(SparseApproximation):
    """At most r keys, chosen so that Eq. 2's weights on them come close to the exact output.

    argmin over sets S of at most r keys of ||o - sum_S alpha_i v_i / sum_S alpha_i||^2, searched
    greedily: each step adds the key that leaves the smallest error. The choice is best found, not
    proved optimal, except at r = 1. More keys can be worse here, so the best size up to r is kept.
    Keys whose weight is 0 cannot be used.
    """

    def choose(
        self, inputs: Inputs
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        weights = inputs.weights().expand(*inputs.batch, -1, -1)
        r = min(self.r, inputs.keys)
        with torch.no_grad():
            value = inputs.centred().value  # distances keep their digits far from 0
            blocks = [_greedy(w, value, r) for w in weights.split(QUERIES_AT_ONCE, dim=-2)]
            indices = torch.cat([kept for kept, _ in blocks], dim=-2)
            size = torch.cat([best for _, best in blocks], dim=-1)
        within = torch.arange(r, device=size.device) < size[..., None]
        return indices, renormalised(weights.gather(-1, indices) * within)


def _greedy(
    weights: Float[Tensor, "*batch N M"], value: Float[Tensor, "*#batch M V"], r: int
) -> tuple[Int[Tensor, "*batch N R"], Int[Tensor, "*batch N"]]:
    """Keys in the order they were added, and how many of the first of them do best.

    With x the combination so far and A its attention mass, adding key i moves x to
    x + t (v_i - x), t = alpha_i / (A + alpha_i).
    """
    output = weights @ value
    distance = torch.cdist(output, value).square()
    residual, mass = torch.zeros_like(output), torch.zeros_like(weights[..., :1])
    taken = ~usable(weights)
    best = torch.full_like(weights[..., 0], torch.inf)
    size = torch.zeros_like(best, dtype=torch.int64)
    order = []
    for step in range(r):
        share = weights / (mass + weights).clamp_min_(torch.finfo(weights.dtype).tiny)
        errors = _errors_on_segments(residual, output, value, distance, share)
        smallest, key = errors.masked_fill_(taken, torch.inf).min(dim=-1, keepdim=True)
        added = torch.take_along_dim(value, key, dim=-2) - output
        residual = torch.lerp(residual, added, share.gather(-1, key))
        mass = mass + weights.gather(-1, key)
        taken.scatter_(-1, key, True)
        error = residual.square().sum(dim=-1).where(smallest[..., 0].isfinite(), torch.inf)
        size, best = size.where(error >= best, step + 1), torch.minimum(best, error)
        order.append(key)
    return torch.cat(order, dim=-1), size


def _errors_on_segments(
    residual: Float[Tensor, "*batch N V"],
    output: Float[Tensor, "*batch N V"],
    value: Float[Tensor, "*batch M V"],
    distance: Float[Tensor, "*batch N M"],
    share: Float[Tensor, "*batch N M"],
) -> Float[Tensor, "*batch N M"]:
    """||(1 - t)(x - o) + t (v_i - o)||^2 for every key: one matrix product.

    A quadratic in t with the Bezier coefficients ||x - o||^2, <x - o, v_i - o> and ||v_i - o||^2,
    evaluated by de Casteljau's rule, which neither overflows nor divides.
    """
    start = residual.square().sum(dim=-1, keepdim=True)
    along = residual @ value.transpose(-2, -1)
    along -= (residual * output).sum(dim=-1, keepdim=True)
    left = torch.lerp(start, along, share)
    return left.lerp_(along.lerp_(distance, share), share)
