"""Keeps keys by the largest weight that any observed query gives them, times their value."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import avg_pool1d

from value_aware_attention.caches.critical_values import projected_norms
from value_aware_attention.caches.method import CacheMethod, available, protected
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.order import first_of

POOL, SURE = 5, 0.9


class DefensiveKV(CacheMethod):
    """Keeps keys of the largest weight in any observed query, times the share of ||W_o v_j||_1.

    DefensiveKV (arXiv 2510.13334) as its code has it, with the last 32 rows and the heads of a
    layer pooled: weights averaged over 5 neighbours, their maximum over group and rows, at least
    its mean over keys; the norm is in parts of the sum over heads. First come the keys that hold
    0.9 of the mean weight, less the share of the last keys.
    """

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        counted = available(seen) & ~protected(seen)
        weights = seen.weights.masked_fill(~counted[..., None, None, :], 0.0)
        flat = weights.flatten(0, -2)[:, None]
        pooled = avg_pool1d(flat, POOL, stride=1, padding=POOL // 2).view_as(weights)
        mass = weights.sum(dim=-1, keepdim=True)
        pooled = pooled * (mass / pooled.sum(dim=-1, keepdim=True)).nan_to_num()
        largest = pooled.amax(dim=(-3, -2))
        count = counted.sum(dim=-1, keepdim=True).clamp_min(1)
        largest = largest.maximum(largest.sum(dim=-1, keepdim=True) / count)
        norms = projected_norms(seen)
        heads = norms.sum(dim=-2, keepdim=True) if norms.ndim > 2 else norms
        scores = largest * (norms / heads).nan_to_num()
        return scores.masked_fill(self._sure(seen, weights), scores.amax())

    def _sure(
        self, seen: Observed, weights: Float[Tensor, "*batch G W M"]
    ) -> Bool[Tensor, "*batch M"]:
        """Returns the keys that hold most of the mean weight."""
        mean = weights.mean(dim=(-3, -2))
        mean = mean / mean.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
        rows = seen.query.shape[-2]
        late = weights[..., -rows:].sum(dim=-1).mean()
        ranked = self.ranked(seen, mean.masked_fill(protected(seen), -1.0), seen.keys)
        held = mean.gather(-1, ranked).cumsum(dim=-1)
        free = self.r - protected(seen).sum(dim=-1)
        count = (held < SURE - late).sum(dim=-1).minimum(free)
        return first_of(ranked, count + protected(seen).sum(dim=-1)) & ~protected(seen)
