"""Computes the loss from dropping each key alone, for all caches of a layer at once.

Dropping key j moves the output of query i from o_i to o_i + t_ij (o_i - v_j) with
t_ij = alpha_ij / (1 - alpha_ij). The squared changes t_ij^2 ||v_j - o_i||^2 sum, with
u_ij = t_ij^2, to

    ||v_j||^2 sum_i u_ij - 2 v_j . sum_i u_ij o_i + sum_i u_ij ||o_i||^2

This leaves three products of attention's size: the scores, the outputs, and u with the outputs.
Only the key of the largest weight can have t_ij above 1, where v_j - o_i cancels. Its change is
computed as alpha_ij (o_i' - v_j), where o_i' is the output of all other keys.

Nothing here waits for a GPU, and no sum depends on the order in which its threads run.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.attention import finite, working_precision
from value_aware_attention.caches.method import available
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.ways import ELSEWHERE
from value_aware_attention.error import typical_unit

BLOCK = {"cpu": 2**19}
"""Weights computed at once, so that they fit a CPU's cache"""
Losses = tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch G W V"]]


@dataclass(frozen=True)
class Heads:
    """Holds C caches with G query heads each, H = C G; values are centred and in a unit."""

    observed: Observed
    query: Float[Tensor, "C G W D"]
    key: Float[Tensor, "C M D"]
    value: Float[Tensor, "C M V"]
    unit: Float[Tensor, "C 1 1"]
    centre: Float[Tensor, "H 1 V"]
    metric: Float[Tensor, "H V V"] | None
    """W_o W_o^T, so that ||x W_o||^2 = x metric x; None = the identity"""
    log_mass: Float[Tensor, "H W 1"]
    """Log of the mass beside the keys; -inf = none"""
    beside: Float[Tensor, "H W V"] | None
    """Output over what is beside the keys, centred and in the unit"""

    @classmethod
    def of(cls, observed: Observed, projected: bool) -> "Heads":
        """Prepares the losses after W_o, if it is known, or those of the outputs themselves."""
        caches, groups = observed.batch.numel(), observed.query.shape[-3]
        query, key, value = (
            working_precision(x).reshape(caches, *x.shape[-own:])
            for x, own in ((observed.query, 3), (observed.key, 2), (observed.value, 2))
        )
        value, centre, unit = _centred(observed, value)
        centre = centre.repeat(1, groups, 1).view(-1, 1, value.shape[-1])
        metric = beside = None
        if projected and observed.projection is not None:
            projection = working_precision(observed.projection)
            metric = (projection @ projection.mT).expand(*observed.query.shape[:-2], -1, -1)
            metric = metric.reshape(-1, *metric.shape[-2:])
        if observed.beside is not None:
            units = unit.repeat(1, groups, 1).view(-1, 1, 1)
            beside = observed.beside.output().reshape(len(units), -1, value.shape[-1])
            beside = beside / units - centre
        log_mass = observed.log_mass_beside.reshape(len(centre), -1, 1)
        return cls(observed, query, key, value, unit, centre, metric, log_mass, beside)

    def turned(self, x: Float[Tensor, "H n V"]) -> Float[Tensor, "H n V"]:
        """Multiplies vectors by the metric of their head."""
        return x if self.metric is None else x @ self.metric

    def scores(self, rows: slice) -> Float[Tensor, "H w M"]:
        """Computes log kappa of a block of queries; -inf for hidden pairs."""
        query, visible = self.query[:, :, rows], self.observed.visible
        scores = self.observed.kernel.log_similarity(query.flatten(1, 2), self.key)
        scores = scores.view(*query.shape[:-1], -1)
        if visible is not None:
            visible = visible[..., rows, :] if visible.shape[-2] > 1 else visible
            visible = visible.expand(*self.observed.batch, *visible.shape[-3:])
            scores.masked_fill_(~visible.reshape(-1, *visible.shape[-3:]), -torch.inf)
        return scores.flatten(0, 1)

    def joined(
        self, rows: slice, largest: Int[Tensor, "H w 1"], of_top: Tensor, mass: Tensor,
        others: Float[Tensor, "H w 1"], changed: Float[Tensor, "H w V"],
    ) -> tuple[Float[Tensor, "H w V"], Float[Tensor, "H w 1"], Float[Tensor, "H w 1"]]:  # fmt: skip
        """Joins a query's key of the largest weight, its other keys and what is beside them.

        `of_top`, `mass`: weights of the first and of the last. `others`, `changed`: the sums of the
        other keys' weights and weighted values. Returns the centred output, the sum of all weights
        (1 where it is 0), and the loss where the key of the largest weight is dropped.
        """
        others = others + mass
        if self.beside is not None:
            changed = changed.addcmul(mass, self.beside[:, rows])
        total, has_others = others + of_top, others > 0
        filled, has_any = total.where(total > 0, 1.0), total > 0
        at = largest.view(len(self.value), -1, 1)
        of_largest = self.value.take_along_dim(at, dim=1).view_as(changed)
        output = ((changed + of_top * of_largest) / filled).where(has_any, -self.centre)
        left = (changed / others.where(has_others, 1.0)).where(has_others, -self.centre)
        gap = left - of_largest
        lost = (of_top / filled).square() * self.squared(gap)
        return output, filled, lost

    def squared(self, x: Float[Tensor, "H n V"]) -> Float[Tensor, "H n 1"]:
        """Computes x metric x of each vector."""
        return (self.turned(x) * x).sum(dim=-1, keepdim=True)

    def add_largest(
        self, losses: Float[Tensor, " N"], largest: Int[Tensor, "H w 1"], lost: Tensor
    ) -> None:
        """Adds what queries lose with their key of the largest weight, in one order of sums."""
        first = torch.arange(len(self.key), device=largest.device) * self.key.shape[1]
        at = largest.view(len(first), -1) + first[:, None]
        losses.index_put_((at.flatten(),), lost.flatten(), accumulate=True)

    def finished(
        self,
        of_heads: Float[Tensor, "H M"],
        of_largest: Float[Tensor, " N"],
        outputs: Float[Tensor, "H W V"],
    ) -> Losses:
        """Adds the losses of a cache's heads; restores the unit, the centre and the dimensions."""
        (caches, groups), batch = self.query.shape[:2], self.observed.batch
        loss = of_heads.clamp_min(0).view(caches, groups, -1).sum(dim=1)
        loss = (of_largest.view_as(loss) + loss).double() * self.unit[..., 0].double().square()
        outputs = (outputs + self.centre).view(caches, groups, *outputs.shape[1:])
        outputs = outputs * self.unit[:, None]
        return loss.view(*batch, -1), outputs.view(*batch, *outputs.shape[1:])


def batched_losses(observed: Observed, *, projected: bool = False) -> Losses:
    """Computes the losses and outputs of `single_losses`, in blocks of queries of all heads."""
    heads = Heads.of(observed, projected)
    (caches, groups, queries, _), (keys, width) = heads.query.shape, heads.value.shape[1:]
    weights = BLOCK.get(heads.value.device.type, ELSEWHERE)
    rows = max(1, weights // max(1, caches * groups * keys))
    sums = heads.value.new_zeros(caches * groups, keys, width + 2)
    of_largest = heads.value.new_zeros(caches * keys)
    outputs = heads.value.new_empty(caches * groups, queries, width)
    for start in range(0, queries, rows):
        block = slice(start, start + rows)
        outputs[:, block] = _add_block(heads, block, sums, of_largest)
    value = heads.value.repeat_interleave(groups, dim=0)
    loss = heads.squared(value)[..., 0] * sums[..., -2] + sums[..., -1]
    loss -= 2 * (value * sums[..., :-2]).sum(dim=-1)
    return heads.finished(loss, of_largest, outputs)


def _add_block(
    heads: Heads, block: slice, sums: Float[Tensor, "H M U"], of_largest: Float[Tensor, " N"]
) -> Float[Tensor, "H w V"]:
    """Adds a block of queries to the sums over u; returns their centred outputs."""
    log_mass, scores = heads.log_mass[:, block], heads.scores(block)
    top, largest = scores.max(dim=-1, keepdim=True)
    scale = finite(torch.maximum(top, log_mass))
    weights = scores.sub_(scale).exp_().scatter_(-1, largest, 0.0)
    changed = weights.view(len(heads.value), -1, weights.shape[-1]) @ heads.value
    output, total, lost = heads.joined(
        block, largest, (top - scale).exp(), (log_mass - scale).exp(),
        weights.sum(dim=-1, keepdim=True), changed.view(*weights.shape[:-1], -1),
    )  # fmt: skip
    heads.add_largest(of_largest, largest, lost)
    weights.div_(total - weights).square_()
    turned = heads.turned(output)
    length = (turned * output).sum(dim=-1, keepdim=True)
    sums.baddbmm_(weights.mT, torch.cat([turned, torch.ones_like(length), length], dim=-1))
    return output


def _centred(
    observed: Observed, value: Float[Tensor, "C M V"]
) -> tuple[Float[Tensor, "C M V"], Float[Tensor, "C 1 V"], Float[Tensor, "C 1 1"]]:
    """Returns the centred values of each cache, their mean, both in a unit, and the unit."""
    if observed.available is None:
        centre = value.mean(dim=-2, keepdim=True)
        value = value - centre
    else:
        allowed = available(observed).reshape(*value.shape[:2], 1)
        count = allowed.sum(dim=1, keepdim=True).clamp_min(1)
        centre = value.where(allowed, 0.0).sum(dim=1, keepdim=True) / count
        value = (value - centre).where(allowed, 0.0)
    unit = typical_unit(value)  # squares of values may leave the range of fp32
    return value / unit, centre / unit, unit
