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
from value_aware_attention.caches.compiled_losses import centred
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.ways import ELSEWHERE
from value_aware_attention.kernels import Exponential

WEIGHTS = {"cpu": 2**19}
"""Weights computed at once, so that they fit a CPU's cache"""
Losses = tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch G W V"]]


@dataclass(frozen=True)
class Heads:
    """Holds C caches with G query heads each, H = C G; values are centred and in a unit."""

    observed: Observed
    query: Float[Tensor, "C G W D"]
    key: Float[Tensor, "C M D"]
    value: Float[Tensor, "C M V"]
    cache: Int[Tensor, " H"]
    """The cache of each head"""
    unit: Float[Tensor, "C 1 1"]
    origin: Float[Tensor, "H 1 V"]
    """An output of zeros, centred and in the unit"""
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
        query, key = (
            working_precision(x).reshape(caches, *x.shape[-own:])
            for x, own in ((observed.query, 3), (observed.key, 2))
        )
        value, centre, unit = centred(observed)
        cache = torch.arange(caches * groups, device=value.device) // groups
        origin, beside = centre.neg().index_select(0, cache), None
        if (state := observed.beside) is not None:
            total = state.total.clamp_min(torch.finfo(value.dtype).tiny)
            output = (state.values / total).reshape(len(cache), -1, value.shape[-1])
            beside = torch.addcdiv(origin, output, unit.index_select(0, cache))
        log_mass = observed.log_mass_beside.reshape(len(cache), -1, 1)
        metric = _metric(observed) if projected else None
        return cls(observed, query, key, value, cache, unit, origin, metric, log_mass, beside)

    def turned(self, x: Float[Tensor, "H n V"]) -> Float[Tensor, "H n V"]:
        """Multiplies vectors by the metric of their head."""
        return x if self.metric is None else torch.bmm(x, self.metric)

    def squared(self, x: Float[Tensor, "H n V"]) -> Float[Tensor, "H n 1"]:
        """Computes x metric x of each vector."""
        return (self.turned(x) * x).sum(dim=-1, keepdim=True)

    def scores(self, rows: slice) -> Float[Tensor, "H w M"]:
        """Computes log kappa of a block of queries; -inf for hidden pairs."""
        query, visible, kernel = self.query[:, :, rows], self.observed.visible, self.observed.kernel
        if type(kernel) is Exponential:  # a single product in place of a broadcast one
            scaled = query.flatten(1, 2) * kernel.scale_for(query.shape[-1])
            scores = torch.bmm(scaled, self.key.mT)
        else:
            scores = kernel.log_similarity(query.flatten(1, 2), self.key)
        if visible is not None:
            visible = visible[..., rows, :] if visible.shape[-2] > 1 else visible
            visible = visible.expand(*self.observed.batch, *visible.shape[-3:])
            visible = visible.reshape(-1, *visible.shape[-3:])
            scores.view(*query.shape[:-1], -1).masked_fill_(~visible, -torch.inf)
        return scores.view(len(self.cache), query.shape[2], -1)

    def joined(
        self, rows: slice, at: Int[Tensor, " N"], of_top: Tensor, mass: Tensor,
        others: Float[Tensor, "H w 1"], changed: Float[Tensor, "H w V"],
    ) -> tuple[Float[Tensor, "H w V"], Float[Tensor, "H w 1"], Float[Tensor, "H w 1"]]:  # fmt: skip
        """Joins a query's key of the largest weight, its other keys and what is beside them.

        `at`: the first among the keys of all caches. `of_top`, `mass`: weights of the first and of
        the last. `others`, `changed`: the sums of the other keys' weights and weighted values.
        Returns the centred output, the sum of all weights, above 0, and the loss where the key of
        the largest weight is dropped.
        """
        others = others + mass
        if self.beside is not None:
            changed = torch.addcmul(changed, mass, self.beside[:, rows])
        total = others + of_top
        largest = self.value.flatten(0, 1).index_select(0, at).view_as(changed)
        filled = total.clamp_min(torch.finfo(total.dtype).tiny)
        output = torch.addcmul(changed, of_top, largest) / filled
        if self.observed.visible is not None:  # a query may see nothing
            output = output.where(total > 0, self.origin)
        gap = (changed / others).where(others > 0, self.origin) - largest
        return output, filled, (of_top / filled).square() * self.squared(gap)

    def places(self, number: Int[Tensor, "H w 1"]) -> Int[Tensor, " N"]:
        """Returns the places of keys, numbered within their cache, among those of all caches."""
        (caches, keys), device = self.value.shape[:2], number.device
        first = torch.arange(0, caches * keys, keys, device=device)[:, None]
        return (number.view(caches, -1) + first).view(-1)

    def finished(
        self,
        of_heads: Float[Tensor, "H M"],
        of_largest: Float[Tensor, " N"],
        outputs: Float[Tensor, "H W V"],
    ) -> Losses:
        """Adds the losses of a cache's heads; restores the unit, the centre and the dimensions."""
        loss = of_heads.clamp_min(0).view(*self.query.shape[:2], -1).sum(dim=1)
        loss = (loss + of_largest.view_as(loss)).double()
        unit = self.unit[..., 0]
        outputs = (outputs - self.origin).mul_(self.unit.index_select(0, self.cache))
        shape = self.observed.query.shape[:-1]
        return loss.mul_(unit).mul_(unit).view(*self.observed.batch, -1), outputs.view(*shape, -1)


def batched_losses(observed: Observed, *, projected: bool = False) -> Losses:
    """Computes the losses and outputs of `single_losses`, in blocks of queries of all heads."""
    heads = Heads.of(observed, projected)
    queries, (caches, keys, width) = heads.query.shape[2], heads.value.shape
    weights = WEIGHTS.get(heads.value.device.type, ELSEWHERE)
    rows = max(1, weights // max(1, len(heads.cache) * keys))
    sums = heads.value.new_zeros(len(heads.cache), keys, width + 2)
    of_largest = heads.value.new_zeros(caches * keys)
    outputs = heads.value.new_empty(len(heads.cache), queries, width)
    for start in range(0, queries, rows):
        block = slice(start, start + rows)
        outputs[:, block] = _add_block(heads, block, sums, of_largest)
    value = heads.value.index_select(0, heads.cache)
    loss = heads.squared(value)[..., 0] * sums[..., -2] + sums[..., -1]
    loss = loss.sub_((value * sums[..., :-2]).sum(dim=-1), alpha=2)
    return heads.finished(loss, of_largest, outputs)


def _add_block(
    heads: Heads, block: slice, sums: Float[Tensor, "H M U"], of_largest: Float[Tensor, " N"]
) -> Float[Tensor, "H w V"]:
    """Adds a block of queries to the sums over u; returns their centred outputs."""
    log_mass, scores = heads.log_mass[:, block], heads.scores(block)
    top, largest = scores.max(dim=-1, keepdim=True)
    scale = torch.maximum(top, log_mass)
    if heads.observed.visible is not None:
        scale = finite(scale)
    weights = scores.sub_(scale).exp_().scatter_(-1, largest, 0.0)
    changed = torch.bmm(weights.view(len(heads.value), -1, weights.shape[-1]), heads.value)
    at = heads.places(largest)
    output, total, lost = heads.joined(
        block, at, (top - scale).exp_(), (log_mass - scale).exp_(),
        weights.sum(dim=-1, keepdim=True), changed.view(*weights.shape[:-1], -1),
    )  # fmt: skip
    of_largest.index_put_((at,), lost.flatten(), accumulate=True)  # in one order, on a GPU too
    weights.div_(total - weights).square_()
    turned = heads.turned(output)
    length = (turned * output).sum(dim=-1, keepdim=True)
    sums.baddbmm_(weights.mT, torch.cat([turned, torch.ones_like(length), length], dim=-1))
    return output


def _metric(observed: Observed) -> Float[Tensor, "H V V"] | None:
    """Computes W_o W_o^T of each head; None where W_o is unknown."""
    if observed.projection is None:
        return None
    projection = working_precision(observed.projection)
    flat = projection.flatten(0, -3)
    metric = torch.bmm(flat, flat.mT).view(*projection.shape[:-1], -1)
    return metric.expand(*observed.query.shape[:-2], -1, -1).reshape(-1, *metric.shape[-2:])
