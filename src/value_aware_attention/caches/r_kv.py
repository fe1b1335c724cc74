"""Keeps keys that are looked at and unlike the other keys."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod, available
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import mean_softmax, pooled
from value_aware_attention.call import max_elements


class RKV(CacheMethod):
    """Keeps the r keys with the largest 0.1 importance - 0.9 redundancy.

    R-KV (Cai et al., 2025, arXiv 2505.24133) as its code has it. Importance: softmax over keys of
    the group's largest logits, its mean over observed queries, the largest of 7 neighbours.
    Redundancy: softmax over keys of the mean cosine to all keys, where of each key's copies (a
    cosine above 1/2) the last one counts as unlike it. There a key without a copy counts as unlike
    the first key, by accident; not here. Its authors choose again as a cache grows (`every`), with
    the last 8 rows and recent = 8, and advise against it for a prefill.
    """

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        looked = mean_softmax(seen, seen.log_similarity.amax(dim=-3, keepdim=True))
        alike = self._mean_cosine(seen).masked_fill(~available(seen), -torch.inf).softmax(dim=-1)
        return 0.1 * pooled(looked, 7, "max") - 0.9 * alike

    @staticmethod
    def _mean_cosine(seen: Observed) -> Float[Tensor, "*batch M"]:
        """Averages each key's cosine to all keys, in blocks of them."""
        counted = available(seen)
        key = normalize(working_precision(seen.key), dim=-1).where(counted[..., None], 0.0)
        total, places = torch.zeros_like(key[..., 0]), torch.arange(seen.keys, device=key.device)
        for rows in places.split(max(1, max_elements() // (seen.keys * seen.batch.numel()))):
            cosine = (key[..., rows, :] @ key.mT).masked_fill(rows[:, None] == places, 0.0)
            last = places.where(cosine > 0.5, -1).amax(dim=-1, keepdim=True)
            total += cosine.masked_fill(places == last, 0.0).sum(dim=-2)
        return total / counted.sum(dim=-1, keepdim=True).clamp_min(1)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float((rows + keys) * keys * head_dim)
