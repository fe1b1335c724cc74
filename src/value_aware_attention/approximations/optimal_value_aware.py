"""Finds optimal-v-aware-r, the convex combination of at most r values closest to the output."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.approximations import closest_combination
from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.approximations.closest_combination import ENGINES, SEARCHES, pairs
from value_aware_attention.approximations.sparse_weights import (
    RowsInFp64,
    SparseWeights,
    rows_in_fp64,
)
from value_aware_attention.arguments import check_choice, check_flag
from value_aware_attention.call import Call
from value_aware_attention.error import squared_output_error
from value_aware_attention.kernels import Exponential, Kernel
from value_aware_attention.weights import or_overflow

NEGLIGIBLE = {torch.float32: 3.5e-6, torch.float64: 1e-9}
"""Largest ||o - o~|| that counts as zero, relative to sum_i alpha_i ||v_i - o||"""
ROUNDED = 8
"""Largest ||o - o~|| that counts as rounding of o, relative to ||o||, in epsilons of the inputs"""
SLACK = 32 * torch.finfo(torch.float64).eps
"""Rounding of squared distances in fp64, relative to the squares they are differences of"""
TIE = 1e-5
"""Largest relative difference of squared distances at which two values count as equally near"""


class OptimalValueAware(SparseApproximation):
    """Minimises ||o - o~||^2 over C_r (section 3), for every r.

    r = 1 tries every value (Eq. 3); r >= value_dim + 1 reaches the exact output with at most
    value_dim + 1 keys (Carathéodory). For other r it is the best combination found, an upper bound
    on the optimal error, so "value-aware beats oblivious by x" is conservative. It is never worse
    than the best weights on the r keys with the largest attention weights.

    `.optimal` of a selection marks rows whose keys and weights are proved optimal in fp64. Either
    ||o - o~|| <= 3.5e-6 (fp64 inputs: 1e-9) sum_i alpha_i ||v_i - o|| + 8 epsilon ||o||; or r is 1
    and no value is closer to o by 1e-5 of the squared distance; or all pairs are tried and no pair
    is that much closer.

    `mean` makes the mean of the visible values one more candidate, counted in r (not in the paper,
    whose set C_r has values alone). Every search then runs twice, without and with it, and the
    better result is kept, so the error is never above the error without the mean.

    `search` is the effort. "fast" adds the key of steepest descent and solves for all weights
    again. "default" evaluates several steep keys and removes keys that no longer help. "best" also
    extends the 32 best sets of every size; at r = 2 and up to 512 keys it tries all pairs, which is
    optimal. `engine` is "compiled" (CPU; the default there, built by the C++ compiler on first
    use), "torch" (any device), or None to choose.
    """

    solves_for_weights = True
    differentiable_weights = False

    def __init__(
        self, r: int, search: str = "default", engine: str | None = None, *, mean: bool = False
    ) -> None:
        super().__init__(r)
        self.search = check_choice(SEARCHES, search=search)
        self.mean = check_flag(mean=mean)
        self.engine = check_choice((None, *ENGINES), engine=engine)

    @torch.no_grad()
    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N W"]]:
        shape = (*call.batch, call.query.shape[-2], min(self.r, call.keys))
        problem = closest_combination.flatten(call, self.mean)
        indices, weights = closest_combination.solve(problem, self.r, self.search, self.engine)
        if self.mean:
            indices, weights = closest_combination.mean_apart(problem, indices, weights)
        weights = weights.reshape(*shape[:-1], -1)
        return indices.reshape(shape), or_overflow(weights, call.weights)

    @torch.no_grad()
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
        """Returns ||o - o~||^2 of all sizes 1 to r from one solve, non-increasing.

        For sizes below r the error may be lower than that of `select` with that size, because the
        search continues and removes keys again.
        """
        call = self.check(
            Call.of(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
        )
        shape = (*call.batch, call.query.shape[-2], self.r)
        if 0 in (*shape, call.keys):
            return value.new_zeros(shape)
        with torch.autocast(value.device.type, enabled=False):
            errors = [
                closest_combination.solve_path(
                    closest_combination.flatten(block, self.mean), self.r, self.search, self.engine
                )
                for block in call.blocks(3 * self.r**2)
            ]
        return torch.cat(errors, dim=1).reshape(shape)

    @torch.no_grad()
    def recomputed(
        self, call: Call, chosen: SparseWeights, small: Bool[Tensor, "*batch N"]
    ) -> SparseWeights:
        """Recomputes errors in fp64 and marks proved rows: error 0, nearest value or best pair."""
        dtype = chosen.weights.dtype
        optimal = torch.full_like(small, call.is_empty)  # no keys: zeros are optimal
        all_pairs = self.r == 2 and closest_combination.tries_all_pairs(call.value, self.search)
        small = small | (self.r == 1 or all_pairs)
        for rows in rows_in_fp64(call, small):
            here, error = small[..., rows.place], rows.error(chosen)
            before = chosen.error[..., rows.place]
            chosen.error[..., rows.place] = error.to(before).where(here, before)
            proved = torch.zeros_like(here)
            if self.r == 1:
                proved = error * (1 - TIE) <= _nearest_other(rows, chosen)
            elif all_pairs:
                proved = error * (1 - TIE) <= _nearest_pair(rows, self.mean)
            if not proved.all():
                distance = _squared_distances(rows).clamp_min(0).sqrt()
                spread = NEGLIGIBLE[dtype] * (rows.weights * distance).sum(dim=-1)
                norm = (rows.output + rows.centre).norm(dim=-1)
                proved |= error <= (spread + ROUNDED * torch.finfo(dtype).eps * norm).square()
            optimal[..., rows.place] = proved & here
        return replace(chosen, optimal=optimal)


def _nearest_other(rows: RowsInFp64, chosen: SparseWeights) -> Float[Tensor, "*batch K"]:
    """Computes the smallest ||v - o||^2 of all candidates but the chosen one, rounded down."""
    distance = _squared_distances(rows, SLACK)
    if rows.visible is not None:
        distance = distance.masked_fill(~rows.visible, torch.inf)
    key = chosen.indices[..., rows.place, :]
    if chosen.mean_weight is not None:
        of_mean = squared_output_error(rows.mean(), rows.output)[..., None] * (1 - SLACK)
        distance = torch.cat([distance, of_mean], dim=-1)
        key = key.masked_fill(chosen.mean_weight[..., rows.place, None] > 0, distance.shape[-1] - 1)
    return distance.scatter(-1, key, torch.inf).amin(dim=-1)


def _nearest_pair(rows: RowsInFp64, mean: bool) -> Float[Tensor, "*batch K"]:
    """Computes the smallest ||o - o~||^2 of any two candidates, rounded down to a lower bound."""
    near = _squared_distances(rows, SLACK)
    if rows.visible is not None:
        near = near.masked_fill(~rows.visible, pairs.HIDDEN)
    shape = near.shape[:-1]
    value = rows.value.expand(*near.shape[:-2], -1, -1).reshape(-1, *rows.value.shape[-2:])
    between = pairs.squared_distances_between(value)
    near = near.reshape(-1, *near.shape[-2:])
    errors = torch.stack([pairs.closest(*head)[0] for head in zip(near, between, strict=True)])
    if mean:
        of_mean = rows.mean().expand(*shape, -1).reshape(*near.shape[:2], -1)
        output = rows.output.expand(*shape, -1).reshape(of_mean.shape)
        heads = zip(near, output, value, of_mean, strict=True)
        with_mean = torch.stack([pairs.closest_to_mean(*head)[0] for head in heads])
        errors = torch.minimum(errors, with_mean * (1 - SLACK))
    return errors.reshape(shape)


def _squared_distances(rows: RowsInFp64, slack: float = 0.0) -> Float[Tensor, "*batch K M"]:
    """Computes ||v - o||^2 - slack (||v||^2 + ||o||^2), a lower bound with a few epsilons."""
    value, output = (x.square().sum(dim=-1) for x in (rows.value, rows.output))
    sizes = (1 - slack) * (value[..., None, :] + output[..., None])
    return sizes.sub_(rows.output @ rows.value.mT, alpha=2)
