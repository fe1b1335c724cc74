"""Refits biases and values of kept keys to the observed outputs."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from value_aware_attention.caches.budgets import Order
from value_aware_attention.caches.method import CacheMethod, check_cache_method
from value_aware_attention.caches.observed import KeptKeys, Observed
from value_aware_attention.caches.observed_attention import ObservedAttention
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
        method = ObservedAttention(r, aggregate="rms") if method is None else method
        check_cache_method(method)
        if method.r != r:
            raise ValueError(f"r is {r}; the method given keeps {method.r}")
        if method.refits:
            name = type(method).__name__
            raise ValueError(f"method is a {name} that refits; one refit is made")
        self.method = method
        self.kernels = method.kernels

    @torch.no_grad()
    def keep(self, seen: Observed) -> KeptKeys:
        self.check(seen)
        return refitted(seen, self.method.keep(seen))

    @torch.no_grad()
    def order(self, seen: Observed) -> Order:
        return self.method.order(seen)

    def counts(self, orders: Sequence[Order], total: int, least: int) -> list[Int[Tensor, "B H"]]:
        return self.method.counts(orders, total, least)

    @torch.no_grad()
    def cut(self, seen: Observed, order: Order, counts: Int[Tensor, " *batch"]) -> KeptKeys:
        return refitted(seen, self.method.cut(seen, order, counts))

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Counts one solution of the two least squares problems; the refit compares thirteen."""
        base = self.method.multiply_adds(rows, keys, head_dim, value_dim)
        return base + 2 * (rows * self.r**2 + self.r**3 / 3)
