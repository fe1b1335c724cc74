"""Offers the two patterns of the Sparse Transformer (Child et al., 2019, section 4)."""

from value_aware_attention.approximations.fixed_pattern import FixedPattern
from value_aware_attention.approximations.patterns import (
    Pattern,
    past,
    same_block,
    stripes,
    summaries,
    window,
)
from value_aware_attention.arguments import check_at_least


class Strided(FixedPattern):
    """Keeps neighbours and every stride-th key: |i - j| < s or (i - j) mod s = 0.

    It suits periodic data, such as images; s = sqrt(M) costs O(M sqrt(M)). Causal: also j <= i.
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = check_at_least(1, stride=stride)

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        pattern = window(self.stride - 1, self.stride - 1) | stripes(self.stride)
        return pattern & past() if is_causal else pattern


class Fixed(FixedPattern):
    """Keeps the query's block and all block ends: floor(j/s) = floor(i/s) or j mod s >= s - c.

    The last c = `summary` positions of each block of s = `stride` pass its content on to all
    queries, which suits text. Causal: also j <= i.
    """

    def __init__(self, stride: int, summary: int) -> None:
        super().__init__()
        self.stride = check_at_least(1, stride=stride)
        self.summary = check_at_least(1, summary=summary)
        if summary > stride:
            raise ValueError(f"summary is {summary}; it must be at most the stride, {stride}")

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        pattern = same_block(self.stride) | summaries(self.stride, self.summary)
        return pattern & past() if is_causal else pattern
