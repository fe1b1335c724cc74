"""Computes BigBird's attention, to a window, random keys and global positions."""

from collections.abc import Sequence

from value_aware_attention.approximations.fixed_pattern import (
    FixedPattern,
    check_positions,
    check_positions_exist,
)
from value_aware_attention.approximations.patterns import (
    Pattern,
    global_positions,
    past,
    random_keys,
    window,
)
from value_aware_attention.arguments import check_at_least, check_seed


class BigBird(FixedPattern):
    """Attends to a window, random keys and global positions (Zaheer et al., 2020, section 2).

    The pattern is of single tokens, without their blocks of 64. The window is of `window` keys:
    window // 2 to the left of the token, itself, the rest to its right, cut off at the edges;
    `random` keys per query, drawn as in `RandomKeys`; `global_positions` see and are seen by every
    position. Causal: the token and the window - 1 keys before it, random keys from its past, and
    the past of the rest.
    """

    def __init__(
        self, window: int, random: int, global_positions: Sequence[int], seed: int
    ) -> None:
        super().__init__(engine="torch")
        self.window = check_at_least(1, window=window)
        self.random = check_at_least(1, random=random)
        self.global_positions = check_positions(global_positions)
        self.seed = check_seed(seed)

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        check_positions_exist(self.global_positions, keys)
        left = self.window - 1 if is_causal else self.window // 2
        near = window(left, self.window - 1 - left)
        chosen = random_keys(self.random, self.seed, keys, is_causal)
        pattern = near | chosen | global_positions(self.global_positions)
        return pattern & past() if is_causal else pattern
