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
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.attention import finite, working_precision
from value_aware_attention.caches.compiled_losses import centred
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.ways import ELSEWHERE

WEIGHTS = {"cpu": 2**19}
"""Weights computed at once, so that they fit a CPU's cache"""
Losses = tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch G W V"]]


@dataclass(frozen=True)
class Heads:
    """Holds C caches with G query heads each, H = C G; values are centred and in a unit.

    The rows R = G W of a cache are the W queries of its first head, then those of the next.

    Attributes:
        origin: An output of zeros, centred and in the unit.
        metric: W_o W_o^T, so that ||x W_o||^2 = x metric x; None = the identity.
        log_mass: Log of the mass beside the keys; -inf = none.
        beside: Output over what is beside the keys, centred and in the unit.
    """

    observed: Observed
    groups: int
    query: Float[Tensor, "C R D"]
    key: Float[Tensor, "C M D"]
    value: Float[Tensor, "C M V"]
    unit: Float[Tensor, "C 1 1"]
    origin: Float[Tensor, "C 1 V"]
    metric: Float[Tensor, "H V V"] | None
    log_mass: Float[Tensor, "C R 1"]
    beside: Float[Tensor, "C R V"] | None

    @classmethod
    def of(cls, observed: Observed, projected: bool) -> "Heads":
        """Prepares the losses after W_o, if it is known, or those of the outputs themselves."""
        query, key = (
            working_precision(x).reshape(observed.batch.numel(), -1, x.shape[-1])
            for x in (observed.query, observed.key)
        )
        value, centre, unit = centred(observed)
        origin, beside = centre.neg(), None
        if (state := observed.beside) is not None:
            total = state.total.clamp_min(torch.finfo(value.dtype).tiny)
            output = (state.values / total).reshape(len(value), -1, value.shape[-1])
            beside = torch.addcdiv(origin, output, unit)
        return cls(
            observed, observed.query.shape[-3], query, key, value, unit, origin,
            _metric(observed) if projected else None,
            observed.log_mass_beside.reshape(len(value), -1, 1), beside,
        )  # fmt: skip

    def by_head(self, x: Float[Tensor, "C r n"]) -> Float[Tensor, "H w n"]:
        """Splits the rows of each cache by head."""
        return x.view(len(x) * self.groups, -1, x.shape[-1])

    def taken(self, x: Float[Tensor, "C R n"], block: slice | None) -> Float[Tensor, "C r n"]:
        """Takes a block of each head's rows; None = all."""
        return x if block is None else x.unflatten(1, (self.groups, -1))[:, :, block].flatten(1, 2)

    def turned(self, x: Float[Tensor, "H n V"]) -> Float[Tensor, "H n V"]:
        """Multiplies vectors by the metric of their head."""
        return x if self.metric is None else torch.bmm(x, self.metric)

    def squared(self, x: Float[Tensor, "H n V"]) -> Float[Tensor, "H n 1"]:
        """Computes x metric x of each vector."""
        return (self.turned(x) * x).sum(dim=-1, keepdim=True)

    def scores(self, block: slice | None) -> Float[Tensor, "C r M"]:
        """Computes log kappa of a block of queries; -inf for hidden pairs."""
        query, visible = self.taken(self.query, block), self.observed.visible
        scores = self.observed.kernel.log_similarity(query, self.key)
        if visible is not None:
            is_cut = block is not None and visible.shape[-2] > 1
            visible = visible[..., block, :] if is_cut else visible
            visible = visible.expand(*self.observed.batch, *visible.shape[-3:])
            by_head = scores.view(len(scores), self.groups, -1, scores.shape[-1])
            by_head.masked_fill_(~visible.reshape(-1, *visible.shape[-3:]), -torch.inf)
        return scores

    def joined(
        self, block: slice | None, number: Int[Tensor, "C r 1"], of_top: Tensor, mass: Tensor,
        others: Float[Tensor, "C r 1"], changed: Float[Tensor, "C r V"],
    ) -> tuple[Float[Tensor, "C r V"], Float[Tensor, "C r 1"], Float[Tensor, "C M 1"]]:  # fmt: skip
        """Joins a query's key of the largest weight, its other keys and what is beside them.

        `number`: the index of the first in its cache. `of_top`: its weight. `mass`: the weight of
        what is beside the keys. `others`, `changed`: the sums of the other keys' weights and
        weighted values.
        Returns the centred output, the sum of all weights, above 0, and the sum over queries of the
        losses from dropping the key of the largest weight.
        """
        others = others + mass
        if self.beside is not None:
            changed = torch.addcmul(changed, mass, self.taken(self.beside, block))
        total = others + of_top
        largest = self.value.gather(1, number.expand_as(changed))
        sums, is_masked = torch.addcmul(changed, of_top, largest), self.observed.visible is not None
        filled = total.clamp_min(torch.finfo(total.dtype).tiny) if is_masked else total
        output = sums / filled
        if is_masked:  # a query may see nothing
            output = output.where(total > 0, self.origin)
        gap = (changed / others).where(others > 0, self.origin) - largest
        lost = self.squared(self.by_head(gap * (of_top / filled)))
        keys = self.value.shape[1]
        first = torch.arange(0, self.value[..., 0].numel(), keys, device=number.device)
        of_largest = lost.new_zeros(len(first) * keys)  # summed in one order, on a GPU too
        of_largest.index_put_(((number + first.view(-1, 1, 1)).view(-1),), lost.view(-1), True)
        return output, filled, of_largest.view(-1, keys, 1)

    def finished(
        self,
        of_heads: Float[Tensor, "H M 1"],
        of_largest: Float[Tensor, "C M 1"],
        outputs: Float[Tensor, "C R V"],
    ) -> Losses:
        """Adds the losses of a cache's heads; restores the unit, the centre and the dimensions."""
        of_heads = of_heads.clamp_min(0).view(len(self.value), self.groups, -1, 1)
        loss = of_heads.sum(dim=1, dtype=torch.float64).add_(of_largest)
        outputs = (outputs - self.origin).mul_(self.unit)
        return (
            loss.mul_(self.unit).mul_(self.unit).view(*self.observed.batch, -1),
            outputs.view(*self.observed.query.shape[:-1], -1),
        )


def batched_losses(observed: Observed, *, projected: bool = False) -> Losses:
    """Computes the losses and outputs of `single_losses`, in blocks of queries of all heads."""
    heads = Heads.of(observed, projected)
    queries, (caches, keys, width) = observed.query.shape[-2], heads.value.shape
    rows = max(
        1, WEIGHTS.get(heads.value.device.type, ELSEWHERE) // max(1, caches * heads.groups * keys)
    )
    sums = heads.value.new_zeros(caches * heads.groups, keys, width + 2)
    starts = range(0, max(1, queries), rows)
    blocks = [slice(start, start + rows) for start in starts] if len(starts) > 1 else [None]
    outputs, lost = zip(*(_add_block(heads, block, sums) for block in blocks), strict=True)
    output, of_largest = outputs[0], reduce(Tensor.add_, lost)
    if len(blocks) > 1:
        output = torch.cat([heads.by_head(x) for x in outputs], dim=1).view(caches, -1, width)
    along, mass, length = sums.split([width, 1, 1], dim=-1)
    values = heads.value.repeat_interleave(heads.groups, dim=0)
    change = heads.turned(values).mul(mass).sub_(along, alpha=2).mul_(values)
    return heads.finished(change.sum(dim=-1, keepdim=True) + length, of_largest, output)


def _add_block(
    heads: Heads, block: slice | None, sums: Float[Tensor, "H M U"]
) -> tuple[Float[Tensor, "C r V"], Float[Tensor, "C M 1"]]:
    """Adds a block of queries to the sums over u.

    Returns their centred outputs, and the losses of the keys of their largest weights.
    """
    log_mass, scores = heads.taken(heads.log_mass, block), heads.scores(block)
    top, number = scores.max(dim=-1, keepdim=True)
    scale = torch.maximum(top, log_mass)
    if heads.observed.visible is not None:
        scale = finite(scale)
    weights = scores.sub_(scale).exp_().scatter_(-1, number, 0.0)
    output, total, lost = heads.joined(
        block, number, (top - scale).exp_(), (log_mass - scale).exp_(),
        weights.sum(dim=-1, keepdim=True), torch.bmm(weights, heads.value),
    )  # fmt: skip
    weights.div_(total - weights).square_()
    by_head = heads.by_head(output)
    turned = heads.turned(by_head)
    length = (turned * by_head).sum(dim=-1, keepdim=True)
    sums.baddbmm_(
        heads.by_head(weights).mT, torch.cat([turned, torch.ones_like(length), length], dim=-1)
    )
    return output, lost


def _metric(observed: Observed) -> Float[Tensor, "H V V"] | None:
    """Computes W_o W_o^T of each head; None where W_o is unknown."""
    if observed.projection is None:
        return None
    projection = working_precision(observed.projection)
    flat, heads = projection.flatten(0, -3), observed.query.shape[:-2]
    metric = torch.bmm(flat, flat.mT)
    if len(metric) == heads.numel():
        return metric
    metric = metric.view(*projection.shape[:-1], -1).expand(*heads, -1, -1)
    return metric.reshape(-1, *metric.shape[-2:])
