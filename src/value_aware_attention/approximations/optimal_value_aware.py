"""optimal-v-aware-r: the closest convex combination of at most r values to the exact output."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import Inputs, SparseApproximation
from value_aware_attention.approximations.caratheodory import caratheodory

__all__ = ["OptimalValueAware"]

SEARCHES = ("fast", "default", "best")


class OptimalValueAware(SparseApproximation):
    """argmin over C_r of ||o - o~||^2 (section 3), where the paper solves it.

    r = 1: every value is tried, Eq. 3. r >= value_dim + 1: the exact output itself, written with at
    most value_dim + 1 keys by Carathéodory's theorem. Both are proved optimal. Another r raises
    ValueError. `search` names the effort spent between the two and changes nothing at either end.
    """

    solves_for_weights = True

    def __init__(self, r: int, search: str = "default") -> None:
        super().__init__(r)
        if search not in SEARCHES:
            raise ValueError(f"search is {search!r}; it must be one of {', '.join(SEARCHES)}")
        self.search = search

    def choose(
        self, inputs: Inputs
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        if self.r == 1:
            return self._closest_value(inputs)
        enough = inputs.value.shape[-1] + 1
        if self.r < enough:
            raise ValueError(
                f"r is {self.r}; with values of {enough - 1} numbers it must be 1 or at least "
                f"{enough} (value_dim + 1)"
            )
        return self._combination(inputs)

    def _closest_value(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Eq. 3: argmin_i ||v_i||^2 - 2 <v_i, o>, over the values the query may see."""
        # Centring on the mean value changes no distance and keeps digits when values are far away.
        value = inputs.value - inputs.value.mean(dim=-2, keepdim=True)
        weights = inputs.weights()
        output = weights @ value
        distance = value.square().sum(-1)[..., None, :] - 2 * output @ value.transpose(-2, -1)
        if inputs.visible is not None:
            distance = distance.masked_fill(~inputs.visible, torch.inf)
        indices = distance.argmin(dim=-1, keepdim=True)
        sees_any = weights.sum(dim=-1, keepdim=True) > 0
        return indices, sees_any.to(weights.dtype)

    def _combination(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        weights = inputs.weights()
        batch, (queries, keys) = weights.shape[:-2], weights.shape[-2:]
        value = inputs.value.expand(*batch, keys, -1).reshape(-1, keys, inputs.value.shape[-1])
        heads = weights.reshape(-1, queries, keys)
        slots = min(self.r, keys)
        indices = torch.zeros(len(heads), queries, slots, dtype=torch.int64, device=weights.device)
        kept = weights.new_zeros(len(heads), queries, slots)
        for head, (head_weights, head_value) in enumerate(zip(heads, value, strict=True)):
            chosen, mass = caratheodory(head_weights, head_value)
            indices[head, :, : chosen.shape[-1]] = chosen
            kept[head, :, : mass.shape[-1]] = mass
        return indices.reshape(*batch, queries, slots), kept.reshape(*batch, queries, slots)

    def proved_optimal(self, inputs: Inputs, weights: Tensor) -> Bool[Tensor, "*batch N"]:
        return torch.ones(weights.shape[:-1], dtype=torch.bool, device=weights.device)

    def extra_repr(self) -> str:
        return f"r={self.r}, search={self.search!r}"
