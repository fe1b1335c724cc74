"""Computes attention by random features of the exponential kernel, positive or Fourier."""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.feature_attention import (
    FeatureAttention,
    FeatureMap,
    Features,
)
from value_aware_attention.arguments import check_at_least, check_choice, check_seed
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Exponential


class RandomFeatures(FeatureAttention):
    """Draws `features` random features of the exponential kernel from the seed."""

    kernels = (Exponential,)

    def __init__(self, features: int, seed: int) -> None:
        super().__init__()
        self.features = check_at_least(1, features=features)
        self.seed = check_seed(seed)

    def projection(self, head_dim: int) -> Float[Tensor, "F D"]:
        """Draws the random matrix R from the seed, on the CPU."""
        return orthogonal_gaussian(self.features, head_dim, self.seed)

    def scaled_projection(self, call: Call) -> tuple[Float[Tensor, "F D"], float]:
        """Returns R times the square root of the kernel's scale, and the scale."""
        assert isinstance(call.kernel, Exponential)
        head_dim = call.key.shape[-1]
        scale = call.kernel.scale_for(head_dim)
        return self.projection(head_dim).to(call.key) * scale**0.5, scale


class OrthogonalRandomFeatures(RandomFeatures):
    """Approximates exp(<q, k>) by <Phi(q), Phi(k)>, Phi(x) = exp(Rx - ||x||^2 / 2) / sqrt(F) (A.1).

    scaling "performer": R stacks D x D uniformly random orthogonal blocks, with rows rescaled to
    norms of Gaussian vectors (FAVOR+, Choromanski et al., 2020); it converges as F grows. "paper":
    R is `torch.nn.init.orthogonal_` of F x D, as A.1 states; for F > D its rows are too short by
    sqrt(F / D), and it does not converge to the exponential kernel. Everything is computed in log
    space with a stabiliser per feature, which cancels exactly and avoids 0/0. The cost is O(L),
    also causally.
    """

    def __init__(self, features: int, seed: int, scaling: str = "performer") -> None:
        super().__init__(features, seed)
        self.scaling = check_choice(("performer", "paper"), scaling=scaling)

    def feature_maps(self, call: Call) -> tuple[FeatureMap, FeatureMap]:
        projection, scale = self.scaled_projection(call)

        def of_queries(x: Tensor) -> Features:
            # ||q||^2 / 2 is left out: it is the same for all keys, so normalisation cancels it, and
            # for a long query it would cost digits of Rq.
            return Features(x @ projection.T)

        def of_keys(x: Tensor) -> Features:
            size = x.square().sum(dim=-1, keepdim=True) * (scale / 2)
            # If ||k||^2 overflows, the feature is NaN: -inf would mean a hidden key.
            return Features(x @ projection.T - size.where(size < torch.inf, torch.nan))

        return of_queries, of_keys

    def projection(self, head_dim: int) -> Float[Tensor, "F D"]:
        if self.scaling == "paper":
            return orthonormal_columns(self.features, head_dim, self.seed)
        return super().projection(head_dim)

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts a query's features, its share of the features of keys and their sum, and the
        product."""
        return self.features * sizes.one_key * (1 + sizes.keys / sizes.queries)


class RandomFourierFeatures(RandomFeatures):
    """Approximates exp(<q, k>) = exp((||q||^2 + ||k||^2) / 2) E[cos <w, q - k>] with Gaussian w.

    It averages over `features` frequencies w (Rahimi & Recht, 2007; for attention: Choromanski et
    al., 2020, section 2.3), in O(L), also causally. The estimate is unbiased but may be negative,
    so the normaliser can cross zero. To keep the output finite, its magnitude is at least
    1 / features times the largest visible key's share, far below its standard deviation there. If
    queries and keys are far apart, no number of features suffices; ORF's positive features do not
    have this problem.
    """

    def __init__(self, features: int, seed: int) -> None:
        super().__init__(features, seed)
        self.smallest_total = 1 / features

    def feature_maps(self, call: Call) -> tuple[FeatureMap, FeatureMap]:
        frequencies, scale = self.scaled_projection(call)

        def of_queries(x: Tensor) -> Features:
            # exp(||q||^2 / 2) is left out: it is the same for all keys and cancels.
            return Features(torch.zeros_like(x[..., :1]), _waves(x, frequencies))

        def of_keys(x: Tensor) -> Features:
            size = x.square().sum(dim=-1, keepdim=True) * (scale / 2)
            return Features(size, _waves(x, frequencies))

        return of_queries, of_keys

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts a query's waves, its share of the waves of keys and their sum, and the product."""
        waves = sizes.head_dim + 2 * sizes.value_dim
        return self.features * waves * (1 + sizes.keys / sizes.queries)


def _waves(
    x: Float[Tensor, "*batch L D"], frequencies: Float[Tensor, "F D"]
) -> Float[Tensor, "*batch L 2*F"]:
    """Computes (cos Rx, sin Rx) / sqrt(F): <waves(q), waves(k)> is the mean of cos <w, q - k>."""
    angles = x @ frequencies.T
    return torch.cat([angles.cos(), angles.sin()], dim=-1) / math.sqrt(len(frequencies))


@lru_cache(maxsize=128)  # a QR decomposition in every call would cost more than the attention
@torch.inference_mode(False)  # tensors drawn under inference_mode cannot be used in training
def orthogonal_gaussian(features: int, head_dim: int, seed: int) -> Float[Tensor, "F D"]:
    """Stacks D x D uniformly random orthogonal blocks, with rows rescaled to Gaussian norms.

    Each row is distributed as a standard Gaussian vector. Rows of one block are orthogonal, which
    lowers the variance of estimates (Choromanski et al., 2020, section 2.4).
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat(
        [_random_rotation(head_dim, generator) for _ in range(math.ceil(features / head_dim))]
    )
    norms = torch.randn(features, head_dim, generator=generator).norm(dim=-1)
    return norms[:, None] * rows[:features]


@lru_cache(maxsize=128)
@torch.inference_mode(False)
def orthonormal_columns(features: int, head_dim: int, seed: int) -> Float[Tensor, "F D"]:
    """Draws orthonormal columns for F > D, as torch does; rows have norm about sqrt(D / F)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.init.orthogonal_(torch.empty(features, head_dim), generator=generator)


def _random_rotation(head_dim: int, generator: torch.Generator) -> Float[Tensor, "D D"]:
    """Draws an orthogonal matrix uniformly: QR, with the signs of R's diagonal moved into Q."""
    orthogonal, upper = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))
    return orthogonal * upper.diagonal().sign()
