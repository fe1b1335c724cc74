"""Refits biases and values of kept keys to the observed outputs."""

import torch

from value_aware_attention.caches.method import CacheMethod, check_cache_method
from value_aware_attention.caches.observed import KeptKeys, Observed
from value_aware_attention.caches.refit import refitted


class AttentionMatching(CacheMethod):
    """Refits log-biases and values of r keys, those of `method` or of the largest attention.

    Attention Matching (arXiv 2602.16284), in its form without a search: keys by the root mean
    square of their weights, biases and values by least squares with a ridge (`refit`), where the
    paper has non-negative and plain ones; docs/caches.md lists the differences.
    """

    refits = True

    def __init__(self, r: int, method: CacheMethod | None = None) -> None:
        super().__init__(r)
        if method is not None:
            check_cache_method(method)
            if method.r != r:
                raise ValueError(f"r is {r}; the method given keeps {method.r}")
            if method.refits:
                name = type(method).__name__
                raise ValueError(f"method is a {name} that refits; one refit is made")
        self.method = method
        self.kernels = () if method is None else method.kernels

    @torch.no_grad()
    def keep(self, seen: Observed) -> KeptKeys:
        self.check(seen)
        if self.method is None:
            scores = seen.weights.square().mean(dim=(-3, -2))
            kept = self.kept(seen, self.ranked(seen, scores, self.r))
        else:
            kept = self.method.keep(seen)
        return refitted(seen, kept)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Counts one solution of the two least squares problems; the refit compares thirteen."""
        sizes = rows, keys, head_dim, value_dim
        base = super().multiply_adds(*sizes)
        if self.method is not None:
            base = self.method.multiply_adds(*sizes)
        return base + 2 * (rows * self.r**2 + self.r**3 / 3)
