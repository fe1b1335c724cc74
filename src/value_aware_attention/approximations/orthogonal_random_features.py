"""Computes ORF attention (section A.1), by positive random features of the exponential kernel."""

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
    orthonormal_columns,
    similarity_scale,
)
from value_aware_attention.arguments import check_at_least, check_choice, check_seed
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Exponential

SCALINGS = ("performer", "paper")


class OrthogonalRandomFeatures(FeatureAttention):
    """Approximates exp(<q, k>) by <Phi(q), Phi(k)>, Phi(x) = exp(Rx - ||x||^2 / 2) / sqrt(F) (A.1).

    scaling "performer": R stacks D x D uniformly random orthogonal blocks whose rows are given the
    norms of Gaussian vectors (FAVOR+, Choromanski et al., 2020); it converges as F grows. "paper":
    R is `torch.nn.init.orthogonal_` of F x D, as A.1 is written; for F > D its rows are too short
    by sqrt(F / D) and it does not converge to the exponential kernel. Everything is evaluated in
    log space with a stabiliser per feature, which cancels exactly and never leaves 0/0. It takes
    O(L), causal too.
    """

    kernels = (Exponential,)

    def __init__(self, features: int, seed: int, scaling: str = "performer") -> None:
        super().__init__()
        self.features = check_at_least(1, features=features)
        self.seed = check_seed(seed)
        self.scaling = check_choice(SCALINGS, scaling=scaling)

    def feature_maps(self, call: Call) -> tuple[FeatureMap, FeatureMap]:
        head_dim = call.key.shape[-1]
        scale = similarity_scale(call.kernel, head_dim)
        projection = self.projection(head_dim).to(call.key).T * scale**0.5

        def of_queries(x: Tensor) -> Features:
            # ||q||^2 / 2 is the same for all keys of a query: normalisation cancels it, but in
            # the sum a long query's would take the digits of Rq.
            return Features(x @ projection)

        def of_keys(x: Tensor) -> Features:
            size = x.square().sum(dim=-1, keepdim=True) * (scale / 2)
            # Not -inf, which is a hidden key: a key whose ||k||^2 overflows is an error.
            return Features(x @ projection - size.where(size < torch.inf, torch.nan))

        return of_queries, of_keys

    def projection(self, head_dim: int) -> Float[Tensor, "F D"]:
        """Draws the random matrix R from the seed, on the CPU."""
        draw = orthonormal_columns if self.scaling == "paper" else orthogonal_gaussian
        return draw(self.features, head_dim, self.seed)

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts a query's features, its share of the keys' features and their sum, and the
        product."""
        return self.features * sizes.one_key * (1 + sizes.keys / sizes.queries)
