"""Draws keys at random: uniformly, once for all inputs, or from the attention weights."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.approximations.fixed_pattern import SparseFixedPattern
from value_aware_attention.approximations.patterns import Pattern, random_keys
from value_aware_attention.arguments import check_seed
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes


class RandomKeys(SparseFixedPattern):
    """Draws r distinct keys per query uniformly from all positions, weighted by attention.

    This is the random part of BigBird (Zaheer et al., 2020). The draws depend on the seed and the
    positions, not on the inputs. r = M is exact. Under is_causal, keys are drawn from the query
    itself and its past, so that early queries see something. An `attn_mask` does not change the
    draws, so it may hide some. Queries share no keys: if r is below a 16th of all keys, keys are
    gathered per query; otherwise all pairs are computed and the others hidden.
    """

    def __init__(self, r: int, seed: int) -> None:
        super().__init__(r)
        self.seed = check_seed(seed)

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        return random_keys(self.r, self.seed, keys, is_causal)

    def multiply_adds(self, sizes: Sizes) -> float:
        return SparseApproximation.multiply_adds(self, sizes)  # r keys per query: no count needed


class SampledKeys(SparseApproximation):
    """Draws r keys from alpha with replacement, each weighted 1 / r; the output is unbiased.

    Its mean squared error is (sum_i alpha_i ||v_i||^2 - ||o||^2) / r. It is a member of C_r, so
    optimal-v-aware-r is at least as good: Maurey's bound (Pisier, 1981). A key drawn several times
    fills one slot. The random numbers depend only on the seed, the head and the position of the
    query: other sequences in the batch and hidden keys do not change them.
    """

    queries_alone = False
    differentiable_weights = False

    def __init__(self, r: int, seed: int) -> None:
        super().__init__(r)
        self.seed = check_seed(seed)

    @torch.no_grad()
    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        weights = call.weights.expand(*call.batch, -1, -1)
        uniforms = self._uniforms(*call.batch[-1:], call.queries)[..., call.rows.cpu(), :]
        drawn = _draw(weights, uniforms.to(weights.device))
        total = weights.sum(dim=-1, keepdim=True)  # 0: no visible key; NaN: scores overflow
        share = total.new_full(drawn.shape, 1 / self.r).where(total > 0, total)
        shares = torch.zeros_like(weights).scatter_add_(-1, drawn, share)
        slots = shares.topk(min(self.r, call.keys), dim=-1)
        return slots.indices, slots.values

    def _uniforms(self, *rows: int) -> Float[Tensor, "*rows draws"]:
        """Draws `draws` numbers in [0, 1) for each (head and) query, on the CPU.

        They are drawn query by query, so that a longer sequence keeps the draws of earlier queries.
        """
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(*rows[::-1], self.r, generator=generator, dtype=torch.float64)
        return drawn if len(rows) == 1 else drawn.transpose(0, 1).contiguous()


def _draw(
    weights: Float[Tensor, "*batch N M"], uniforms: Float[Tensor, "*#batch N draws"]
) -> Int[Tensor, "*batch N draws"]:
    """Samples by inverse transform: the first key whose cumulative weight exceeds u."""
    # fp64, so that neither rounding nor later keys of weight 0 shift the start of a key.
    cumulative = weights.double().cumsum(dim=-1).contiguous()
    key = torch.searchsorted(cumulative, uniforms * cumulative[..., -1:], right=True)
    return key.clamp_max(weights.shape[-1] - 1)  # without visible keys nothing exceeds u
