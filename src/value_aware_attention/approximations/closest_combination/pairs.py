"""Finds the convex combination of two values closest to an attention output, over all pairs.

The squared distance of o from the segment between v_i and v_j follows from the sides of a triangle.
With e = | ||v_i - o||^2 - ||v_j - o||^2 | and D = ||v_i - v_j||^2 it is min(||v_i - o||^2,
||v_j - o||^2) - max(D - e, 0)^2 / 4D. All queries of a head share its D.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.closest_combination.problem import Problem, tiny

PAIR_KEYS = 512
"""Largest number of keys for which all pairs are tried"""
KEYS_AT_ONCE = 4
"""Number of keys paired at once: enough to outweigh call overhead, few enough for the cache"""
HIDDEN = 1e300
"""Squared distance of a hidden value, so large that no pair with it beats a single key"""


def solve(problem: Problem) -> tuple[Int[Tensor, "H N 2"], Float[Tensor, "H N 2"]]:
    """Returns indices and weights of the two values with the smallest error, found in fp64.

    A key with weight 0 has index 0; in a fully masked row all weights are 0.
    """
    weights = problem.value.new_zeros(*problem.output.shape[:2], 2)
    indices = torch.zeros_like(weights, dtype=torch.int64)
    for (heads, rows), exact in problem.in_fp64(problem.weights.sum(dim=-1) > 0):
        pairs = [_of_head(exact, number) for number in range(len(exact.value))]
        pair, mass = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        mass = mass * (exact.weights.sum(dim=-1, keepdim=True) > 0)
        indices[heads, rows] = pair * (mass > 0)
        weights[heads, rows] = mass.to(weights.dtype)
    return indices, weights


def _of_head(exact: Problem, head: int) -> tuple[Int[Tensor, "N 2"], Float[Tensor, "N 2"]]:
    """Returns the two closest values of one head, and their weights."""
    value, output = exact.value[head], exact.output[head]
    if exact.visible is not None:
        value = value.where(exact.visible[head].any(dim=0)[:, None], 0.0)
    # Differences instead of products keep the digits of the distance of a value close to o.
    near = torch.cdist(output, value, compute_mode="donot_use_mm_for_euclid_dist").square_()
    if exact.visible is not None:
        near.masked_fill_(~exact.visible[head], HIDDEN)
    error, pair = closest(near, squared_distances_between(value))
    first, second = value[pair].unbind(dim=1)
    if exact.mean is not None:
        of_mean, other = closest_to_mean(near, output, value, exact.mean[head])
        better = of_mean < error
        both = torch.stack([torch.full_like(other, exact.mean_key), other], dim=-1)
        pair = both.where(better[:, None], pair)
        first = exact.mean[head].where(better[:, None], first)
        second = value[other].where(better[:, None], second)
    apart = first - second
    squared = apart.square().sum(dim=-1)
    share = (output - second).mul(apart).sum(dim=-1) / squared.clamp_min(tiny(squared))
    visible = near.gather(-1, pair[:, 1:])[:, 0] < HIDDEN
    share = share.clamp(0, 1).where(visible, 1.0)
    return pair, torch.stack([share, 1 - share], dim=-1)


def squared_distances_between(value: Float[Tensor, "*batch M V"]) -> Float[Tensor, "*batch M M"]:
    """Computes ||v_i - v_j||^2 of all pairs of values."""
    squared = value.square().sum(dim=-1)
    sums = squared[..., :, None] + squared[..., None, :]
    return sums.sub_(value @ value.mT, alpha=2).clamp_min_(0)


def closest(
    near: Float[Tensor, "N M"], between: Float[Tensor, "M M"]
) -> tuple[Float[Tensor, " N"], Int[Tensor, "N 2"]]:
    """Returns the smallest ||o - o~||^2 over all pairs, and the pair.

    `near` is ||v - o||^2, or HIDDEN if a row does not see v. Lower bounds of it give a lower bound.
    """
    rows, keys = near.shape
    half = between.sqrt() / 2  # a pair gains (sqrt(D) / 2 - e / (2 sqrt(D)))^2
    slope = torch.where(half > 0, 1 / (4 * half), 0.0)
    error, first = near.min(dim=-1)
    sees = near < HIDDEN
    start = torch.where(sees.any(dim=0), sees.int().argmax(dim=0), rows).tolist()
    for block in range(0, keys, KEYS_AT_ONCE):
        end = min(block + KEYS_AT_ONCE, keys)
        seen = slice(min(start[block:end]), rows)  # a causal row sees no later pair
        if seen.start < rows:
            best, key = _errors(near[seen], half, slope, block, end).min(dim=-1)
            better = best < error[seen]
            first[seen] = torch.where(better, block + key, first[seen])
            error[seen] = best.where(better, error[seen])
    gain = (half[first] - (near - near.gather(-1, first[:, None])).abs() * slope[first]).clamp_min(
        0
    )
    errors = torch.minimum(near, near.gather(-1, first[:, None])) - gain.square()
    return error, torch.stack([first, errors.argmin(dim=-1)], dim=-1)


def closest_to_mean(
    near: Float[Tensor, "N M"],
    output: Float[Tensor, "N V"],
    value: Float[Tensor, "M V"],
    mean: Float[Tensor, "N V"],
) -> tuple[Float[Tensor, " N"], Int[Tensor, " N"]]:
    """Returns the smallest ||o - o~||^2 over all pairs of the mean with a value, and that value."""
    distance = (mean - output).square().sum(dim=-1, keepdim=True)
    between = torch.cdist(mean, value, compute_mode="donot_use_mm_for_euclid_dist").square_()
    gain = (between - (near - distance).abs()).clamp_min(0).square_()
    errors = torch.minimum(near, distance) - gain / (4 * between).clamp_min(tiny(between))
    errors = errors.masked_fill(near >= HIDDEN, torch.inf)
    return errors.min(dim=-1)


def _errors(near: Tensor, half: Tensor, slope: Tensor, block: int, end: int) -> Tensor:
    """Computes the smallest error of each key of a block, paired with the keys before its end."""
    here, before = near[:, block:end, None], near[:, None, :end]
    gain = (before - here).abs_()
    gain = torch.addcmul(half[block:end, :end], gain, slope[block:end, :end], value=-1, out=gain)
    gain = gain.clamp_min_(0)
    return torch.minimum(before, here).addcmul_(gain, gain, value=-1).amin(dim=-1)
