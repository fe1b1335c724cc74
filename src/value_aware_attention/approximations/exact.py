"""Offers exact attention through the interface of approximations."""

from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.attention import attention
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Exponential, Kernel


class Exact(Approximation):
    """Computes Eq. 1 with all keys, the baseline of every table."""

    def forward(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch N V"]:
        """Calls `attention`, which chooses its own precision and fused code."""
        return attention(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        return call.output()

    def multiply_adds(self, sizes: Sizes) -> float:
        return sizes.kept(sizes.keys) * sizes.one_key
