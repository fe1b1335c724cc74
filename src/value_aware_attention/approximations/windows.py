"""Attends to a window of keys, alone or with first keys, global positions and random keys."""

from abc import abstractmethod
from collections.abc import Sequence

from value_aware_attention.approximations.fixed_pattern import FixedPattern, SparseFixedPattern
from value_aware_attention.approximations.patterns import (
    Pattern,
    first_keys,
    global_positions,
    past,
    random_keys,
    shifted_window,
    window,
)
from value_aware_attention.arguments import check_at_least, check_integers, check_seed


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


class _WindowAndGlobal(FixedPattern):
    """Attends to a window of `window` keys and to `global_positions`, visible to every query."""

    def __init__(self, window: int, global_positions: Sequence[int]) -> None:
        super().__init__()
        self.window = check_at_least(1, window=window)
        positions = check_integers(global_positions=global_positions)
        self.global_positions = tuple(
            sorted({check_at_least(0, **{"global position": p}) for p in positions})
        )

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        if self.global_positions and self.global_positions[-1] >= keys:
            raise ValueError(
                f"global position is {self.global_positions[-1]}; {keys} keys allow 0 to {keys - 1}"
            )
        left = self.window - 1 if is_causal else self.window // 2
        near = self.near(left, self.window - 1 - left, keys, is_causal)
        pattern = near | global_positions(self.global_positions)
        return pattern & past() if is_causal else pattern

    @abstractmethod
    def near(self, left: int, right: int, keys: int, is_causal: bool) -> Pattern:
        """Returns the window, `left` and `right` keys next to the query, and any additions."""


class Longformer(_WindowAndGlobal):
    """Attends to a dilated window and global positions (Beltagy et al., 2020, section 3.1).

    The window has `window` keys, `dilation` apart: window // 2 to the left of the token, itself,
    the rest to its right; cut off at the edges. The paper's W is window - 1. Causal: the token and
    the window - 1 keys before it, and pairs of global positions with the past. Global positions
    attend to every key and every query attends to them, with the same projections. For windows that
    grow with depth, pass a callable layer -> module to `replace_attention`.
    """

    def __init__(
        self, window: int, dilation: int = 1, global_positions: Sequence[int] = ()
    ) -> None:
        super().__init__(window, global_positions)
        self.dilation = check_at_least(1, dilation=dilation)

    def near(self, left: int, right: int, keys: int, is_causal: bool) -> Pattern:
        return window(left, right, self.dilation)


class BigBird(_WindowAndGlobal):
    """Attends to a window, random keys and global positions (Zaheer et al., 2020, section 2).

    The pattern consists of single tokens, not of the paper's blocks of 64. The window has `window`
    keys: window // 2 to the left of the token, itself, the rest to its right, cut off at the edges.
    Each query gets `random` keys, drawn as in `RandomKeys`. `global_positions` see and are seen by
    every position. Causal: the token and the window - 1 keys before it, random keys from its past,
    and pairs of global positions with the past.
    """

    def __init__(
        self, window: int, random: int, global_positions: Sequence[int], seed: int
    ) -> None:
        super().__init__(window, global_positions)
        self.random = check_at_least(1, random=random)
        self.seed = check_seed(seed)

    def near(self, left: int, right: int, keys: int, is_causal: bool) -> Pattern:
        return window(left, right) | random_keys(self.random, self.seed, keys, is_causal)
