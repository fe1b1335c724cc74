"""Keeps keys by their geometry alone, without queries."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod, available
from value_aware_attention.caches.observed import Observed


class KeyDiff(CacheMethod):
    """Keeps the r keys least like the mean direction of all: smallest cos(k_j, mean k / ||k||).

    KeyDiff (Park et al., 2025, arXiv 2504.15364).
    """

    observes = False

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        key = working_precision(seen.key)
        counted = available(seen)[..., None]
        mean = normalize(key, dim=-1).where(counted, 0.0).sum(dim=-2, keepdim=True)
        return -cosine_similarity(
            key, mean / counted.sum(dim=-2, keepdim=True).clamp_min(1), dim=-1
        )


class KeyNorm(CacheMethod):
    """Keeps the r keys with the smallest ||k_j|| (Devoto et al., 2024, arXiv 2406.11430)."""

    observes = False

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        return -working_precision(seen.key).norm(dim=-1)
