"""Computes random attention, to r keys per query that are drawn once."""

from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.approximations.fixed_pattern import SparseFixedPattern
from value_aware_attention.approximations.patterns import Pattern, random_keys
from value_aware_attention.arguments import check_seed
from value_aware_attention.error import Sizes


class RandomKeys(SparseFixedPattern):
    """Draws r different keys per query uniformly from all positions, weighted by attention.

    The random part of BigBird (Zaheer et al., 2020) alone. The draws follow from the seed and the
    positions, not from the inputs. r = M is exact. Under is_causal they are drawn from the query
    itself and its past, so that early queries see something; they are drawn regardless of an
    `attn_mask`, which may hide some. Queries share no keys: few keys (less than a 16th of all) are
    gathered query by query; with more, all pairs are computed and the others hidden.
    """

    def __init__(self, r: int, seed: int) -> None:
        super().__init__(r)
        self.seed = check_seed(seed)

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        return random_keys(self.r, self.seed, keys, is_causal)

    def multiply_adds(self, sizes: Sizes) -> float:
        return SparseApproximation.multiply_adds(self, sizes)  # r each: nothing to count
