"""optimal-v-aware-r: the closest convex combination of at most r values to the exact output."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.approximations import closest_combination
from value_aware_attention.approximations.approximation import Inputs, SparseApproximation
from value_aware_attention.approximations.closest_combination import ENGINES, SEARCHES
from value_aware_attention.kernels import Exponential, Kernel

__all__ = ["OptimalValueAware"]


class OptimalValueAware(SparseApproximation):
    """argmin over C_r of ||o - o~||^2 (section 3), for every r.

    r = 1 tries every value, Eq. 3; r >= value_dim + 1 reaches the exact output with at most
    value_dim + 1 keys (Carathéodory). Both are proved optimal, as is every row whose error is zero.
    The rest is the best found: an upper bound on the optimal error, so that "value-aware beats
    oblivious by x" is conservative. It is never worse than the r largest attention weights, even
    with the best weights on them.

    `search` is the effort: "fast" adds the key of steepest descent and solves for all weights
    again; "default" looks closer at the steepest keys and takes back keys that no longer pay;
    "best" also follows the 32 best sets of every size. `engine` is "compiled" (CPU; the default
    there, built by the C++ compiler on first use), "torch" (any device), or None to choose.
    """

    solves_for_weights = True
    differentiable_weights = False

    def __init__(self, r: int, search: str = "default", engine: str | None = None) -> None:
        super().__init__(r)
        if search not in SEARCHES:
            raise ValueError(f"search is {search!r}; it must be one of {', '.join(SEARCHES)}")
        if engine is not None and engine not in ENGINES:
            raise ValueError(
                f"engine is {engine!r}; it must be None or one of {', '.join(ENGINES)}"
            )
        self.search = search
        self.engine = engine

    @torch.no_grad()
    def choose(
        self, inputs: Inputs
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        shape = (*inputs.batch, inputs.query.shape[-2], min(self.r, inputs.keys))
        if 0 in shape:
            empty = inputs.value.new_zeros(shape)
            return empty.long(), empty
        problem = closest_combination.flatten(inputs)
        found = closest_combination.solve(problem, self.r, self.search, self.engine)
        indices, weights = (x.reshape(shape) for x in found)
        return indices, weights

    @torch.no_grad()
    def path(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),  # noqa: B008
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch N {self.r}"]:
        """||o - o~||^2 of every size 1 to r from one solve, non-increasing.

        At a size below r it may be smaller than what `select` of that size finds: the search has
        gone on and come back.
        """
        inputs = self.inputs(query, key, value, kernel, attn_mask, is_causal)
        shape = (*inputs.batch, inputs.query.shape[-2], self.r)
        if 0 in (*shape, inputs.keys):
            return value.new_zeros(shape)
        with torch.autocast(value.device.type, enabled=False):
            problems = map(closest_combination.flatten, inputs.blocks(3 * self.r**2))
            errors = [
                closest_combination.solve_path(problem, self.r, self.search, self.engine)
                for problem in problems
            ]
        return torch.cat(errors, dim=1).reshape(shape)

    def proved_optimal(
        self, inputs: Inputs, error: Float[Tensor, "*batch N"]
    ) -> Bool[Tensor, "*batch N"]:
        if self.r == 1 or self.r > inputs.value.shape[-1] or self.r >= inputs.keys:
            return torch.ones_like(error, dtype=torch.bool)
        value = inputs.centred().value
        none_left = error <= closest_combination.negligible(value, inputs.visible)
        if inputs.visible is None:
            return none_left
        seen = inputs.visible.expand(*inputs.visible.shape[:-1], inputs.keys).sum(dim=-1)
        return none_left | (seen <= self.r)

    def extra_repr(self) -> str:
        engine = "" if self.engine is None else f", engine={self.engine!r}"
        return f"r={self.r}, search={self.search!r}{engine}"
