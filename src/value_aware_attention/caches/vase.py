"""Keeps keys with values of large range, and others drawn by their attention weight."""

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.attention import working_precision
from value_aware_attention.caches.baselines import Random
from value_aware_attention.caches.method import available, candidates
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import mean_softmax, pooled


class VaSE(Random):
    """Keeps r/4 keys whose values have the largest range, and draws the others by attention weight.

    VaSE (arXiv 2606.03928) as its code has it: range max_d v_jd - min_d v_jd, the first 4 keys
    before all; the others without replacement in proportion to the mean weight over group, observed
    queries and 5 neighbours, with softmax over the keys that are not protected. Its authors choose
    again after every 64 tokens, with the last 64 rows, recent = 64 and sinks = 0.
    """

    observes = True

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        weights = pooled(mean_softmax(seen, seen.log_similarity), 5)
        # Gumbel noise: the largest are draws without replacement
        scores = weights.log() - super().scores(seen).log().neg().log()
        smallest, largest = working_precision(seen.value).aminmax(dim=-1)
        ranges = (largest - smallest).masked_fill(available(seen).cumsum(-1) <= 4, torch.inf)
        order = ranges.where(candidates(seen), -1.0).argsort(dim=-1, descending=True, stable=True)
        above = torch.finfo(scores.dtype).max / torch.arange(4, 4 + self.r // 4).to(scores)
        return scores.scatter(-1, order[..., : len(above)], above.expand(*seen.batch, -1))
