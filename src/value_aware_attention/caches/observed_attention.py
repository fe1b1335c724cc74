"""Keeps keys by the attention weights of the observed queries."""

from math import prod

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, normalize

from value_aware_attention.arguments import check_at_least, check_choice
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.baselines import Random
from value_aware_attention.caches.method import CacheMethod, available, candidates
from value_aware_attention.caches.observed import Observed
from value_aware_attention.call import max_elements

AGGREGATES = {"mean": 1.0, "rms": 2.0, "max": torch.inf}
"""The orders of the norms that aggregate weights"""


class ObservedAttention(CacheMethod):
    """Keeps the r keys with the largest attention weight, averaged over observed queries and group.

    `aggregate` "max" or "rms" replaces the mean by the maximum or the root mean square. `pool` then
    averages over that many neighbouring keys, counting protected ones as 0 (odd; 1 = none);
    `pooling` "max" takes their maximum instead. `by_layer` keeps one set for all heads of a layer
    (all leading dimensions but the first), by their mean. With options of `AfterPrefix` this gives:

    - SnapKV (Li et al., 2024, arXiv 2404.14469): last 32 rows, pool 7, pooling "max", recent =
      rows, sinks = 0
    - TOVA (Oren et al., 2024, arXiv 2401.06104): the last row, by_layer, sinks = recent = 0
    - H2O (Zhang et al., 2023, arXiv 2306.14048): all causal rows, recent = r / 2, sinks = 0, in its
      one-shot form
    - KVzip (Kim et al., 2025, arXiv 2505.23416): repeated rows, aggregate "max"; the original has
      a budget per head
    """

    def __init__(
        self,
        r: int,
        pool: int = 1,
        aggregate: str = "mean",
        by_layer: bool = False,
        pooling: str = "mean",
    ) -> None:
        super().__init__(r)
        self.pool = check_pool(pool)
        self.aggregate = check_choice(tuple(AGGREGATES), aggregate=aggregate)
        self.by_layer = by_layer
        self.pooling = check_choice(("mean", "max"), pooling=pooling)

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        weights, order = candidate_weights(observed), AGGREGATES[self.aggregate]
        norm = torch.linalg.vector_norm(weights, order, dim=(-3, -2))
        mean = norm / prod(weights.shape[-3:-1]) ** (1 / order)
        scores = pooled(mean, self.pool, self.pooling)
        if self.by_layer:
            heads = by_layer(observed, scores)
            scores = heads.mean(dim=1, keepdim=True).expand_as(heads).reshape_as(scores)
        return scores


def check_pool(pool: int) -> int:
    """Returns the number of neighbouring keys if it is odd; ValueError otherwise."""
    if check_at_least(1, pool=pool) % 2 == 0:
        raise ValueError(f"pool is {pool}; it must be odd, to lie around its key")
    return pool


def pooled(
    x: Float[Tensor, "*rows M"], pool: int, pooling: str = "mean"
) -> Float[Tensor, "*rows M"]:
    """Takes the mean or maximum of `pool` neighbouring numbers >= 0, with 0 beyond the ends."""
    if pool == 1:
        return x
    over = max_pool1d if pooling == "max" else avg_pool1d
    return over(x.reshape(-1, 1, x.shape[-1]), pool, stride=1, padding=pool // 2).view_as(x)


def by_layer(observed: Observed, x: Shaped[Tensor, "*batch M"]) -> Shaped[Tensor, "B H M"]:
    """Flattens the leading dimensions after the first (texts) into the heads of a layer."""
    return x.reshape(observed.batch[:1].numel(), -1, observed.keys)


def candidate_weights(observed: Observed) -> Float[Tensor, "*batch G W M"]:
    """Returns alpha, with 0 for keys that are not candidates."""
    return observed.weights.masked_fill(~candidates(observed)[..., None, None, :], 0.0)


def mean_softmax(
    observed: Observed, logits: Float[Tensor, "*batch #G W M"]
) -> Float[Tensor, "*batch M"]:
    """Averages the softmax over the candidates; zeros in a row that sees no candidates."""
    logits = logits.masked_fill(~candidates(observed)[..., None, None, :], -torch.inf)
    return logits.softmax(dim=-1).nan_to_num().mean(dim=(-3, -2))


class RKV(CacheMethod):
    """Keeps the r keys with the largest 0.1 importance - 0.9 redundancy.

    This is R-KV (Cai et al., 2025, arXiv 2505.24133) as in its code. Importance: softmax over keys
    of the group's largest logits, averaged over observed queries, then the maximum of 7 neighbours.
    Redundancy: softmax over keys of the mean cosine to all keys; the last copy of each key (cosine
    above 1/2) counts as cosine 0. In the original code, a key without copies gets cosine 0 to the
    first key by accident; not here. The authors choose again as a cache grows (`every`), with the
    last 8 rows and recent = 8, and advise against it for a prefill.
    """

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        looked = mean_softmax(observed, observed.log_similarity.amax(dim=-3, keepdim=True))
        alike = (
            self._mean_cosine(observed)
            .masked_fill(~available(observed), -torch.inf)
            .softmax(dim=-1)
        )
        return 0.1 * pooled(looked, 7, "max") - 0.9 * alike

    @staticmethod
    def _mean_cosine(observed: Observed) -> Float[Tensor, "*batch M"]:
        """Averages each key's cosine to all keys, in blocks of keys."""
        counted = available(observed)
        key = normalize(working_precision(observed.key), dim=-1).where(counted[..., None], 0.0)
        total, places = (
            torch.zeros_like(key[..., 0]),
            torch.arange(observed.keys, device=key.device),
        )
        for rows in places.split(
            max(1, max_elements() // (observed.keys * observed.batch.numel()))
        ):
            cosine = (key[..., rows, :] @ key.mT).masked_fill(rows[:, None] == places, 0.0)
            last = places.where(cosine > 0.5, -1).amax(dim=-1, keepdim=True)
            total += cosine.masked_fill(places == last, 0.0).sum(dim=-2)
        return total / counted.sum(dim=-1, keepdim=True).clamp_min(1)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float((rows + keys) * keys * head_dim)


class VaSE(Random):
    """Keeps the r/4 keys whose values have the largest range, and draws the rest by attention
    weight.

    This is VaSE (arXiv 2606.03928) as in its code. The range is max_d v_jd - min_d v_jd; the first
    4 keys rank above all. The rest is drawn without replacement in proportion to the mean weight
    over group, observed queries and 5 neighbours, with a softmax over unprotected keys. The authors
    choose again every 64 tokens, with the last 64 rows, recent = 64 and sinks = 0.
    """

    observes = True
    is_nested = False

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        weights = pooled(mean_softmax(observed, observed.log_similarity), 5)
        # with Gumbel noise the largest scores are draws without replacement
        scores = weights.log() - super().scores(observed).log().neg().log()
        smallest, largest = working_precision(observed.value).aminmax(dim=-1)
        ranges = (largest - smallest).masked_fill(available(observed).cumsum(-1) <= 4, torch.inf)
        order = ranges.where(candidates(observed), -1.0).argsort(
            dim=-1, descending=True, stable=True
        )
        above = torch.finfo(scores.dtype).max / torch.arange(4, 4 + self.r // 4).to(scores)
        return scores.scatter(-1, order[..., : len(above)], above.expand(*observed.batch, -1))


class AnDPro(CacheMethod):
    """Keeps blocks of 4 keys by the projection of their weighted values on that of all candidates.

    This is AnDPro (Geng et al., NeurIPS 2025, openreview.net Tdl89SZItB) as in its code. The score
    is the sum over a block, observed queries and group of a_ij <v_j, d_i>. Here a is the largest
    weight of 7 neighbours, and the anchor is d_i = sum_j a_ij v_j over keys that are neither
    padding nor protected. If r cuts a block, its first keys are kept. In the original, each query
    head has its own cache; the sum over a group is ours. The authors use the last 32 rows,
    recent = 32, sinks = 4 and `pool="layer"`.
    """

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        near, value = pooled(observed.weights, 7, "max"), working_precision(observed.value)
        weights = near.masked_fill(~candidates(observed)[..., None, None, :], 0.0)
        anchor = weights @ value[..., None, :, :]
        along = (weights * (anchor @ value[..., None, :, :].mT)).sum(dim=(-3, -2))
        block = (available(observed).cumsum(dim=-1) - 1).clamp_min(0) // 4  # without padding
        return torch.zeros_like(along).scatter_add(-1, block, along).gather(-1, block)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * keys * (head_dim + 2 * value_dim))
