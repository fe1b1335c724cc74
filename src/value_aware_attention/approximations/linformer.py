"""Computes Linformer's attention to a few linear combinations of the keys."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.arguments import check_at_least, check_seed
from value_aware_attention.attention import attention_over
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes

POSITIONS_AT_ONCE = 64
"""Positions drawn together, so that a longer sequence extends the projection of a shorter one."""


class Linformer(Approximation):
    """Attends to `rank` projected keys E k and values F v (Wang et al., 2020, Eq. 7).

    Untrained, E = F = R with independent N(0, 1 / rank) entries drawn from the seed. R is a
    Johnson-Lindenstrauss projection along the sequence (the proof of Theorem 2 also projects keys
    and values by one matrix, up to a constant). With `length`, E and F are trainable parameters for
    that many positions, initialised to R. Shorter sequences use their first positions; longer ones
    raise ValueError. The cost is O(L rank). Projected keys mix all positions, so there is no causal
    form. Hidden keys are left out of the projection. `rank` must not exceed the number of keys.
    """

    supports_causal = False
    needs_shared_keys = True

    def __init__(self, rank: int, seed: int, length: int | None = None) -> None:
        super().__init__()
        self.rank = check_at_least(1, rank=rank)
        self.seed = check_seed(seed)
        self.length = None if length is None else check_at_least(rank, length=length)
        self.key_projection: nn.Parameter | None = None
        self.value_projection: nn.Parameter | None = None
        self._drawn = torch.empty(rank, 0)  # R of the longest sequence so far
        if length is not None:
            self.key_projection = nn.Parameter(self.draw(length).clone())
            self.value_projection = nn.Parameter(self.draw(length).clone())

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        if self.rank > call.keys:
            raise ValueError(f"rank is {self.rank}; it must be at most the {call.keys} keys given")
        if self.length is not None and call.keys > self.length:
            raise ValueError(f"there are {call.keys} keys; the trained length is {self.length}")
        key, value = call.key, call.value
        if call.visible is not None:
            visible = call.visible.transpose(-2, -1)
            key, value = key.where(visible, 0.0), value.where(visible, 0.0)
        for_key, for_value = (x.to(key) for x in self.projections(call.keys, key.device))
        return attention_over(call.query, for_key @ key, for_value @ value, call.kernel, None)

    def projections(
        self, keys: int, device: torch.device | str = "cpu"
    ) -> tuple[Float[Tensor, "R M"], Float[Tensor, "R M"]]:
        """Returns E and F for a sequence of this many keys."""
        if self.key_projection is None or self.value_projection is None:
            drawn = self.draw(keys, device)
            return drawn, drawn
        return self.key_projection[:, :keys], self.value_projection[:, :keys]

    @torch.inference_mode(False)  # R drawn in an evaluation may be used in training later
    def draw(self, keys: int, device: torch.device | str = "cpu") -> Float[Tensor, "R M"]:
        """Draws R on the CPU; an entry depends on the seed and its position, not on the length."""
        if self._drawn.shape[1] < keys:
            generator = torch.Generator().manual_seed(self.seed)
            shape = (POSITIONS_AT_ONCE, self.rank)
            columns = [
                torch.randn(shape, generator=generator).T for _ in range(0, keys, POSITIONS_AT_ONCE)
            ]
            self._drawn = torch.cat(columns, dim=1) / self.rank**0.5
        self._drawn = self._drawn.to(device)
        return self._drawn[:, :keys]

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts scores and weighted sum of `rank` projected keys, and a query's share of
        projecting the keys."""
        return self.rank * sizes.one_key * (1 + sizes.keys / sizes.queries)
