"""Some queries of a layer's recorded call, and exact attention's output for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from value_aware_attention.approximations import SparseApproximation
from value_aware_attention.call import Call
from value_aware_attention.error import squared_output_error
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.tasks import LayerCall, evenly_spaced

__all__ = ["ExactRows", "SampledRows", "answers_alone", "error_rows", "rows_at", "sample_rows"]

QUERIES = 64
"""Of each head and unit; fewer where a unit has fewer."""


@dataclass(frozen=True)
class SampledRows:
    """Some queries of a layer against all their keys, heads apart."""

    query: Float[Tensor, "B H N D"]
    key: Float[Tensor, "B H M D"]
    value: Float[Tensor, "B H M V"]
    kernel: Kernel
    visible: Bool[Tensor, "B H N M"] | None
    position: Int[Tensor, "B H N"]
    """Their places among the queries of the call."""

    @property
    def count(self) -> int:
        """Rows in all, over batch and heads."""
        return math.prod(self.query.shape[:-1])

    def weights(self) -> Float[Tensor, "B H N M"]:
        """Their attention distributions alpha."""
        return self.call().weights

    def call(self) -> Call:
        """The rows as one attention call, which can be taken in blocks."""
        tensors = self.query, self.key, self.value
        return Call.of(*tensors, kernel=self.kernel, attn_mask=self.visible)

    def given_to(self, method: Callable[..., Any]) -> Any:
        """What a method's `select` or `path` answers for these rows."""
        inputs = (self.query, self.key, self.value)
        return method(*inputs, kernel=self.kernel, attn_mask=self.visible)

    def of(self, every: Float[Tensor, "B H L V"]) -> Float[Tensor, "B H N V"]:
        """These rows of what a method gives for all queries of the call."""
        return every.gather(2, self.position[..., None].expand(-1, -1, -1, every.shape[-1]))


def sample_rows(call: LayerCall, rows: int, *, dtype: torch.dtype = torch.float64) -> SampledRows:
    """At least `rows` queries, if there are as many, from `first_row` on and evenly spaced.

    Every head of every unit gives equally many; the heads take turns, so that together they cover
    more positions than one of them. What the call masks becomes an explicit mask of the rows taken.
    """
    batch, heads, queries = call.query.shape[:-1]
    groups, available = batch * heads, queries - call.first_row
    per_head = min(math.ceil(rows / groups), available)
    spaced = torch.tensor(evenly_spaced(groups * available, groups * per_head)) // groups
    # row i of head h is number i * groups + h of the evenly spaced ones
    position = call.first_row + spaced.view(per_head, batch, heads).permute(1, 2, 0)
    return rows_at(call, position.to(call.query.device), dtype=dtype)


def rows_at(call: LayerCall, position: Int[Tensor, "B H N"], *, dtype: torch.dtype) -> SampledRows:
    """The queries at `position`."""
    query = call.query.gather(2, position[..., None].expand(-1, -1, -1, call.query.shape[-1]))
    key, value = call.key.to(dtype), call.value.to(dtype)
    visible = _visible(call, position)
    return SampledRows(query.to(dtype), key, value, call.kernel, visible, position)


def _visible(call: LayerCall, position: Int[Tensor, "B H N"]) -> Bool[Tensor, "B H N M"] | None:
    """The keys that the queries at `position` see; None = all."""
    (batch, heads, queries), keys = call.query.shape[:-1], call.key.shape[-2]
    visible = None
    if call.is_causal:
        visible = torch.arange(keys, device=position.device) <= position[..., None]
    if call.attn_mask is not None:
        mask = call.attn_mask.expand(batch, heads, queries, keys)
        rows = mask.gather(2, position[..., None].expand(-1, -1, -1, keys))
        visible = rows if visible is None else visible & rows
    return visible


def error_rows(call: LayerCall, *, dtype: torch.dtype | None = None) -> SampledRows:
    """`QUERIES` of each head and unit: those that errors and skewness are measured on.

    `dtype` None = that of the call.
    """
    rows = QUERIES * math.prod(call.query.shape[:2])
    return sample_rows(call, rows, dtype=dtype or call.query.dtype)


def answers_alone(method: nn.Module) -> bool:
    """Whether what a method gives a query depends on no other query, nor on its place."""
    return isinstance(method, SparseApproximation) and method.queries_alone


@dataclass(frozen=True)
class ExactRows:
    """What the errors of every method in one layer are measured on and against, made once."""

    call: LayerCall
    rows: SampledRows
    """In the dtype of the call: a method errs as it does in the model."""
    output: Float[Tensor, "B H N V"]
    """Exact attention's, in fp64."""

    @classmethod
    def of(cls, call: LayerCall) -> "ExactRows":
        """From a layer's recorded call."""
        exact = error_rows(call, dtype=torch.float64)
        return cls(call, error_rows(call), exact.call().output())

    def squared_norm(self) -> Float[Tensor, " B"]:
        """||o||^2, summed over the heads and rows of each unit."""
        return self.output.square().sum(dim=(1, 2, 3))

    def squared_error(self, method: nn.Module) -> Float[Tensor, " B"]:
        """||o - o~||^2 of a method, summed over the heads and rows of each unit."""
        return squared_output_error(self._approximated(method), self.output).sum(dim=(1, 2))

    def _approximated(self, method: nn.Module) -> Float[Tensor, "B H N V"]:
        """A method that answers each query alone gets these rows only."""
        if answers_alone(method):
            output: Tensor = self.rows.given_to(method)
            return output
        call = self.call
        options: dict[str, Any] = {"kernel": call.kernel, "is_causal": call.is_causal}
        if call.attn_mask is not None:
            options["attn_mask"] = call.attn_mask
        return self.rows.of(method(call.query, call.key, call.value, **options))
