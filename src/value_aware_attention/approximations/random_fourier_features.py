"""Computes attention by random Fourier features of the exponential kernel."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.feature_attention import (
    FeatureAttention,
    FeatureMap,
    Features,
)
from value_aware_attention.approximations.random_projection import (
    orthogonal_gaussian,
    similarity_scale,
)
from value_aware_attention.arguments import check_at_least, check_seed
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Exponential


class RandomFourierFeatures(FeatureAttention):
    """Approximates exp(<q, k>) = exp((||q||^2 + ||k||^2) / 2) E[cos <w, q - k>] with Gaussian w.

    The mean over `features` frequencies w (Rahimi & Recht, 2007; as attention: Choromanski et al.,
    2020, section 2.3), in O(L), causal too. It is unbiased, but an estimated similarity may be
    negative, so the normaliser can pass zero. Its magnitude is kept at least 1 / features times the
    largest visible key's share of it, far below its standard deviation there, so that the output
    stays finite. Where queries and keys are far apart no number of features suffices: see the
    positive features of ORF.
    """

    kernels = (Exponential,)

    def __init__(self, features: int, seed: int) -> None:
        super().__init__()
        self.features = check_at_least(1, features=features)
        self.seed = check_seed(seed)
        self.smallest_total = 1 / features

    def feature_maps(self, call: Call) -> tuple[FeatureMap, FeatureMap]:
        head_dim = call.key.shape[-1]
        scale = similarity_scale(call.kernel, head_dim)
        frequencies = orthogonal_gaussian(self.features, head_dim, self.seed).to(call.key)
        frequencies = frequencies * scale**0.5

        def of_queries(x: Tensor) -> Features:
            # exp(||q||^2 / 2) is the same for all keys of a query: normalisation cancels it.
            return Features(torch.zeros_like(x[..., :1]), _waves(x, frequencies))

        def of_keys(x: Tensor) -> Features:
            size = x.square().sum(dim=-1, keepdim=True) * (scale / 2)
            return Features(size, _waves(x, frequencies))

        return of_queries, of_keys

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts a query's waves, its share of the keys' waves and their sum, and the product."""
        return (
            self.features
            * (sizes.head_dim + 2 * sizes.value_dim)
            * (1 + sizes.keys / sizes.queries)
        )


def _waves(
    x: Float[Tensor, "*batch L D"], frequencies: Float[Tensor, "F D"]
) -> Float[Tensor, "*batch L 2*F"]:
    """Computes (cos Rx, sin Rx) / sqrt(F): <waves(q), waves(k)> is the mean of cos <w, q - k>."""
    angles = x @ frequencies.T
    return torch.cat([angles.cos(), angles.sin()], dim=-1) / math.sqrt(len(frequencies))
