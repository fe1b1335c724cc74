"""Computes states of kernel attention over some of the keys, and merges them.

Attention over all keys is the merge of its states over disjoint parts of them, in any order: online
softmax (Milakov & Gimelshein, 2018), as FlashAttention and FlashInfer compute it. A state is not
normalised, so that features whose similarities may be negative have one too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Holds sum_j kappa_j v_j and sum_j kappa_j of each query, both divided by exp(log_scale)."""

    values: Float[Tensor, "*#batch N V"]
    total: Float[Tensor, "*#batch N 1"]
    log_scale: Float[Tensor, "*#batch #N 1"]
    """The largest log-similarity; -inf: no key was seen."""

    def merge(self, other: "AttentionState") -> "AttentionState":
        """Returns the state over the keys of both."""
        log_scale = torch.maximum(self.log_scale, other.log_scale)
        mine, others = ((part.log_scale - finite(log_scale)).exp() for part in (self, other))
        return AttentionState(
            mine * self.values + others * other.values,
            mine * self.total + others * other.total,
            log_scale,
        )

    def rearranged(self, function: Callable[[Tensor], Tensor]) -> "AttentionState":
        """Moves the queries of the state to other places, by a `function` of each tensor."""
        return AttentionState(*map(function, (self.values, self.total, self.log_scale)))

    def output(self, smallest_total: float = 0.0) -> Float[Tensor, "*batch N V"]:
        """Returns the weighted mean of the values, zeros where no key was seen.

        The total may be negative; its magnitude is taken as at least `smallest_total`.
        """
        size = self.total.abs().clamp_min(smallest_total)
        total = size.where(size > 0, 1.0)
        return self.values / total.where(self.total >= 0, -total)


def attention_state(
    scores: Float[Tensor, "*#batch N M"],
    value: Float[Tensor, "*#batch M V"],
    visible: Bool[Tensor, "*#batch #N M"] | None = None,
    factor: Float[Tensor, "*#batch N M"] | None = None,
) -> AttentionState:
    """Computes the state over the visible keys (None = all), kappa = factor exp(score)."""
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    log_scale = scores.detach().amax(dim=-1, keepdim=True)
    weights = (scores - finite(log_scale)).exp()
    weights = weights if factor is None else weights * factor
    return AttentionState(weights @ value, weights.sum(dim=-1, keepdim=True), log_scale)


def finite(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Replaces -inf, the logarithm of 0, by 0."""
    return x.where(x > -torch.inf, 0.0)
