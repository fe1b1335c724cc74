"""Holds the keys that a cache keeps, and computes attention over them."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention.attention import AttentionState, attention_state
from value_aware_attention.kernels import Kernel


@dataclass(frozen=True)
class KeptKeys:
    """Holds the R slots that a cache keeps for all later queries.

    Attributes:
        indices: Keys, ascending and each in range; an unused slot has log-weight -inf.
        log_weight: Added to log kappa of its key: 0 = unchanged, log 2 = counted twice, -inf =
            unused.
        value: Replaces the values of these keys; None = original values.
        sizes: Number of used slots of each cache, all with log-weight 0, if the host knows it; None
            = a device has to be asked. `dataclasses.replace` forgets it.
    """

    indices: Int[Tensor, "*batch R"]
    log_weight: Float[Tensor, "*batch R"]
    value: Float[Tensor, "*batch R V"] | None = None
    sizes: list[int] | None = field(default=None, init=False)

    @property
    def positions(self) -> Int[Tensor, "*batch R"]:
        """Returns the kept keys; -1 in an unused slot."""
        return self.indices.where(self.log_weight > -torch.inf, -1)

    def where(self, mine: Bool[Tensor, " B"], other: "KeptKeys") -> "KeptKeys":
        """Takes the slots of each text (first dimension) from one of two choices."""
        a, b = self.padded(other.indices.shape[-1]), other.padded(self.indices.shape[-1])
        is_mine = mine.to(a.indices.device).view(-1, *(1,) * (a.indices.ndim - 1))
        return KeptKeys(
            a.indices.where(is_mine, b.indices),
            a.log_weight.where(is_mine, b.log_weight),
            None
            if a.value is None or b.value is None
            else a.value.where(is_mine[..., None], b.value),
        )

    def padded(self, slots: int) -> "KeptKeys":
        """Pads to at least `slots` slots with unused copies of the last one."""
        more = max(0, slots - self.indices.shape[-1])
        value = None if self.value is None else pad(self.value, (0, 0, 0, more))
        last = self.indices[..., -1:].expand(*self.indices.shape[:-1], more)
        return KeptKeys(
            torch.cat([self.indices, last], dim=-1),
            pad(self.log_weight, (0, more), value=-torch.inf),
            value,
        )


def kept_state(
    query: Float[Tensor, "*batch #G W D"],
    key: Float[Tensor, "*batch M D"],
    value: Float[Tensor, "*batch M V"],
    kernel: Kernel,
    visible: Bool[Tensor, "*#batch #G #W M"] | None,
    choice: KeptKeys,
) -> AttentionState:
    """Computes the attention state of queries over the kept keys that they see."""
    at = choice.indices[..., None]
    taken = value.take_along_dim(at, dim=-2) if choice.value is None else choice.value
    scores = kernel.log_similarity(query, key.take_along_dim(at, dim=-2)[..., None, :, :])
    scores = scores + choice.log_weight[..., None, None, :].to(scores.dtype)
    if visible is not None:
        visible = visible.take_along_dim(choice.indices[..., None, None, :], dim=-1)
    return attention_state(scores, taken.to(scores.dtype)[..., None, :, :], visible)
