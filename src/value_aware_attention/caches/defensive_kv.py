"""Keeps keys by the largest weight that any observed query gives them, times their value."""

from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention.caches.critical_values import projected_norms
from value_aware_attention.caches.method import CacheMethod, candidates, protected
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import by_layer, candidate_weights, pooled
from value_aware_attention.caches.order import first_of


class DefensiveKV(CacheMethod):
    """Keeps keys of the largest weight in any observed query, times the share of ||W_o v_j||_1.

    DefensiveKV (arXiv 2510.13334) as its code has it: each row's weights averaged over 5 neighbours
    and rescaled to the row's mass, their maximum over group and rows, at least its mean over keys;
    the norm, averaged over the group, in parts of the sum over the heads of the layer. First come
    the keys that hold 0.9 of the mean weight, less the share of the last ones, as many as there are
    rows. There the last 32 rows, recent = 32, sinks = 0 and `pool="layer"`; in its layer version
    `pool="model"`, which may drop recent keys, as is not done here.
    """

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        weights, counted = candidate_weights(seen), candidates(seen)
        near = pooled(weights, 5).masked_fill(~counted[..., None, None, :], 0.0)
        near = near * (weights.sum(dim=-1, keepdim=True) / near.sum(dim=-1, keepdim=True))
        largest = near.nan_to_num().amax(dim=(-3, -2))
        mean = largest.sum(dim=-1, keepdim=True) / counted.sum(dim=-1, keepdim=True)
        norms = by_layer(seen, projected_norms(seen))
        scores = by_layer(seen, largest.maximum(mean)) * norms / norms.sum(dim=1, keepdim=True)
        scores = scores.nan_to_num() * by_layer(seen, counted)
        others = by_layer(seen, ~self._sure(seen, weights))
        return scores.where(others, scores.amax(dim=(1, 2), keepdim=True)).reshape(counted.shape)

    def _sure(
        self, seen: Observed, weights: Float[Tensor, "*batch G W M"]
    ) -> Bool[Tensor, "*batch M"]:
        """Returns the candidates that hold most of the mean weight."""
        mean, counted = weights.mean(dim=(-3, -2)), candidates(seen)
        late = counted & (counted.flip(-1).cumsum(dim=-1).flip(-1) <= weights.shape[-2])
        share = by_layer(seen, mean * late).sum(dim=-1).mean(dim=1)
        least = 0.9 - share.view(-1, *(1,) * (mean.ndim - 1))
        mean = mean / mean.sum(dim=-1, keepdim=True)
        order = mean.masked_fill(~counted, -1.0).argsort(dim=-1, descending=True, stable=True)
        count = (mean.gather(-1, order).cumsum(dim=-1) < least).sum(dim=-1)
        return first_of(order, count.minimum(self.r - protected(seen).sum(dim=-1)))
