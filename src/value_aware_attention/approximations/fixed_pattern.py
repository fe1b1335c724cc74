"""Computes attention over a fixed pattern: the keys of a query depend on positions alone."""

from abc import abstractmethod
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import Approximation, SparseApproximation
from value_aware_attention.approximations.block_sparse import block_sparse_attention, pairs
from value_aware_attention.approximations.patterns import Pattern
from value_aware_attention.attention import masked_softmax
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes


class FixedPattern(Approximation):
    """Computes Eq. 1 over the pairs of a pattern; a query without visible pairs gives zeros.

    Queries are the last N of M positions; N > M raises ValueError.
    """

    @abstractmethod
    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        """Returns the pairs kept among `keys` positions; under a causal mask, pairs with the
        past."""

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        return block_sparse_attention(call, self._pattern_of(call))

    def _pattern_of(self, sizes: Call | Sizes) -> Pattern:
        if sizes.queries > sizes.keys:
            raise ValueError(
                f"{type(self).__name__} got {sizes.queries} queries and {sizes.keys} keys; queries "
                f"are the last positions of its pattern, so there are at most as many as keys"
            )
        return self.pattern(sizes.keys, is_causal=sizes.is_causal)

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts the pairs that the pattern keeps, one by one."""
        pattern = self._pattern_of(sizes)
        return pairs(pattern, sizes.queries, sizes.keys) / sizes.queries * sizes.one_key


class SparseFixedPattern(FixedPattern, SparseApproximation):
    """Keeps a fixed pattern of at most `r` keys per query, which can be listed."""

    queries_alone = False
    check_finite = Approximation.check_finite  # the choice of keys is independent of the inputs

    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        slots = _slots(self._pattern_of(call), call.queries, call.keys)[call.rows.cpu()]
        slots = slots.to(call.query.device)
        visible, keys = slots >= 0, slots.clamp_min(0)
        scores = call.kernel.log_similarity(call.query, call.key)
        if call.attn_mask is not None:
            mask = call.attn_mask.expand(*call.attn_mask.shape[:-2], *scores.shape[-2:])
            visible = visible & mask.gather(-1, keys.expand(*mask.shape[:-1], -1))
        scores = scores.gather(-1, keys.expand(*scores.shape[:-1], -1))
        weights = masked_softmax(scores, visible).expand(*call.batch, *keys.shape)
        return keys.expand(weights.shape), weights


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # cached for later calls; autograd cannot save inference tensors
def _slots(pattern: Pattern, queries: int, keys: int) -> Int[Tensor, "N R"]:
    """Lists the keys of each query in order; shorter rows are filled with -1."""
    mask = pattern.mask(queries, keys)
    row, key = mask.nonzero().unbind(dim=-1)
    counts = mask.sum(dim=-1)
    place = torch.arange(len(row)) - (counts.cumsum(dim=0) - counts)[row]
    slots = torch.full((queries, int(counts.max()) if queries else 0), -1)
    slots[row, place] = key
    return slots
