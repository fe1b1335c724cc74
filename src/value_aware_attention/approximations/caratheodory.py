"""Carathéodory's theorem, constructed: a convex combination of many points as one of few.

A point that is a convex combination of M points in R^d is one of at most d + 1 of them (section 3).
The batched construction below merges the points of a query into about 2 (d + 1) weighted groups,
removes all but d + 1 groups by moving along affine dependencies until a weight reaches 0, and
repeats inside the surviving groups until every group is a single point; grouping (Maalouf et al.,
2019) makes the number of removals grow with log M instead of M. All of it runs in fp64, which on a
CPU costs hardly more than fp32 here and leaves errors near 1e-13. Rows that degenerate values spoil
(duplicates among the heaviest points) are solved again, one by one, by non-negative least squares.
"""

import math

import torch
from jaxtyping import Float, Int
from scipy.optimize import nnls
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

__all__ = ["affine_coordinates", "caratheodory"]

ROWS_AT_ONCE = 512
TOLERANCE = 1e-9
"""Largest ||o - o~|| / max ||v - mean v|| that the batched construction may leave."""


def caratheodory(
    weights: Float[Tensor, "N M"], value: Float[Tensor, "M V"]
) -> tuple[Int[Tensor, "N R"], Float[Tensor, "N R"]]:
    """Indices and weights of at most rank + 1 values with the same weighted mean as all of them.

    `weights` are >= 0 and sum to 1, or to 0 in rows that hide every key (then all slots are 0).
    rank is the affine rank of the values, R = min(rank + 1, M).
    """
    points = affine_coordinates(value)
    keys, size = points.shape
    if keys <= size:
        return torch.arange(keys, device=weights.device).expand_as(weights), weights
    exact = weights.double()
    exact = exact / exact.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(exact.dtype).tiny)
    blocks = [_reduce(block, points) for block in exact.split(ROWS_AT_ONCE)]
    indices = torch.cat([kept for kept, _ in blocks])
    reduced = torch.cat([mass for _, mass in blocks])
    _solve_spoiled_rows(indices, reduced, exact, points)
    return indices, reduced.to(weights.dtype)


def affine_coordinates(value: Float[Tensor, "M V"]) -> Float[Tensor, "M S"]:
    """The values in an orthonormal frame of their affine hull, with a last coordinate of 1.

    S = affine rank + 1. Whitening removes directions the values do not span, and with them the
    singular systems that constant or low-rank values would give.
    """
    centred = value.double() - value.double().mean(dim=0)
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    precision = torch.finfo(value.dtype).eps
    rank = int((singular > singular[0] * precision * max(value.shape)).sum())
    frame = left[:, :rank] * math.sqrt(value.shape[0])
    return torch.cat([frame, torch.ones_like(centred[:, :1])], dim=1)


def _reduce(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (N, M) on all points -> indices and weights (N, S)."""
    # Heaviest first: the first S groups form the basis, and the light ones vanish in one step each.
    mass, indices = weights.sort(dim=-1, descending=True)
    size = points.shape[-1]
    while indices.shape[-1] > size:
        members = math.ceil(indices.shape[-1] / (2 * size))
        indices, mass = _fill_groups(indices, mass, members)
        grouped = mass.unflatten(-1, (-1, members))  # N groups members
        total = grouped.sum(dim=-1)
        share = (grouped / total[..., None]).where(total[..., None] > 0, 1.0 / members)
        centres = _weighted_means(indices.unflatten(-1, (-1, members)), share, points)
        groups, kept = _eliminate(total, centres)
        share = share.gather(1, groups[..., None].expand(-1, -1, members))
        mass = (kept[..., None] * share).flatten(1)
        slots = groups[..., None] * members + torch.arange(members, device=groups.device)
        indices = indices.gather(1, slots.flatten(1))
        if members > 1:
            mass, heaviest = mass.sort(dim=-1, descending=True)
            indices = indices.gather(-1, heaviest)
    return indices, mass


def _weighted_means(indices: Tensor, share: Tensor, points: Tensor) -> Tensor:
    """sum_m share[n, g, m] points[indices[n, g, m]], without the gathered copy: (N, G, S)."""
    flat = embedding_bag(
        indices.flatten(0, 1), points, per_sample_weights=share.flatten(0, 1), mode="sum"
    )
    return flat.unflatten(0, indices.shape[:2])


def _fill_groups(indices: Tensor, mass: Tensor, members: int) -> tuple[Tensor, Tensor]:
    """Appends slots of weight 0 until every group has the same number of members."""
    missing = -indices.shape[-1] % members
    filler = indices[:, -1:].expand(-1, missing)
    return torch.cat([indices, filler], dim=-1), pad(mass, (0, missing))


def _eliminate(mass: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Removes points until S are left: mass (N, G), points (N, G, S) -> indices, mass (N, S).

    Row c of `table` writes the point S + c in terms of the S points that form the basis. Taking
    weight away from it changes the basis weights along that row; it goes on until the point, or a
    basis point that it then replaces, has none left.
    """
    rows = torch.arange(mass.shape[0], device=mass.device)
    size = points.shape[-1]
    basis = torch.arange(size, device=mass.device).repeat(mass.shape[0], 1)
    factors, pivots, _ = torch.linalg.lu_factor_ex(points[:, :size].transpose(1, 2))
    table = torch.linalg.lu_solve(factors, pivots, points[:, size:].transpose(1, 2))
    table = table.transpose(1, 2).contiguous()
    kept, waiting = mass[:, :size].clone(), mass[:, size:]
    for point in range(table.shape[1]):
        direction = table[:, point]
        step, leaving = torch.where(direction < 0, kept / -direction, torch.inf).min(dim=-1)
        swap = step < waiting[:, point]
        step = torch.where(swap, step, waiting[:, point])
        kept.addcmul_(step[:, None], direction).clamp_min_(0)
        kept[rows, leaving] = torch.where(swap, waiting[:, point] - step, kept[rows, leaving])
        basis[rows, leaving] = torch.where(swap, size + point, basis[rows, leaving])
        rest = table[:, point + 1 :]
        share = rest[rows, :, leaving] / direction[rows, leaving][:, None]
        share = torch.where(swap[:, None], share, 0.0)
        direction[rows, leaving] -= 1
        rest.addcmul_(share[:, :, None], direction[:, None, :], value=-1)
    return basis, kept


def _solve_spoiled_rows(indices: Tensor, reduced: Tensor, weights: Tensor, points: Tensor) -> None:
    """Replaces, in place, the rows that do not reproduce their weighted mean to the tolerance."""
    reduced.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    mean = _weighted_means(indices[:, None], reduced[:, None], points)[:, 0]
    left_over = (mean - weights @ points).norm(dim=-1)
    spoiled = left_over > TOLERANCE * points.norm(dim=-1).max()
    for row in spoiled.nonzero()[:, 0].tolist():
        alive = weights[row].nonzero()[:, 0]
        target = weights[row] @ points
        solution, _ = nnls(points[alive].T.cpu().numpy(), target.cpu().numpy())
        mass = torch.from_numpy(solution).to(weights)
        support = mass.nonzero()[:, 0]
        indices[row] = alive[0]
        reduced[row] = 0.0
        indices[row, : len(support)] = alive[support]
        reduced[row, : len(support)] = mass[support] / mass.sum()
