"""Keeps keys by a score and by the norm of their projected value."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.budgets import Ranking, first_of
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.caches.method import CacheMethod, Refinement, candidates, protected
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import by_layer, candidate_weights, pooled


class CriticalValues(Refinement):
    """Keeps r/2 keys by a method's scores, and the other half by (score + 1e-4) mean ||W_o v_j||_1.

    CriticalKV (Feng et al., 2025, arXiv 2502.03805). The mean is over the heads of the group.
    Without an output projection W_o is the identity. Raises ValueError for a method that searches.
    """

    def __init__(self, method: CacheMethod) -> None:
        super().__init__(method)
        if type(method).scores is CacheMethod.scores:
            raise ValueError(f"method is a {type(method).__name__}; it must be one that has scores")
        self.observes = method.observes

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        return self._scores(
            observed, torch.full(observed.batch, self.r, device=observed.key.device)
        )

    def _scores(
        self, observed: Observed, counts: Int[Tensor, " *batch"]
    ) -> Float[Tensor, "*batch M"]:
        """Computes the scores if `counts` keys are kept."""
        scores = self.method.scores(observed)
        # 1e-4, so that keys with score 0 are ranked by their value
        sizes = (scores + 1e-4) * projected_norms(observed)
        first = self.leading(observed, scores, observed.keys)
        return sizes.masked_fill(first_of(first, (counts // 2).clamp_min(1)), torch.inf)

    @torch.no_grad()
    def cut(self, observed: Observed, ranking: Ranking, counts: Int[Tensor, " *batch"]) -> KeptKeys:
        keys = self.leading(observed, self._scores(observed, counts), observed.keys)
        return self.pack(observed, first_of(keys, counts))

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Counts value_dim x value_dim multiply-adds per key for the projection."""
        return self.method.multiply_adds(rows, keys, head_dim, value_dim) + keys * value_dim**2


def projected_norms(observed: Observed) -> Float[Tensor, "*batch M"]:
    """Computes ||W_o v_j||_1, averaged over the group; an unknown W_o is taken as the identity."""
    value = working_precision(observed.value)
    if observed.projection is None:
        return value.abs().sum(dim=-1)
    projection = working_precision(observed.projection)
    norms = (  # in chunks: after W_o a value is as wide as the model
        (values[..., None, :, :] @ projection).abs_().sum(dim=-1).mean(dim=-2)
        for values in value.split(256, dim=-2)
    )
    return torch.cat(list(norms), dim=-1)


class LaProx(CacheMethod):
    """Keeps the keys with the largest ||alpha_j||_2 ||W_o v_j||_2 (alpha_j: column of weights).

    This is LaProx (arXiv 2605.07234). With `pool="model"` scores are relative to the layer's sum.
    Neither the paper nor its code was available: the formula is taken from two public derivatives,
    which agree. The sum over a group is ours. Without an output projection W_o is the identity.
    """

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        value = projected = working_precision(observed.value)[..., None, :, :]
        if observed.projection is not None:  # ||v W_o||^2 = v W_o W_o^T v^T
            projection = working_precision(observed.projection)
            projected = value @ (projection @ projection.mT)
        norms = (projected * value).sum(dim=-1).clamp_min(0).sqrt()
        return (torch.linalg.vector_norm(candidate_weights(observed), dim=-2) * norms).sum(dim=-2)

    def losses(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        scores = by_layer(observed, self.scores(observed))
        return (scores / scores.sum(dim=(1, 2), keepdim=True)).view(*observed.batch, -1)


class DefensiveKV(CacheMethod):
    """Keeps keys by their largest weight over the observed queries, times a share of ||W_o v_j||_1.

    This is DefensiveKV (arXiv 2510.13334) as in its code. The weights of each row are averaged over
    5 neighbours and rescaled to the row's mass. Their maximum over group and rows is raised to at
    least its mean over keys. It is multiplied by the norm, averaged over the group and divided by
    its sum over the heads of the layer. Ranked first are the keys that hold 0.9 of the mean weight,
    minus the share of the last keys (as many as rows). The authors use the last 32 rows,
    recent = 32, sinks = 0 and `pool="layer"`. Their layer version, `pool="model"`, may also drop
    recent keys, unlike here.
    """

    is_nested = False

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        weights, counted = candidate_weights(observed), candidates(observed)
        near = pooled(weights, 5).masked_fill(~counted[..., None, None, :], 0.0)
        near = near * (weights.sum(dim=-1, keepdim=True) / near.sum(dim=-1, keepdim=True))
        largest = near.nan_to_num().amax(dim=(-3, -2))
        mean = largest.sum(dim=-1, keepdim=True) / counted.sum(dim=-1, keepdim=True)
        norms = by_layer(observed, projected_norms(observed))
        scores = by_layer(observed, largest.maximum(mean)) * norms / norms.sum(dim=1, keepdim=True)
        scores = scores.nan_to_num() * by_layer(observed, counted)
        others = by_layer(observed, ~self._sure(observed, weights))
        return scores.where(others, scores.amax(dim=(1, 2), keepdim=True)).reshape(counted.shape)

    def _sure(
        self, observed: Observed, weights: Float[Tensor, "*batch G W M"]
    ) -> Bool[Tensor, "*batch M"]:
        """Returns a mask of the candidates that hold most of the mean weight."""
        mean, counted = weights.mean(dim=(-3, -2)), candidates(observed)
        late = counted & (counted.flip(-1).cumsum(dim=-1).flip(-1) <= weights.shape[-2])
        share = by_layer(observed, mean * late).sum(dim=-1).mean(dim=1)
        least = 0.9 - share.view(-1, *(1,) * (mean.ndim - 1))
        mean = mean / mean.sum(dim=-1, keepdim=True)
        ranking = mean.masked_fill(~counted, -1.0).argsort(dim=-1, descending=True, stable=True)
        count = (mean.gather(-1, ranking).cumsum(dim=-1) < least).sum(dim=-1)
        return first_of(ranking, count.minimum(self.r - protected(observed).sum(dim=-1)))
