"""Keeps half of the keys by a score, the others by the score times their projected value."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod, check_cache_method
from value_aware_attention.caches.observed import KeptKeys, Observed
from value_aware_attention.caches.order import Order, first_of


class CriticalValues(CacheMethod):
    """Keeps r/2 keys by the scores of a method, the others by (score + 1e-4) mean ||W_o v_j||_1.

    CriticalKV (Feng et al., 2025, arXiv 2502.03805); the mean is over the heads of the group.
    Without an output projection W_o is the identity. Raises ValueError for a method that searches.
    """

    def __init__(self, method: CacheMethod) -> None:
        check_cache_method(method)
        super().__init__(method.r)
        if type(method).scores is CacheMethod.scores:
            raise ValueError(f"method is a {type(method).__name__}; it must be one that has scores")
        self.method = method
        self.kernels = method.kernels

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        return self._scores(seen, torch.full(seen.batch, self.r, device=seen.key.device))

    def _scores(self, seen: Observed, counts: Int[Tensor, " *batch"]) -> Float[Tensor, "*batch M"]:
        """Scores keys of which `counts` are kept."""
        scores = self.method.scores(seen)
        # a key without any score is still ranked by its value
        sizes = (scores + 1e-4) * projected_norms(seen)
        ranked = self.ranked(seen, scores, seen.keys)
        return sizes.masked_fill(first_of(ranked, (counts // 2).clamp_min(1)), torch.inf)

    @torch.no_grad()
    def order(self, seen: Observed) -> Order:
        """Orders keys by the method's scores: only the keys of a head are chosen by values."""
        return self.method.order(seen)

    def counts(self, orders: Sequence[Order], total: int, least: int) -> list[Int[Tensor, "B H"]]:
        return self.method.counts(orders, total, least)

    @torch.no_grad()
    def cut(self, seen: Observed, order: Order, counts: Int[Tensor, " *batch"]) -> KeptKeys:
        keys = self.ranked(seen, self._scores(seen, counts), seen.keys)
        return self.kept_of(seen, first_of(keys, counts))

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Counts the projection as value_dim x value_dim multiply-adds a key."""
        own = self.method.multiply_adds(rows, keys, head_dim, value_dim)
        return own + keys * value_dim**2


def projected_norms(seen: Observed) -> Float[Tensor, "*batch M"]:
    """Computes ||W_o v_j||_1, the mean over the group; without W_o it is the identity."""
    value = working_precision(seen.value)
    if seen.projection is None:
        return value.abs().sum(dim=-1)
    projection = working_precision(seen.projection)
    norms = (  # in parts: after W_o a value is as wide as the model
        (part[..., None, :, :] @ projection).abs_().sum(dim=-1).mean(dim=-2)
        for part in value.split(256, dim=-2)
    )
    return torch.cat(list(norms), dim=-1)
