"""Finds the closest convex combination of two values to an attention output, over all pairs.

The squared distance of o from the segment between v_i and v_j follows from the sides of a triangle:
with e = | ||v_i - o||^2 - ||v_j - o||^2 | and D = ||v_i - v_j||^2 it is
min(||v_i - o||^2, ||v_j - o||^2) - max(D - e, 0)^2 / 4D. The D of a head serve all of its queries.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.closest_combination.problem import Problem

MOST_KEYS = 512
"""Largest number of keys of which all pairs are tried"""
HIDDEN = 1e300
"""Squared distance of a value that a row does not see: a pair with it is no closer than one key"""


def solve(problem: Problem) -> tuple[Int[Tensor, "H N 2"], Float[Tensor, "H N 2"]]:
    """Returns indices and weights of the two values that leave the smallest error, found in fp64.

    A key without weight has index 0; a row that sees nothing has no weights.
    """
    shape = (*problem.output.shape[:2], 2)
    indices = torch.zeros(shape, dtype=torch.int64, device=problem.value.device)
    weights = problem.value.new_zeros(shape)
    sees = problem.weights.sum(dim=-1) > 0
    for head, rows, exact in problem.in_fp64(sees):
        visible = None if exact.visible is None else exact.visible[0]
        near = torch.cdist(
            exact.output[0], exact.value[0], compute_mode="donot_use_mm_for_euclid_dist"
        )
        near = near.square()
        if visible is not None:
            near = near.masked_fill(~visible, HIDDEN)
        between = squared_distances_between(exact.value[0])
        _, pair = closest(near, between)
        apart = between[pair[:, 0], pair[:, 1]]
        first, second = near.gather(-1, pair).unbind(dim=-1)
        share = ((apart + second - first) / (2 * apart)).nan_to_num(0.5).clamp(0, 1)
        share = torch.where(apart > 0, share, (first <= second).to(share))
        mass = torch.stack([share, 1 - share], dim=-1)
        indices[head, rows] = pair * (mass > 0)
        weights[head, rows] = mass.to(weights.dtype)
    return indices, weights


def squared_distances_between(value: Float[Tensor, "*batch M V"]) -> Float[Tensor, "*batch M M"]:
    """Computes ||v_i - v_j||^2 of all pairs of values."""
    squared = value.square().sum(dim=-1)
    sums = squared[..., :, None] + squared[..., None, :]
    return sums.sub_(value @ value.mT, alpha=2).clamp_min_(0)


def closest(
    near: Float[Tensor, "N M"], between: Float[Tensor, "M M"]
) -> tuple[Float[Tensor, " N"], Int[Tensor, "N 2"]]:
    """Returns the smallest ||o - o~||^2 that any pair reaches, and the pair.

    `near` is ||v - o||^2, HIDDEN where a row does not see v. Lower bounds of it give a lower bound.
    """
    rows, keys = near.shape
    half = between.sqrt() / 2  # sqrt(D) / 2 - e / (2 sqrt(D)), squared, is what a pair gains
    slope = torch.where(half > 0, 1 / (4 * half), 0.0)
    error, last = near[:, 0].clone(), torch.zeros_like(near[:, 0], dtype=torch.int64)
    sees = near < HIDDEN
    start = torch.where(sees.any(dim=0), sees.int().argmax(dim=0), rows).tolist()
    for key in range(1, keys):
        seen = slice(start[key], rows)
        if start[key] < rows:
            best = _errors(near[seen], half, slope, key).amin(dim=-1)
            better = best < error[seen]
            last[seen].masked_fill_(better, key)
            error[seen] = best.where(better, error[seen])
    other = torch.zeros_like(last)
    for key in last.unique().tolist():
        if key > 0:
            which = (last == key).nonzero()[:, 0]
            other[which] = _errors(near[which], half, slope, key).argmin(dim=-1)
    return error, torch.stack([last, other], dim=-1)


def _errors(near: Tensor, half: Tensor, slope: Tensor, key: int) -> Tensor:
    """Computes the errors of one key paired with every key before it."""
    here, before = near[:, key : key + 1], near[:, :key]
    gain = (before - here).abs_()
    gain = torch.addcmul(half[key, :key], gain, slope[key, :key], value=-1, out=gain)
    gain = gain.clamp_min_(0)
    return torch.minimum(before, here).addcmul_(gain, gain, value=-1)
