"""Slow, obvious solutions of section 3's problem: the truth the fast solver is held to.

The problem, for one query: the closest point to `output` among convex combinations of at most r of
the values. Everything is fp64 without leading dimensions, value (M, V) and output (V,); an answer
is a distribution over all M keys, zero where a key is not used.
"""

import itertools
import math

import torch
from jaxtyping import Bool, Float
from scipy.optimize import nnls
from torch import Tensor


def squared_error(
    weights: Float[Tensor, "... M"], value: Float[Tensor, "M V"], output: Float[Tensor, " V"]
) -> Float[Tensor, "..."]:
    """Computes ||o - sum_i w_i v_i||^2 with values centred on o: exact far from the origin too."""
    return (weights.double() @ (value.double() - output.double())).square().sum(dim=-1)


def closest_in_hull(
    points: Float[Tensor, "K V"], target: Float[Tensor, " V"]
) -> Float[Tensor, " K"]:
    """Returns weights >= 0 summing to 1 of the point of conv{points} closest to the target.

    u >= 0 minimising ||sum_i u_i (p_i - t) / c||^2 + (1 - sum_i u_i)^2, divided by its sum: for
    every c > 0 this is the projection itself, not an approximation for large c.
    """
    centred = points.double() - target.double()
    c = float(centred.norm(dim=-1).max()) or 1.0
    lifted = torch.cat([centred / c, torch.ones_like(centred[:, :1])], dim=1)
    right = torch.zeros_like(lifted[0])
    right[-1] = 1
    solution, _ = nnls(lifted.T.numpy(), right.numpy())
    weights = torch.from_numpy(solution)
    return weights / weights.sum()


def brute_force(
    value: Float[Tensor, "M V"], output: Float[Tensor, " V"], r: int
) -> Float[Tensor, " M"]:
    """Tries every set of at most r keys: the optimum (M up to about 18).

    On the set that carries the optimum all weights are positive, so the optimum is the projection
    on the affine hull of that set; of all such projections, those with a negative weight are no
    convex combinations and are passed over.
    """
    best = torch.zeros(len(value), dtype=torch.float64)
    smallest = math.inf
    for size in range(1, min(r, len(value)) + 1):
        sets = torch.tensor(list(itertools.combinations(range(len(value)), size)))
        weights = _affine_projection(value.double()[sets], output.double())
        convex = (weights >= 0).all(dim=-1)
        errors = (weights[:, None] @ (value.double()[sets] - output.double()))[:, 0]
        errors = errors.square().sum(dim=-1).where(convex, torch.inf)
        if errors.min() < smallest:
            smallest, winner = float(errors.min()), int(errors.argmin())
            best = torch.zeros_like(best).scatter(0, sets[winner], weights[winner])
    return best


def _affine_projection(
    points: Float[Tensor, "S K V"], target: Float[Tensor, " V"]
) -> Float[Tensor, "S K"]:
    """Returns weights of any sign, summing to 1, of the closest point of each set's affine hull."""
    directions = (points[:, 1:] - points[:, :1]).transpose(1, 2)
    to_target = (target - points[:, 0])[..., None]
    steps = torch.linalg.lstsq(directions, to_target, driver="gelsd").solution[..., 0]
    return torch.cat([1 - steps.sum(dim=1, keepdim=True), steps], dim=1)


def all_pairs(value: Float[Tensor, "M V"], output: Float[Tensor, " V"]) -> Float[Tensor, " M"]:
    """Computes the optimum at r = 2 in closed form: the closest point of every [v_i, v_j]."""
    first, second = torch.combinations(torch.arange(len(value)), with_replacement=True).unbind(1)
    centred = value.double() - output.double()
    apart = centred[first] - centred[second]
    share = -(centred[second] * apart).sum(dim=1) / apart.square().sum(dim=1).clamp_min(1e-300)
    share = share.clamp(0, 1)
    errors = (centred[second] + share[:, None] * apart).square().sum(dim=1)
    best = int(errors.argmin())
    places, weights = torch.stack([first, second])[:, best], torch.stack([share, 1 - share])
    return torch.zeros(len(value)).double().index_add(0, places, weights[:, best])


def greedy_path(
    value: Float[Tensor, "M V"], output: Float[Tensor, " V"], visible: Bool[Tensor, " M"], r: int
) -> Float[Tensor, "r M"]:
    """Searches "fast", one key at a time: row s - 1 is the best it met with at most s keys.

    It starts at the closest value. Each step adds the key with the largest <v_i - x, o - x> /
    ||v_i - o||, x being the combination so far, and solves for the weights anew; keys whose weight
    becomes 0 leave. It ends with r keys, or when no key leads from x towards o.
    """
    centred = value.double() - output.double()
    distance = centred.norm(dim=-1).where(visible, torch.inf)
    path = torch.zeros(r, len(value), dtype=torch.float64)
    path[:, distance.argmin()] = 1.0
    while (path[-1] > 0).sum() < r:
        support = path[-1].nonzero()[:, 0]
        combination = path[-1] @ centred
        towards = (centred - combination) @ -combination / distance
        best = int(towards.where(visible, -torch.inf).argmax())
        if towards[best] <= 1e-13 * distance[visible].max() or best in support:
            break
        support = torch.cat([support, torch.tensor([best])])
        weights = torch.zeros(len(value), dtype=torch.float64)
        weights[support] = closest_in_hull(value[support], output)
        path[int((weights > 0).sum()) - 1 :] = weights  # the error only falls, so it is the best
    return path
