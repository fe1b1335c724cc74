"""Computes sliding-window attention: r neighbouring keys per query, adjacent or dilated."""

from value_aware_attention.approximations.fixed_pattern import SparseFixedPattern
from value_aware_attention.approximations.patterns import (
    Pattern,
    first_keys,
    past,
    shifted_window,
    window,
)
from value_aware_attention.arguments import check_at_least


class SlidingWindow(SparseFixedPattern):
    """Keeps r keys around each query, weighted by attention (section 4, sliding-window-r).

    Bidirectional: the token itself, r // 2 keys to its left and the rest to its right. At the edges
    of the sequence the window shifts inwards, so every query sees r keys and r = M is exact.
    Causal: the token itself and the r - 1 keys before it. Queries are the last N of M positions.

    `sinks` of the r keys are the first positions of the sequence (StreamingLLM, Xiao et al., 2024,
    arXiv 2309.17453), and the window has the rest; a key in both counts once. Raises ValueError
    unless 0 <= sinks < r.
    """

    def __init__(self, r: int, sinks: int = 0) -> None:
        super().__init__(r)
        if check_at_least(0, sinks=sinks) >= self.r:
            raise ValueError(f"sinks is {sinks}; it must be below r, which is {r}")
        self.sinks = sinks

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        near = self.r - self.sinks
        pattern = window(near - 1, 0) if is_causal else shifted_window(near, 1, keys)
        if not self.sinks:
            return pattern
        pattern = pattern | first_keys(self.sinks)
        return pattern & past() if is_causal else pattern


class DilatedWindow(SparseFixedPattern):
    """Keeps a sliding window with gaps: r keys, `dilation` positions apart.

    (Longformer, Beltagy et al., 2020, section 3.1.) Bidirectional: the token itself, r // 2 keys to
    its left and the rest to its right, shifted inwards at the edges. Causal: the token and r - 1
    keys before it. There are fewer than r if the sequence has fewer keys at these distances.
    dilation = 1 is `SlidingWindow`.
    """

    def __init__(self, r: int, dilation: int) -> None:
        super().__init__(r)
        self.dilation = check_at_least(1, dilation=dilation)

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        if is_causal:
            return window(self.r - 1, 0, self.dilation)
        return shifted_window(self.r, self.dilation, keys)
