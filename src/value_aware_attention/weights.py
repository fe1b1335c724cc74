"""Ranks and renormalises the weights of keys, and sums values by them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag


def renormalised(weights: Float[Tensor, "*batch N R"]) -> Float[Tensor, "*batch N R"]:
    """Divides weights by their sum; rows that sum to 0 stay 0."""
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def usable(weights: Float[Tensor, "*batch N M"]) -> Bool[Tensor, "*batch N M"]:
    """Returns a mask of the keys whose attention weight did not underflow to 0."""
    return weights >= torch.finfo(weights.dtype).tiny


def or_overflow(
    weights: Float[Tensor, "*batch N R"], alpha: Float[Tensor, "*#batch N M"]
) -> Float[Tensor, "*batch N R"]:
    """Sets weights to NaN in rows whose alpha is NaN because scores overflowed."""
    return weights.masked_fill(alpha.detach().sum(dim=-1, keepdim=True).isnan(), torch.nan)


def top_keys(
    scores: Float[Tensor, "*batch N M"],
    allowed: Bool[Tensor, "*#batch #N #M"] | None,
    r: int,
    *,
    is_sorted: bool = True,
) -> Int[Tensor, "*batch N R"]:
    """Returns the min(r, M) keys with the largest scores; ties go to the lowest index.

    They are sorted by score; `is_sorted` False leaves them unsorted and is faster. Keys that are
    not allowed come last: they appear only in rows with fewer than r allowed keys.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    top = scores.topk(min(r, scores.shape[-1]), dim=-1, sorted=is_sorted)
    if not top.indices.numel():
        return top.indices
    # topk breaks ties arbitrarily, which matters only where some of the tied keys are left out.
    # Only those rows get a stable sort: sorting every row would cost several times the attention.
    last = top.values[..., -1:] if is_sorted else top.values.amin(dim=-1, keepdim=True)
    cut = (scores == last).sum(dim=-1) > (top.values == last).sum(dim=-1)
    cut &= last[..., 0] > -torch.inf
    ranked = scores[cut].argsort(dim=-1, descending=True, stable=True)
    return top.indices.masked_scatter(cut[..., None], ranked[:, : top.indices.shape[-1]])


def dense_weights(
    indices: Int[Tensor, "*batch N R"], weights: Float[Tensor, "*batch N R"], keys: int
) -> Float[Tensor, "*batch N M"]:
    """Scatters the weights onto all keys; repeated indices are summed."""
    return weights.new_zeros(*weights.shape[:-1], keys).scatter_add(-1, indices, weights)


def weighted_sum(
    indices: Int[Tensor, "*batch N R"],
    weights: Float[Tensor, "*batch N R"],
    value: Float[Tensor, "*#batch M V"],
) -> Float[Tensor, "*batch N V"]:
    """Computes sum_r weights_r value[indices_r]; with few indices it reads only these values."""
    keys, width = value.shape[-2:]
    if 8 * indices.shape[-1] > keys or indices.numel() == 0:
        return dense_weights(indices, weights, keys) @ value
    batch = indices.shape[:-2]
    table = value.expand(*batch, keys, width).reshape(-1, width)
    first = torch.arange(0, len(table), keys, device=value.device).view(*batch, 1, 1)
    bags = (indices + first).flatten(0, -2)
    output = embedding_bag(bags, table, per_sample_weights=weights.flatten(0, -2), mode="sum")
    return output.unflatten(0, indices.shape[:-1])


def mean_of_visible(
    value: Float[Tensor, "*#batch M V"], visible: Bool[Tensor, "*#batch #N M"] | None, queries: int
) -> Float[Tensor, "*batch N V"]:
    """Averages the values that each query sees; zeros if it sees none."""
    if visible is None:
        return value.mean(dim=-2, keepdim=True).expand(*value.shape[:-2], queries, -1)
    share = visible.to(value.dtype) / visible.sum(dim=-1, keepdim=True).clamp_min(1)
    return (share @ value).expand(*value.shape[:-2], queries, -1)


def smallest(vectors: Float[Tensor, "*batch N V"]) -> Float[Tensor, "*batch 1 V"]:
    """Returns the vector of smallest norm; among outputs, distant values moved it least."""
    return vectors.take_along_dim(vectors.norm(dim=-1, keepdim=True).argmin(-2, keepdim=True), -2)
