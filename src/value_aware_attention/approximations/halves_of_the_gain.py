"""Splits the gain of value-aware attention into two parts: better weights and better keys."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention.approximations import closest_combination
from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.arguments import check_flag
from value_aware_attention.call import Call
from value_aware_attention.error import typical_unit
from value_aware_attention.kernels import Exponential, Kernel
from value_aware_attention.weights import or_overflow, renormalised, top_keys, usable

SOLVED_AT_ONCE = 128


class ObliviousKeysOptimalWeights(SparseApproximation):
    """Keeps the top r keys by alpha, with the weights closest to the exact output.

    argmin ||o - sum_i w_i v_i||^2 over w >= 0 summing to 1 on those keys. It is never worse than
    optimal-v-oblivious-r, because those weights are candidates. The remaining distance to
    optimal-v-aware-r is due to the choice of keys. `mean` keeps one key less and the mean of the
    visible values in its place.
    """

    solves_for_weights = True
    differentiable_weights = False

    def __init__(self, r: int, *, mean: bool = False) -> None:
        super().__init__(r)
        self.mean = check_flag(mean=mean)

    def elements_per_query(self, call: Call) -> int:
        """Counts the elements of the kept values, which are gathered."""
        return min(self.r, call.keys + self.mean) * call.value.shape[-1]

    @torch.no_grad()
    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N W"]]:
        problem = closest_combination.flatten(call, self.mean)
        indices = top_keys(problem.weights, problem.visible, self.r - self.mean)
        if self.mean:
            indices = pad(indices, (0, 1), value=problem.mean_key)
        weights = closest_combination.optimal_weights(problem, indices)
        if self.mean:  # the last column of the weights; a query that sees nothing has no mean
            indices = indices[..., :-1]
            weights = weights.where(problem.weights.sum(dim=-1, keepdim=True) > 0, 0.0)
        indices, weights = (x.reshape(*call.batch, *x.shape[-2:]) for x in (indices, weights))
        return indices, or_overflow(weights, call.weights)


class ValueAwareKeysAttentionWeights(SparseApproximation):
    """Chooses at most r keys on which Eq. 2's weights come close to the exact output.

    argmin over sets S of at most r keys of ||o - sum_S alpha_i v_i / sum_S alpha_i||^2, searched
    greedily: each step adds the key that leaves the smallest error. The result is optimal at r = 1;
    otherwise it is only the best found. More keys can be worse here, so the best size up to r is
    kept. Keys with weight 0 cannot be used.
    """

    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        weights = call.weights.expand(*call.batch, -1, -1)
        indices, errors, _ = self._search(call, weights)
        slots = torch.arange(indices.shape[-1], device=indices.device)
        within = slots <= errors.argmin(dim=-1, keepdim=True)
        return indices, or_overflow(renormalised(weights.gather(-1, indices) * within), weights)

    def path(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch N R"]:
        """Returns ||o - o~||^2 of `select` for sizes 1 to min(r, M), from one search."""
        call = self.check(
            Call.of(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
        )
        if call.is_empty:
            return call.value.new_zeros(*call.batch, query.shape[-2], min(self.r, call.keys))
        weights = call.weights.expand(*call.batch, -1, -1)
        _, errors, unit = self._search(call, weights)
        total = weights.sum(dim=-1, keepdim=True)  # 0: no visible key; NaN: scores overflow
        return errors.cummin(dim=-1).values.where(total > 0, total) * unit * unit

    @torch.no_grad()
    def _search(
        self, call: Call, weights: Float[Tensor, "*batch N M"]
    ) -> tuple[
        Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"], Float[Tensor, "*#batch 1 1"]
    ]:
        """Returns the keys in the order of addition, and the error after each in units squared."""
        value, r = call.centred.value, min(self.r, call.keys)  # keeps digits far from 0
        unit = typical_unit(value)
        value = value / unit
        blocks = []
        for block in weights.split(SOLVED_AT_ONCE, dim=-2):
            *greedy, undone = _greedy(block, value, r)
            if undone.any():
                exact = replace(call, value=call.value.double()).centred.value / unit
                again = _greedy(renormalised(block.double()), exact, r)
                greedy = [
                    new.to(old).where(undone[..., None], old)
                    for new, old in zip(again[:2], greedy, strict=True)
                ]
            blocks.append(greedy)
        indices, errors = zip(*blocks, strict=True)
        return torch.cat(indices, dim=-2), torch.cat(errors, dim=-2), unit


def _greedy(
    weights: Float[Tensor, "*batch N M"], value: Float[Tensor, "*#batch M V"], r: int
) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"], Bool[Tensor, "*batch N"]]:
    """Adds keys greedily; returns their order, the error after each (inf if no key was left), and a
    mask of the rows that need fp64.

    With x the combination so far and A its attention mass, adding key i moves x to x + t (v_i - x),
    t = alpha_i / (A + alpha_i).
    """
    output = weights @ value
    distance = torch.cdist(output, value).square()
    residual, mass = torch.zeros_like(output), torch.zeros_like(weights[..., :1])
    taken = ~usable(weights)
    undone = closest_combination.unresolved(
        distance.masked_fill(taken, torch.inf),
        distance.masked_fill(taken, 0.0).amax(dim=-1),
        output,
    )
    order, errors = [], []
    for _ in range(r):
        share = weights / (mass + weights).clamp_min_(torch.finfo(weights.dtype).tiny)
        after = _errors_on_segments(residual, output, value, distance, share)
        smallest, key = after.masked_fill_(taken, torch.inf).min(dim=-1, keepdim=True)
        added = value.expand(*output.shape[:-2], -1, -1).take_along_dim(key, dim=-2) - output
        residual = torch.lerp(residual, added, share.gather(-1, key))
        mass = mass + weights.gather(-1, key)
        taken.scatter_(-1, key, True)
        errors.append(
            residual.square().sum(dim=-1, keepdim=True).where(smallest.isfinite(), torch.inf)
        )
        order.append(key)
    return torch.cat(order, dim=-1), torch.cat(errors, dim=-1), undone


def _errors_on_segments(
    residual: Float[Tensor, "*batch N V"],
    output: Float[Tensor, "*batch N V"],
    value: Float[Tensor, "*#batch M V"],
    distance: Float[Tensor, "*batch N M"],
    share: Float[Tensor, "*batch N M"],
) -> Float[Tensor, "*batch N M"]:
    """Computes ||(1 - t)(x - o) + t (v_i - o)||^2 for every key with one matrix product.

    This is a quadratic in t with the Bezier coefficients ||x - o||^2, <x - o, v_i - o> and
    ||v_i - o||^2. De Casteljau's rule evaluates it without overflow or division.
    """
    start = residual.square().sum(dim=-1, keepdim=True)
    along = residual @ value.transpose(-2, -1)
    along -= (residual * output).sum(dim=-1, keepdim=True)
    return torch.lerp(start, along, share).lerp_(along.lerp_(distance, share), share)
