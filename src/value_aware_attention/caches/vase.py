"""Keeps keys with values of large range, and others drawn by their attention weight."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool1d

from value_aware_attention.arguments import check_seed
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod, available, protected
from value_aware_attention.caches.observed import Observed

POOL = 5
"""Neighbouring keys over which attention weights are averaged"""


class VaSE(CacheMethod):
    """Keeps r/4 keys whose values have the largest range, and draws the others by attention weight.

    VaSE (arXiv 2606.03928) as its code has it: range max_d v_jd - min_d v_jd; the others without
    replacement in proportion to the mean weight over group, observed queries and 5 neighbours, with
    softmax over the keys that are not protected. Its authors choose again after every 64 tokens,
    with the last 64 rows; the first 4 keys are its sinks.
    """

    def __init__(self, r: int, seed: int) -> None:
        super().__init__(r)
        self.seed = check_seed(seed)

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        candidates = available(seen) & ~protected(seen)
        logits = seen.log_similarity.masked_fill(~candidates[..., None, None, :], -torch.inf)
        weights = logits.softmax(dim=-1).nan_to_num().mean(dim=(-3, -2))
        flat = weights.reshape(-1, 1, seen.keys)
        weights = avg_pool1d(flat, POOL, stride=1, padding=POOL // 2).view_as(weights)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(weights.shape, generator=generator).to(weights.device)
        scores = weights.log() - drawn.log().neg().log()  # Gumbel: draws without replacement
        value = working_precision(seen.value)
        spread = value.amax(dim=-1) - value.amin(dim=-1)
        first = spread.masked_fill(~candidates, -1.0).topk(max(1, self.r // 4), dim=-1).indices
        return scores.scatter(-1, first, torch.finfo(scores.dtype).max / 4)
