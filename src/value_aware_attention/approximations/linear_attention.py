"""Computes linear attention: the elu kernel by its features, in O(L)."""

from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.feature_attention import (
    FeatureAttention,
    FeatureMap,
    Features,
)
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Elu


class LinearAttention(FeatureAttention):
    """Computes <Phi(q), Phi(k)> attention with Phi(x) = 1 + elu(x) (Katharopoulos et al., 2020).

    It is exact: the output equals that of `Exact` with the elu kernel, in O(L) time and memory,
    causal too (section 3.3). It has no other kernel, so pass `kernel=kernels.Elu()`; the default
    kernel of the call is the exponential one, which it refuses with a ValueError.
    """

    kernels = (Elu,)

    def feature_maps(self, call: Call) -> tuple[FeatureMap, FeatureMap]:
        return _features, _features

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts a query's product with the sums, and its share of the keys' outer products."""
        return sizes.head_dim * sizes.value_dim * (1 + sizes.keys / sizes.queries)


def _features(x: Float[Tensor, "*batch L D"]) -> Features:
    """Computes log(1 + elu(x)): x below 0, log(1 + x) above."""
    return Features(x.where(x <= 0, x.clamp_min(0).log1p()))
