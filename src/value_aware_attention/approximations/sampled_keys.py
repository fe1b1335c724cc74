"""Samples keys from the attention weights, as in the proof of Maurey's bound."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.arguments import check_seed
from value_aware_attention.call import Call


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
