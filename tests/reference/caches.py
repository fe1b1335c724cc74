"""Slow, obvious search for the best shared set of keys."""

from itertools import combinations

import torch
from torch import Tensor

from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.caches.method import available, protected
from value_aware_attention.caches.observed import Observed


def plain(seen: Observed, indices: Tensor) -> KeptKeys:
    """Keeps these keys as they are; slots of padding are unused."""
    unused = ~available(seen).take_along_dim(indices, dim=-1)
    weight = torch.zeros(indices.shape, dtype=torch.promote_types(seen.key.dtype, torch.float32))
    return KeptKeys(indices, weight.to(indices.device).masked_fill(unused, -torch.inf))


def best_set(seen: Observed, r: int) -> KeptKeys:
    """Finds the r keys with the least error by trying every set that leaves no slot to padding."""
    lowest = seen.output.new_full(seen.batch, torch.inf)
    best = torch.zeros(*seen.batch, r, dtype=torch.long, device=lowest.device)
    for chosen in combinations(range(seen.keys), r):
        indices = torch.tensor(chosen, device=lowest.device).expand(*seen.batch, -1)
        kept = plain(seen, indices)
        of_chosen = protected(seen).take_along_dim(indices, dim=-1)
        forced = protected(seen).sum(-1) == of_chosen.sum(-1)
        usable = available(seen).take_along_dim(indices, dim=-1).sum(-1)
        filled = usable == available(seen).sum(-1).clamp_max(r)
        error = seen.error(kept).where(forced & filled, torch.inf)
        best = best.where((error >= lowest)[..., None], indices)
        lowest = torch.minimum(lowest, error)
    assert available(seen).any()
    return plain(seen, best)
