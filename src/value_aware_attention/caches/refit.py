"""Fits log-biases and values so that kept keys replace dropped ones.

This is the closed form of Attention Matching (arXiv 2602.16284). Biases are fitted to the total
mass, then values to the exact outputs, both by ridge regression.
"""

from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.caches.budgets import Ranking
from value_aware_attention.caches.joint_set import Rows
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.caches.method import CacheMethod, Refinement
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import ObservedAttention

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Ridges that pull values towards the originals, relative to the mean squared weight."""
CHOICES = tuple(product((False, True), (torch.inf, *RIDGES)))
"""Pairs (fit biases, ridge of the values); infinity keeps the original values"""
BIAS_RIDGE = 0.1
"""Ridge that pulls the factors of weights towards 1"""
FACTOR_RANGE = (0.05, 50.0)
"""Smallest and largest factor; a bias is the log of a factor."""
HELD_OUT = 4
"""One in `HELD_OUT` rows is held out."""


class AttentionMatching(Refinement):
    """Refits log-biases and values of r keys, chosen by `method` or by the largest attention.

    This is Attention Matching (arXiv 2602.16284) without a search. By default keys are chosen by
    the root mean square of their weights. Biases and values are fitted by ridge regression
    (`refit`); the paper uses non-negative and plain least squares. docs/cache-methods.md lists the
    differences.
    """

    refits = True

    def __init__(self, r: int, method: CacheMethod | None = None) -> None:
        super().__init__(ObservedAttention(r, aggregate="rms") if method is None else method)
        method = self.method
        if method.r != r:
            raise ValueError(f"r is {r}; the method given keeps {method.r}")
        if method.refits:
            raise ValueError(f"method is a {type(method).__name__} that refits; one refit is made")

    @torch.no_grad()
    def keep(self, observed: Observed) -> KeptKeys:
        self.check(observed)
        return refitted(observed, self.method.keep(observed))

    @torch.no_grad()
    def cut(self, observed: Observed, ranking: Ranking, counts: Int[Tensor, " *batch"]) -> KeptKeys:
        return refitted(observed, self.method.cut(observed, ranking, counts))

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Counts one solution of both least squares problems; the refit compares thirteen."""
        solution = 2 * (rows * self.r**2 + self.r**3 / 3)
        return self.method.multiply_adds(rows, keys, head_dim, value_dim) + solution


def refitted(observed: Observed, choice: KeptKeys) -> KeptKeys:
    """Refits the biases and values of chosen keys to the observed rows.

    Every fourth row is held out. Each of `CHOICES` is fitted to the other rows; the one with the
    least error on held-out rows is fitted again to all rows. With fewer than eight rows nothing is
    refitted.
    """
    rows, slots = Rows.of(observed), choice.indices.shape[-1]
    fit = _Fit.of(
        rows, KeptKeys(choice.indices.reshape(-1, slots), choice.log_weight.reshape(-1, slots))
    )
    count = fit.weights.shape[1]
    dtype = choice.log_weight.dtype
    if count < 2 * HELD_OUT:  # values are returned, because texts with more rows have them
        value = observed.value.take_along_dim(choice.indices[..., None], dim=-2)
        return KeptKeys(choice.indices, choice.log_weight, value.to(dtype))
    held_out = torch.arange(count, device=rows.value.device) % HELD_OUT == 0
    fitted, checked = fit.of_rows(~held_out), fit.of_rows(held_out)
    best = torch.stack([checked.error(*fitted.solve(*how)) for how in CHOICES]).argmin(dim=0)
    factors, change = torch.ones_like(fit.weights[:, 0]), torch.zeros_like(fit.value)
    for number, how in enumerate(CHOICES):
        chosen = best == number
        if chosen.any():
            of_choice, moved = fit.solve(*how)
            factors = of_choice.where(chosen[:, None], factors)
            change = moved.where(chosen[:, None, None], change)
    value = (fit.value + change - rows.nothing).view(*choice.indices.shape, -1)
    return KeptKeys(
        choice.indices,
        choice.log_weight + factors.log().view(choice.indices.shape).to(dtype),
        value.to(dtype),
    )


@dataclass(frozen=True)
class _Fit:
    """Holds the least squares problem of the observed rows, in fp64.

    Attributes:
        weights: alpha of the kept keys.
        beside: Attention weight on `beside`.
    """

    weights: Float[Tensor, "B n r"]
    beside: Float[Tensor, "B n 1"]
    output_beside: Float[Tensor, "B n V"]
    output: Float[Tensor, "B n V"]
    value: Float[Tensor, "B r V"]
    sees: Bool[Tensor, "B n 1"]

    @classmethod
    def of(cls, rows: Rows, choice: KeptKeys) -> "_Fit":
        log_weights = (
            rows.log_weights.take_along_dim(choice.indices[:, None], dim=-1)
            + choice.log_weight[:, None]
        )
        return cls(
            log_weights.double().exp(),
            rows.log_beside.exp(),
            rows.beside,
            rows.output,
            rows.value.take_along_dim(choice.indices[..., None], dim=-2),
            (rows.log_weights > -torch.inf).any(-1, keepdim=True) | (rows.log_beside > -torch.inf),
        )

    def of_rows(self, which: Bool[Tensor, " n"]) -> "_Fit":
        """Returns the problem of some of the rows."""
        return _Fit(
            **{name: x if name == "value" else x[:, which] for name, x in vars(self).items()}
        )

    def solve(
        self, bias: bool, ridge: float
    ) -> tuple[Float[Tensor, "B r"], Float[Tensor, "B r V"]]:
        """Fits the factors of the weights and the change of the values."""
        factors = torch.ones_like(self.weights[:, 0])
        if bias:
            lost = self.sees.double() - self.beside - self.weights.sum(dim=-1, keepdim=True)
            factors = factors + _least_squares(self.weights, lost, BIAS_RIDGE)[..., 0]
            factors = factors.clamp(*FACTOR_RANGE)
        if ridge == torch.inf:
            return factors, torch.zeros_like(self.value)
        return factors, _least_squares(*self._reweighted(factors), ridge)

    def error(
        self, factors: Float[Tensor, "B r"], change: Float[Tensor, "B r V"]
    ) -> Float[Tensor, " B"]:
        """Computes sum ||o - o~||^2 over these rows."""
        weights, left = self._reweighted(factors)
        return (left - weights @ change).square().sum(dim=(-2, -1))

    def _reweighted(
        self, factors: Float[Tensor, "B r"]
    ) -> tuple[Float[Tensor, "B n r"], Float[Tensor, "B n V"]]:
        """Computes the kept keys' weights with these factors, and o - o~ with original values."""
        weights = self.weights * factors[:, None]
        total = weights.sum(dim=-1, keepdim=True) + self.beside
        total = total.where(total > 0, 1.0)
        weights, beside = weights / total, self.beside / total
        return weights, self.output - beside * self.output_beside - weights @ self.value


def _least_squares(
    factor: Float[Tensor, "B n r"], target: Float[Tensor, "B n V"], ridge: float
) -> Float[Tensor, "B r V"]:
    """Minimises ||factor x - target||^2 + ridge mean(diag) ||x||^2.

    The mean is over keys with a weight, because the number of unused slots depends on other caches.
    With fewer rows n than keys r, the n x n system is solved, which has the same solution.
    """
    squares = factor.square().sum(dim=-2)
    pull = ridge * squares.sum(dim=-1) / (squares > 0).sum(dim=-1).clamp_min(1)
    pull = pull.where(pull > 0, 1.0)[:, None, None]  # if all weights are 0, so is x
    rows, keys = factor.shape[-2:]
    small = factor if rows < keys else factor.mT
    unit = torch.eye(small.shape[-2], dtype=pull.dtype, device=pull.device)
    gram = small @ small.mT + pull * unit
    if rows < keys:
        return factor.mT @ torch.linalg.solve(gram, target)
    return torch.linalg.solve(gram, factor.mT @ target)
