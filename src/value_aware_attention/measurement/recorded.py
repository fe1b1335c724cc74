"""Takes the exact outputs of recorded attention calls, for comparison with methods."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from value_aware_attention.approximations import Approximation
from value_aware_attention.call import Call
from value_aware_attention.error import squared_output_error
from value_aware_attention.hugging_face.attending import exact

QUERIES = 64
"""Most queries per head and unit for measuring errors and skewness"""


def evenly_spaced(available: int, count: int | None) -> list[int]:
    """Returns at most `count` different indices spread over range(available); None = all."""
    count = available if count is None else min(count, available)
    return [index * available // count for index in range(count)]


def sample_rows(call: Call, rows: int, *, dtype: torch.dtype | None = torch.float64) -> Call:
    """Takes `rows` queries or slightly more, if available, evenly spaced from `first_row` on.

    Every head of every unit has the same number. The heads take turns, so that together they cover
    more positions than one alone. `dtype` None keeps the precision of the call.
    """
    batch, heads, queries = call.query.shape[:-1]
    groups, available = batch * heads, queries - call.first_row
    per_head = min(math.ceil(rows / groups), available)
    spaced = torch.tensor(evenly_spaced(groups * available, groups * per_head)) // groups
    # row i of head h is number i * groups + h of the evenly spaced ones
    position = call.first_row + spaced.view(per_head, batch, heads).permute(1, 2, 0)
    return call.at(position.to(call.query.device), dtype)


def error_rows(call: Call, *, dtype: torch.dtype | None = None) -> Call:
    """Takes the queries for measuring errors and skewness, `QUERIES` per head and unit."""
    return sample_rows(call, QUERIES * math.prod(call.query.shape[:2]), dtype=dtype)


def answers_alone(method: nn.Module) -> bool:
    """Returns whether a method's output for a query is independent of its place and of others."""
    return isinstance(method, Approximation) and method.queries_alone


@dataclass(frozen=True)
class ExactRows:
    """Exact outputs of some queries of a recorded call, for measuring methods.

    Attributes:
        rows: Those queries in the call's precision, so that a method errs as it does in the model.
        by_head: True: sums are separate per key-value head, not only per unit.
    """

    call: Call
    rows: Call
    output: Float[Tensor, "B H *G n V"]
    by_head: bool = False

    @classmethod
    def of(cls, call: Call) -> "ExactRows":
        """Takes `error_rows`, with exact outputs in fp64."""
        return cls(call, error_rows(call), error_rows(call, dtype=torch.float64).output())

    @classmethod
    def served(cls, call: Call, rows: Int[Tensor, " n"]) -> "ExactRows":
        """Takes queries `rows` of a call with shared keys, with the model's own outputs."""
        return cls(call, call.at(rows), exact(call)[..., rows, :], by_head=True)

    def squared_norm(self) -> Float[Tensor, "*sums"]:
        """Sums ||o||^2 over the rows of each unit, or key-value head."""
        return self._summed(self.output.double().square())

    def squared_error(self, output: Float[Tensor, "B H *G n V"]) -> Float[Tensor, "*sums"]:
        """Sums ||o - o~||^2 of a method's output over the rows of each unit, or key-value head."""
        return self._summed(squared_output_error(output, self.output).double())

    def direction(self, output: Float[Tensor, "B H *G n V"]) -> dict[str, float]:
        """Compares a method's output with the exact one, over all rows with o other than 0.

        `cosine` is the mean of <o, o~> / (||o|| ||o~||), `length` the root of mean ||o~||^2 / mean
        ||o||^2. NaN if all o are 0.
        """
        exact, ours = self.output.double(), output.double()
        rows = exact.any(dim=-1)
        return {
            "cosine": cosine_similarity(ours[rows], exact[rows], dim=-1).mean().item(),
            "length": (ours[rows].square().sum() / exact.square().sum()).sqrt().item(),
        }

    def _summed(self, numbers: Float[Tensor, "B H *rest"]) -> Float[Tensor, "*sums"]:
        return numbers.sum(dim=tuple(range(2 if self.by_head else 1, numbers.ndim)))

    def approximated(self, method: nn.Module) -> Float[Tensor, "B H *G n V"]:
        """Computes a method's output at these rows, and only there if it answers queries alone."""
        if answers_alone(method):
            return method(**self.rows.arguments())
        options = {"layer": self.call.layer} if getattr(method, "shares_keys", False) else {}
        output: Tensor = method(**self.call.arguments(), **options)
        return output.take_along_dim(
            self.rows.rows[..., None].expand(*output.shape[:-2], -1, -1), dim=-2
        )
