"""Computes Longformer's attention: a window, and a few positions that see and are seen by all."""

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
    window,
)
from value_aware_attention.arguments import check_at_least


class Longformer(FixedPattern):
    """Attends to a dilated window and global positions (Beltagy et al., 2020, section 3.1).

    The window is of `window` keys, each `dilation` from the next: window // 2 to the left of the
    token, itself, the rest to its right; cut off at the edges. The paper's W is window - 1. Causal:
    the token and the window - 1 keys before it, and the past of and among the global positions.
    Global positions attend to every key and every query attends to them, with the same projections.
    Windows that grow with depth: pass a callable layer -> module to `replace_attention`.
    """

    def __init__(
        self,
        window: int,
        dilation: int = 1,
        global_positions: Sequence[int] = (),
        engine: str | None = None,
    ) -> None:
        super().__init__(engine)
        self.window = check_at_least(1, window=window)
        self.dilation = check_at_least(1, dilation=dilation)
        self.global_positions = check_positions(global_positions)

    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        check_positions_exist(self.global_positions, keys)
        left = self.window - 1 if is_causal else self.window // 2
        near = window(left, self.window - 1 - left, self.dilation)
        pattern = near | global_positions(self.global_positions)
        return pattern & past() if is_causal else pattern
