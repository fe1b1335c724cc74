"""Computes the loss from dropping each key alone, in blocks of queries.

Dropping key j moves the output of query i from o_i to o_i + t_ij (o_i - v_j) with
t_ij = alpha_ij / (1 - alpha_ij). The squared changes t_ij^2 ||v_j - o_i||^2 sum, with
u_ij = t_ij^2, to

    ||v_j||^2 sum_i u_ij - 2 v_j . sum_i u_ij o_i + sum_i u_ij ||o_i||^2

This leaves three products of attention's size: the scores, the outputs, and u with the outputs.
Only the key of the largest weight can have t_ij above 1, where v_j - o_i cancels. Its change is
computed as alpha_ij (o_i' - v_j), where o_i' is the output of all other keys.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.attention import finite, working_precision
from value_aware_attention.caches.compiled_losses import compiled_losses, is_compiled
from value_aware_attention.caches.method import available
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.ways import ELSEWHERE
from value_aware_attention.error import typical_unit

BLOCK = {"cpu": 2**18}
"""Weights computed at once, so that they fit a CPU's cache"""


def single_losses(
    observed: Observed, *, projected: bool = False
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch G W V"]]:
    """Computes the squared change of the outputs when each key is dropped alone, and the outputs.

    Changes are summed over the queries of a group as if drops were additive. A query that sees no
    other key loses its output. `projected` measures outputs after W_o, if it is known. Losses are
    returned in fp64, computed in at least fp32 with the memory of a block of queries.
    """
    if is_compiled(observed):
        return compiled_losses(observed, projected=projected)
    value = working_precision(observed.value)
    losses = value.new_empty(*observed.batch, observed.keys, dtype=torch.float64)
    outputs = value.new_empty(*observed.query.shape[:-1], value.shape[-1])
    for place in np.ndindex(*observed.batch):
        losses[place], outputs[place] = _of_cache(observed.cache(place), projected)
    return losses, outputs


def _of_cache(
    observed: Observed, projected: bool
) -> tuple[Float[Tensor, " M"], Float[Tensor, "G W V"]]:
    """Computes the losses and outputs of one cache."""
    key, (value, centre, unit) = working_precision(observed.key), _centred(observed)
    metric = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
    if projected and observed.projection is not None:
        projection = working_precision(observed.projection)
        metric = projection @ projection.mT  # ||x W_o||^2 = x metric x
    groups, queries, _ = observed.query.shape
    rows = max(1, BLOCK.get(value.device.type, ELSEWHERE) // max(1, groups * observed.keys))
    sums = value.new_zeros(groups, observed.keys, value.shape[-1] + 2)
    of_largest = value.new_zeros(observed.keys)
    outputs = value.new_empty(groups, queries, value.shape[-1])
    for start in range(0, queries, rows):
        block = observed.take(slice(start, start + rows))
        scores = observed.kernel.log_similarity(
            working_precision(block.query).flatten(0, 1), key
        ).unflatten(0, (groups, -1))
        if block.visible is not None:
            scores.masked_fill_(~block.visible, -torch.inf)
        top, largest = scores.max(dim=-1, keepdim=True)
        scale = finite(torch.maximum(top, block.log_mass_beside))
        weights = scores.sub_(scale).exp_()
        of_top = (top - scale).exp()
        weights.scatter_(-1, largest, 0.0)
        beside = (block.log_mass_beside - scale).exp()
        others = weights.sum(dim=-1, keepdim=True) + beside
        changed = (weights.flatten(0, 1) @ value).unflatten(0, (groups, -1))
        if block.beside is not None:
            changed += beside * (block.beside.output() / unit - centre)
        total = others + of_top
        filled = total.where(total > 0, 1.0)
        value_of_top = value[largest[..., 0]]
        output = (changed + of_top * value_of_top) / filled
        outputs[:, start : start + rows] = (output + centre.where(total > 0, 0.0)) * unit
        left = (changed / others.where(others > 0, 1.0)).where(others > 0, -centre)
        lost = (of_top / filled).square() * _squared(left - value_of_top, metric)
        of_largest.scatter_add_(0, largest.flatten(), lost.flatten())
        weights.div_(filled - weights)
        weights.mul_(weights)
        turned = output @ metric
        length = (turned * output).sum(dim=-1, keepdim=True)
        right = torch.cat([turned, torch.ones_like(length), length], dim=-1)
        sums.baddbmm_(weights.mT, right)
    loss = _squared(value, metric)[..., 0] * sums[..., -2] + sums[..., -1]
    loss -= 2 * (value * sums[..., :-2]).sum(dim=-1)
    loss = (of_largest + loss.clamp_min_(0).sum(dim=0)).double() * unit.double().square()
    return loss.flatten(), outputs


def _centred(
    observed: Observed,
) -> tuple[Float[Tensor, "M V"], Float[Tensor, "1 V"], Float[Tensor, "1 1"]]:
    """Returns the centred values of a cache, their mean, both in a unit, and the unit."""
    value, allowed = working_precision(observed.value), available(observed)[:, None]
    centre = value.where(allowed, 0.0).sum(dim=0) / allowed.sum().clamp_min(1)
    value = (value - centre).where(allowed, 0.0)
    unit = typical_unit(value)  # squares of values may leave the range of fp32
    return value / unit, centre / unit, unit


def _squared(x: Float[Tensor, "*#G N V"], metric: Float[Tensor, "*#G V V"]) -> Tensor:
    """Computes x metric x of each vector, with a last dimension of size 1."""
    return ((x @ metric) * x).sum(dim=-1, keepdim=True)
