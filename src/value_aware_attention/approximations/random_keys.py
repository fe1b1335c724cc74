"""Computes random attention: r keys per query, drawn once."""

from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.approximations.fixed_pattern import SparseFixedPattern
from value_aware_attention.approximations.patterns import Pattern, random_keys
from value_aware_attention.arguments import check_seed
from value_aware_attention.error import Sizes


class RandomKeys(SparseFixedPattern):
    """Draws r distinct keys per query uniformly from all positions, weighted by attention.

    This is the random part of BigBird (Zaheer et al., 2020). The draws depend on the seed and the
    positions, not on the inputs. r = M is exact. Under is_causal, keys are drawn from the query
    itself and its past, so that early queries see something. An `attn_mask` does not change the
    draws, so it may hide some. Queries share no keys: if r is below a 16th of all keys, keys are
    gathered per query; otherwise all pairs are computed and the others hidden.
    """

    def __init__(self, r: int, seed: int) -> None:
        super().__init__(r)
        self.seed = check_seed(seed)

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        return random_keys(self.r, self.seed, keys, is_causal)

    def multiply_adds(self, sizes: Sizes) -> float:
        return SparseApproximation.multiply_adds(self, sizes)  # r keys per query: no count needed
