"""Holds the queries that judge a choice of keys, for the heads of one key-value head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import vector_norm

from value_aware_attention.attention import (
    AttentionState,
    attention_state,
    finite,
    working_precision,
)
from value_aware_attention.caches.kept import KeptKeys, kept_state
from value_aware_attention.caches.ways import (
    Choice,
    causal,
    continued,
    hindsight,
    last,
    noncausal,
    repeat,
)
from value_aware_attention.call import Arguments, Rotary
from value_aware_attention.kernels import Kernel


@dataclass(frozen=True)
class Observed:
    """Holds the queries that judge a choice of keys, and the keys to choose from.

    The G query heads of a group share the keys of one key-value head; W queries of each are
    observed. All derived tensors are in at least fp32.

    Attributes:
        visible: The visible pairs; None = all.
        protected: Positions of keys that must be kept and count towards r; repeats are allowed.
        projection: The layer's output projection W_o of each head, if known.
        rotary: Rotates queries to later positions, if the model has rotary positions.
        positions: The positions of the queries; `rotary` shifts from there.
        start: Position of the first future query; None = the number of keys.
        available: False for padding, which is never kept; None = all keys are available.
        beside: State (G, W) of each query over further keys, which it sees in any case.
    """

    query: Float[Tensor, "*batch G W D"]
    key: Float[Tensor, "*batch M D"]
    value: Float[Tensor, "*batch M V"]
    kernel: Kernel
    visible: Bool[Tensor, "*#batch #G #W M"] | None = None
    protected: Int[Tensor, "*#batch P"] | None = None
    projection: Float[Tensor, "*#batch G V E"] | None = None
    rotary: Rotary | None = None
    positions: Int[Tensor, " W"] | None = None
    start: int | None = None
    available: Bool[Tensor, "*#batch M"] | None = None
    beside: AttentionState | None = None

    def cache(self, place: tuple[int, ...]) -> "Observed":
        """Returns the queries and keys of a single cache, without leading dimensions."""

        def at(x: Tensor | None, *shape: int) -> Tensor | None:
            return None if x is None else x.expand(*shape)[place]

        beside = self.beside
        return replace(
            self,
            query=self.query[place],
            key=self.key[place],
            value=self.value[place],
            visible=at(self.visible, *self.query.shape[:-1], self.keys),
            protected=at(self.protected, *self.batch, -1),
            projection=at(self.projection, *self.batch, -1, -1, -1),
            available=at(self.available, *self.batch, -1),
            beside=None if beside is None else beside.rearranged(lambda x: x[place]),
        )

    def take(self, rows: slice) -> "Observed":
        """Returns some of the queries, and all keys."""
        visible, beside = self.visible, self.beside
        if visible is not None and visible.shape[-2] > 1:
            visible = visible[..., rows, :]
        return replace(
            self,
            query=self.query[..., rows, :].clone(),  # a view would keep all queries in memory
            visible=visible,
            positions=None if self.positions is None else self.positions[rows],
            beside=None if beside is None else beside.rearranged(lambda x: x[..., rows, :].clone()),
        )

    @property
    def keys(self) -> int:
        """Returns the number of keys M."""
        return self.key.shape[-2]

    @property
    def batch(self) -> torch.Size:
        """Returns the leading dimensions; each entry keeps one set of keys."""
        return self.key.shape[:-2]

    @cached_property
    def log_mass_beside(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of the unnormalised mass in `beside`; -inf = none."""
        if self.beside is None:
            return torch.full_like(working_precision(self.query)[..., :1], -torch.inf)
        return self.beside.total.log() + self.beside.log_scale

    @cached_property
    def log_similarity(self) -> Float[Tensor, "*batch G W M"]:
        """Computes log kappa of every pair; -inf for hidden pairs."""
        query, key = working_precision(self.query), working_precision(self.key)
        scores = self.kernel.log_similarity(query, key[..., None, :, :])
        return scores if self.visible is None else scores.masked_fill(~self.visible, -torch.inf)

    @cached_property
    def log_total(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of the mass over the keys and `beside`; 0 where nothing is visible."""
        among_keys = self.log_similarity.logsumexp(dim=-1, keepdim=True)
        return finite(torch.logaddexp(among_keys, self.log_mass_beside))

    @property
    def log_beside(self) -> Float[Tensor, "*batch G W 1"]:
        """Computes the log of each query's weight on `beside`; -inf = none."""
        return self.log_mass_beside - self.log_total

    @property
    def log_weights(self) -> Float[Tensor, "*batch G W M"]:
        """Computes log alpha, normalised over the keys and `beside`."""
        return self.log_similarity - self.log_total

    @cached_property
    def weights(self) -> Float[Tensor, "*batch G W M"]:
        """Computes alpha; zeros in a row that sees nothing."""
        return self.log_weights.exp()

    @cached_property
    def output(self) -> Float[Tensor, "*batch G W V"]:
        """Computes the exact output o over the keys and `beside`."""
        return self._with_beside(
            attention_state(self.log_similarity, self._value[..., None, :, :])
        ).output()

    def squared_layer_output(
        self, output: Float[Tensor, "*batch G W V"] | None = None
    ) -> Float[Tensor, " B"]:
        """Computes sum_i ||sum_h W_o,h o_hi||^2 per text (first dimension); 1 where it is 0.

        The heads h are the other leading dimensions. `output` is the exact output, if already
        computed. If W_o is unknown, returns the sum over heads of ||o_hi||^2.
        """
        output = self.output if output is None else output
        if self.projection is not None:  # for all heads at once
            projection, rows = working_precision(self.projection), output.movedim(-2, 1).flatten(2)
            is_shared = projection.shape[:-1].numel() == rows.shape[-1]  # shared by all texts
            by_text = projection if is_shared else projection.expand(*output.shape[:-2], -1, -1)
            output = rows @ by_text.flatten(0 if is_shared else 1, -2)
        norm = vector_norm(output.flatten(1), dim=-1, dtype=torch.float64).square()
        return norm.masked_fill(norm == 0, 1.0)

    def error(self, choice: KeptKeys) -> Float[Tensor, " *batch"]:
        """Computes the cost of a choice: sum ||o - o~||^2 over the group's queries."""
        state = kept_state(
            working_precision(self.query), working_precision(self.key), self._value,
            self.kernel, self.visible, choice,
        )  # fmt: skip
        return (self.output - self._with_beside(state).output()).square().sum(dim=(-3, -2, -1))

    @property
    def _value(self) -> Float[Tensor, "*batch M V"]:
        return working_precision(self.value)

    def _with_beside(self, state: AttentionState) -> AttentionState:
        return state if self.beside is None else state.merge(self.beside)


OBSERVED: Mapping[str, Callable[[Choice], Arguments]] = {
    way.__name__: way for way in (last, causal, noncausal, continued, repeat, hindsight)
}
"""Fields of `Observed` by name: query (*own, G, W, D), visible, positions and beside."""
