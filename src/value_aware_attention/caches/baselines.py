"""Keeps keys without looking at queries: random keys, the latest, or chosen by the keys alone."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from value_aware_attention.arguments import SEED_COUNT, check_seed
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod, available
from value_aware_attention.caches.observed import Observed


class Random(CacheMethod):
    """Draws r keys uniformly from `seed`, anew for each head of a layer and each choice.

    All layers of a model get the same draws, as do parts of a batch that are compressed separately,
    such as texts with different padding. Random Attention (arXiv 2609.03430) is this method with
    the prompt as sinks and recent = every = 64.
    """

    observes = False

    def __init__(self, r: int, seed: int) -> None:
        super().__init__(r)
        self.seed = check_seed(seed)

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        later = (
            0 if observed.start is None else observed.start - observed.keys
        )  # than the first choice
        generator = torch.Generator().manual_seed((self.seed + later) % SEED_COUNT)
        return torch.rand(*observed.batch, observed.keys, generator=generator).to(
            observed.key.device
        )

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return self.observes * super().multiply_adds(rows, keys, head_dim, value_dim)


class Recent(CacheMethod):
    """Keeps the latest keys; with sinks, this is StreamingLLM (Xiao et al., 2024)."""

    observes = False

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        places = torch.arange(observed.keys, dtype=torch.float32, device=observed.key.device)
        return places.expand(*observed.batch, -1)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return 0.0


class KeyDiff(CacheMethod):
    """Keeps the r keys least similar to the mean direction: smallest cos(k_j, mean k / ||k||).

    This is KeyDiff (Park et al., 2025, arXiv 2504.15364).
    """

    observes = False

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        key = working_precision(observed.key)
        counted = available(observed)[..., None]
        mean = normalize(key, dim=-1).where(counted, 0.0).sum(dim=-2, keepdim=True)
        return -cosine_similarity(
            key, mean / counted.sum(dim=-2, keepdim=True).clamp_min(1), dim=-1
        )


class KeyNorm(CacheMethod):
    """Keeps the r keys with the smallest ||k_j|| (Devoto et al., 2024, arXiv 2406.11430)."""

    observes = False

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        return -working_precision(observed.key).norm(dim=-1)
