"""Searches the set of keys that jointly changes the observed outputs least."""

from itertools import chain

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from value_aware_attention.arguments import check_choice
from value_aware_attention.caches.joint_set import (
    Rows,
    eliminate,
    eliminate_by_shares,
    exchange,
    extend,
)
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import KeptKeys, Observed
from value_aware_attention.caches.refit import refitted

PACKAGE = "value_aware_attention."
"""Package whose scoring methods are compared: a user's own would change the choice"""
IN_CACHE = 2**18
"""Largest number of weights searched at once on a CPU: more do not fit its cache"""
EXCHANGED, FEW_KEYS = 3, 64
"""`search="best"` improves at most `EXCHANGED` starts; with `FEW_KEYS` keys or fewer it improves
all of them. On 128 keys of three trained models all 11 starts left 0.2 to 1.6% less, in four times
the time; among ten keys the start that ends at the optimum is often far from it."""


class ValueAware(CacheMethod):
    """Keeps the r keys found to leave the least sum ||o_i - o~_i||^2 over the observed queries.

    One set serves all queries, with attention's own weights: the objective of section 3 for a
    cache. Scores of single keys cannot rank sets, because the gain of a key depends on the others.
    Keys are therefore dropped one by one, each time the key whose loss raises the joint error
    least, computed exactly for every candidate. Where the set of a scoring method of this package
    leaves less error on the observed queries, that set is returned.

    Optimal where one key is free (r = 1, or one more than the protected) and where one is dropped;
    best found elsewhere. `search` "fast" drops 5% of the keys at a time; "best" exchanges keys
    until none helps, from several starts (all, of few keys). `refit` gives the keys biases and
    values of their own, as `AttentionMatching` does.
    """

    def __init__(self, r: int, refit: bool = False, search: str = "default") -> None:
        super().__init__(r)
        self.refit = self.refits = refit
        self.search = check_choice(("fast", "default", "best"), search=search)

    @torch.no_grad()
    def keep(self, seen: Observed) -> KeptKeys:
        self.check(seen)
        rows = Rows.of(seen)
        others = torch.stack([_mask(method.keep(seen), rows) for method in self._others(seen)])
        elements = IN_CACHE if rows.value.device.type == "cpu" else rows.log_weights.numel()
        sizes = [len(part.value) for part in rows.split(elements)]
        parts = zip(rows.split(elements), others.split(sizes, dim=1), strict=True)
        found = torch.cat([self._best(part, starts) for part, starts in parts])
        indices = found.nonzero()[:, 1].view(*seen.batch, self.r)
        kept = self.kept(seen, indices)
        return refitted(seen, kept) if self.refit else kept

    def _others(self, seen: Observed) -> list[CacheMethod]:
        """Lists the scoring methods, whose sets are starts or stand where they are better."""
        ours = (m for m in CacheMethod.__subclasses__() if m.__module__.startswith(PACKAGE))
        methods = chain.from_iterable(method.starts(self.r) for method in ours)
        return [one for one in methods if not one.kernels or isinstance(seen.kernel, one.kernels)]

    def _best(self, rows: Rows, others: Bool[Tensor, "S B M"]) -> Bool[Tensor, "B M"]:
        """Searches, and takes the set that leaves the least error."""
        search = eliminate_by_shares if self.search == "fast" else eliminate
        starts = [search(rows, self.r), *others]
        free = self.r - int(rows.protected.sum(dim=-1).min())
        if free == 1 or self.search == "best":
            starts.append(extend(rows, self.r))
        sets = torch.stack(starts)
        errors = torch.stack([rows.error(start) for start in starts])
        if self.search == "best":
            count = len(sets) if sets.shape[-1] <= FEW_KEYS else EXCHANGED
            nearest = errors.topk(count, dim=0, largest=False).indices
            sets = sets.gather(0, nearest[..., None].expand(-1, -1, sets.shape[-1]))
            sets = torch.stack([exchange(rows, start) for start in sets])
            errors = torch.stack([rows.error(start) for start in sets])
        best: Int[Tensor, " B"] = errors.argmin(dim=0)
        return sets[best, torch.arange(len(best), device=best.device)]

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Counts scores, distances, and the nine numbers that a drop takes of each pair left.

        Of `search` "default", without a refit; the others' scores are not counted.
        """
        drops = keys - min(self.r, keys)
        pairs = rows * drops * (keys + self.r) / 2
        return rows * keys * (head_dim + 2 * value_dim) + 9 * pairs


def _mask(kept: KeptKeys, rows: Rows) -> Bool[Tensor, "B M"]:
    indices = kept.indices.reshape(len(rows.available), -1)
    return torch.zeros_like(rows.available).scatter(-1, indices, value=True)
