"""Input of a cache method, the observed queries and keys, and its output, the kept keys."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.attention import working_precision
from value_aware_attention.kernels import Kernel
from value_aware_attention.layer import Rotary
from value_aware_attention.partial import AttentionState, attention_state, finite

__all__ = ["KeptKeys", "Observed", "kept_state"]


@dataclass(frozen=True)
class KeptKeys:
    """Holds the R slots that one cache keeps for all queries after its choice."""

    indices: Int[Tensor, "*batch R"]
    """Keys, ascending and each in range; an unused slot has log-weight -inf."""
    log_weight: Float[Tensor, "*batch R"]
    """Added to log kappa of its key: 0 = as it was, log 2 = counted twice, -inf = unused."""
    value: Float[Tensor, "*batch R V"] | None = None
    """In the place of the values of these keys; None = the originals."""


@dataclass(frozen=True)
class Observed:
    """Holds the queries that a choice of keys is judged by, and the keys to choose from.

    The G query heads of a group share the keys of one key-value head; W queries of each are seen.
    Everything derived is in at least fp32.
    """

    query: Float[Tensor, "*batch G W D"]
    key: Float[Tensor, "*batch M D"]
    value: Float[Tensor, "*batch M V"]
    kernel: Kernel
    visible: Bool[Tensor, "*#batch #G #W M"] | None = None
    """The pairs that attend, None = all."""
    protected: Int[Tensor, "*#batch P"] | None = None
    """Positions of keys that must be kept, counted in r; one may be named twice."""
    projection: Float[Tensor, "*#batch G V E"] | None = None
    """The layer's output projection W_o of each head, where it is known."""
    rotary: Rotary | None = None
    """Turns queries to later positions, where the model rotates them."""
    positions: Int[Tensor, " W"] | None = None
    """The positions of the queries, which `rotary` counts from."""
    start: int | None = None
    """The position of the first query to come; None = as many as keys."""
    available: Bool[Tensor, "*#batch M"] | None = None
    """False: padding, which is never kept. None = every key."""
    beside: AttentionState | None = None
    """What each query attends to beside these keys and whatever is kept: its state (G, W)."""

    @property
    def keys(self) -> int:
        """Returns the number of keys M."""
        return self.key.shape[-2]

    @property
    def batch(self) -> torch.Size:
        """Returns the leading dimensions: one set of keys is kept for each."""
        return self.key.shape[:-2]

    @cached_property
    def log_mass_beside(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of the unnormalised mass beside the keys; -inf = none."""
        if self.beside is None:
            return self.log_similarity.new_full((*self.query.shape[:-1], 1), -torch.inf)
        return self.beside.total.log() + self.beside.log_scale

    @cached_property
    def log_similarity(self) -> Float[Tensor, "*batch G W M"]:
        """Computes log kappa of every pair, -inf where it does not attend."""
        query, key = working_precision(self.query), working_precision(self.key)
        scores = self.kernel.log_similarity(query, key[..., None, :, :])
        return scores if self.visible is None else scores.masked_fill(~self.visible, -torch.inf)

    @cached_property
    def log_total(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of the mass over the keys and beside them; 0 where nothing is seen."""
        own = self.log_similarity.logsumexp(dim=-1, keepdim=True)
        return finite(torch.logaddexp(own, self.log_mass_beside))

    @property
    def log_beside(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of the weight that each query has beside the keys; -inf = none."""
        return self.log_mass_beside - self.log_total

    @property
    def log_weights(self) -> Float[Tensor, "*batch G W M"]:
        """Computes log alpha, normalised over the keys and what is beside them."""
        return self.log_similarity - self.log_total

    @cached_property
    def weights(self) -> Float[Tensor, "*batch G W M"]:
        """Computes alpha; a row that sees nothing is zeros."""
        return self.log_weights.exp()

    @cached_property
    def output(self) -> Float[Tensor, "*batch G W V"]:
        """Computes the exact output o, with what is beside the keys."""
        return self._with_beside(
            attention_state(self.log_similarity, self._value[..., None, :, :])
        ).output()

    def error(self, kept: KeptKeys) -> Float[Tensor, " *batch"]:
        """Computes sum ||o - o~||^2 over the group's queries: what a choice costs them."""
        state = kept_state(
            working_precision(self.query), working_precision(self.key), self._value,
            self.kernel, self.visible, kept,
        )  # fmt: skip
        approximate = self._with_beside(state).output()
        return (self.output - approximate).square().sum(dim=(-3, -2, -1))

    @property
    def _value(self) -> Float[Tensor, "*batch M V"]:
        return working_precision(self.value)

    def _with_beside(self, state: AttentionState) -> AttentionState:
        return state if self.beside is None else state.merge(self.beside)


def kept_state(
    query: Float[Tensor, "*batch #G W D"],
    key: Float[Tensor, "*batch M D"],
    value: Float[Tensor, "*batch M V"],
    kernel: Kernel,
    visible: Bool[Tensor, "*#batch #G #W M"] | None,
    kept: KeptKeys,
) -> AttentionState:
    """Computes the attention state of queries over the kept keys that they see."""
    at = kept.indices[..., None]
    taken = value.take_along_dim(at, dim=-2) if kept.value is None else kept.value
    scores = kernel.log_similarity(query, key.take_along_dim(at, dim=-2)[..., None, :, :])
    scores = scores + kept.log_weight[..., None, None, :].to(scores.dtype)
    if visible is not None:
        visible = visible.take_along_dim(kept.indices[..., None, None, :], dim=-1)
    return attention_state(scores, taken.to(scores.dtype)[..., None, :, :], visible)
