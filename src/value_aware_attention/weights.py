"""Ranks and renormalises the weights of keys, and sums values by them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag


def renormalised(weights: Float[Tensor, "*batch N R"]) -> Float[Tensor, "*batch N R"]:
    """Divides weights by their sum; rows that sum to 0 stay 0."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.clamp_min(torch.finfo(weights.dtype).tiny)


def usable(weights: Float[Tensor, "*batch N M"]) -> Bool[Tensor, "*batch N M"]:
    """Finds the keys that attention's own weights can use: those that did not underflow to 0."""
    return weights >= torch.finfo(weights.dtype).tiny


def or_overflow(
    weights: Float[Tensor, "*batch N R"], alpha: Float[Tensor, "*#batch N M"]
) -> Float[Tensor, "*batch N R"]:
    """Replaces weights by NaN in rows whose attention weights alpha are NaN: scores overflow."""
    return weights.masked_fill(alpha.detach().sum(dim=-1, keepdim=True).isnan(), torch.nan)


def top_keys(
    scores: Float[Tensor, "*batch N M"],
    allowed: Bool[Tensor, "*#batch #N #M"] | None,
    r: int,
    *,
    is_sorted: bool = True,
) -> Int[Tensor, "*batch N R"]:
    """Returns the min(r, M) keys with the largest scores, the lowest indices among equals.

    They are in the order of their scores, or in any with `is_sorted` False, which is faster.
    Keys that are not allowed come last: they are named only in rows with fewer than r others.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    top = scores.topk(min(r, scores.shape[-1]), dim=-1, sorted=is_sorted)
    if not top.indices.numel():
        return top.indices
    # topk breaks ties as it likes. That matters where equals are left out, and only there a
    # stable sort decides: sorting every row would cost several times the attention itself.
    last = top.values[..., -1:] if is_sorted else top.values.amin(dim=-1, keepdim=True)
    cut = (scores == last).sum(dim=-1) > (top.values == last).sum(dim=-1)
    cut &= last[..., 0] > -torch.inf
    ranked = scores[cut].argsort(dim=-1, descending=True, stable=True)
    return top.indices.masked_scatter(cut[..., None], ranked[:, : top.indices.shape[-1]])


def dense_weights(
    indices: Int[Tensor, "*batch N R"], weights: Float[Tensor, "*batch N R"], keys: int
) -> Float[Tensor, "*batch N M"]:
    """Scatters kept weights onto all keys; a key named twice gets the sum."""
    zeros = weights.new_zeros(*weights.shape[:-1], keys)
    return zeros.scatter_add(-1, indices, weights)


def weighted_sum(
    indices: Int[Tensor, "*batch N R"],
    weights: Float[Tensor, "*batch N R"],
    value: Float[Tensor, "*#batch M V"],
) -> Float[Tensor, "*batch N V"]:
    """Computes sum_r weights_r value[indices_r]; reads only the keys kept where they are few."""
    keys, width = value.shape[-2:]
    if 8 * indices.shape[-1] > keys or indices.numel() == 0:
        return dense_weights(indices, weights, keys) @ value
    batch = indices.shape[:-2]
    table = value.expand(*batch, keys, width).reshape(-1, width)
    first = torch.arange(0, len(table), keys, device=value.device).view(*batch, 1, 1)
    bags = (indices + first).flatten(0, -2)
    output = embedding_bag(bags, table, per_sample_weights=weights.flatten(0, -2), mode="sum")
    return output.unflatten(0, indices.shape[:-1])


def smallest(vectors: Float[Tensor, "*batch N V"]) -> Float[Tensor, "*batch 1 V"]:
    """Returns the vector of least norm: of outputs, one that no distant value has moved far."""
    return vectors.take_along_dim(vectors.norm(dim=-1, keepdim=True).argmin(-2, keepdim=True), -2)
