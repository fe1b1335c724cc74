"""Measures the error of an approximate output, and counts the cost of a method."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.arguments import check_tensors
from value_aware_attention.attention import promoted, working_precision


def squared_output_error(
    approximate: Float[Tensor, "*batch V"], exact: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """Computes ||o - o~||^2 per query, the objective of section 3."""
    return (working_precision(exact) - working_precision(approximate)).square().sum(dim=-1)


def relative_output_error(
    approximate: Float[Tensor, "*batch V"], exact: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """Computes ||o - o~||^2 / ||o||^2 per query, for outputs of any size; 0 where both are zero.

    It is infinite where only o is zero, and NaN where an output holds NaN, so NaN never counts as
    exact. Raises ValueError unless both are floating-point tensors of one shape.

    The reports pool queries as a ratio of sums. Queries with a short output would dominate the mean
    of these ratios.
    """
    check_tensors(approximate=approximate, exact=exact)
    if approximate.shape != exact.shape or exact.shape[-1:] in ((), (0,)):
        raise ValueError(
            f"approximate {tuple(approximate.shape)}, exact {tuple(exact.shape)}: both must have "
            f"one shape, (..., value_dim >= 1)"
        )
    exact, approximate = map(working_precision, promoted(exact, approximate))
    largest = torch.maximum(exact.abs().amax(-1), approximate.abs().amax(-1))[..., None]
    overflows = largest > torch.finfo(exact.dtype).max / 4  # a difference may overflow
    exact, approximate = (x.where(~overflows, x / 4) for x in (exact, approximate))
    difference = exact - approximate
    # Each vector is divided by its own power of two: no square over- or underflows, nothing is
    # rounded.
    of_error, of_norm = (power_of_two(x.abs().amax(-1)) for x in (difference, exact))
    error = (difference / of_error[..., None]).square().sum(dim=-1)
    norm = (exact / of_norm[..., None]).square().sum(dim=-1)
    larger = of_error / of_norm
    return (error / norm * larger * larger).masked_fill((error == 0) & (norm == 0), 0.0)


@torch.no_grad()
def typical_unit(value: Float[Tensor, "*batch M V"]) -> Float[Tensor, "*batch 1 1"]:
    """Returns the power of two above the median of max |v_i| over the nonzero values.

    In this unit, squares of values neither over- nor underflow. The median is robust: a distant
    value does not change the unit of the others.
    """
    sizes = value.abs().amax(dim=-1, keepdim=True)
    sizes = sizes.masked_fill(sizes == 0, torch.nan)
    return power_of_two(sizes.nanmedian(dim=-2, keepdim=True).values)


@torch.no_grad()
def power_of_two(sizes: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the power of two just above each size (1 for size 0); dividing by it rounds nothing.

    It is clamped so that its inverse is a normal number too.
    """
    precision = torch.finfo(sizes.dtype)
    sizes = sizes.where(sizes > 0, 1.0).clamp(4 * precision.tiny, precision.max / 4)
    mantissa, _ = sizes.frexp()
    return sizes / mantissa


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes on which the cost of an attention call depends."""

    queries: int
    keys: int
    head_dim: int
    value_dim: int
    is_causal: bool = False

    @property
    def one_key(self) -> int:
        """Counts multiply-adds of attending to one key: its score and its weighted value."""
        return self.head_dim + self.value_dim

    def kept(self, r: int) -> float:
        """Counts the keys that a query reads on average: r, or all visible keys if fewer."""
        if not self.is_causal:
            return float(min(r, self.keys))
        first = self.keys - self.queries + 1  # what the first query sees
        return sum(min(r, past) for past in range(first, self.keys + 1)) / self.queries


def budget(
    approximation: nn.Module,
    *,
    queries: int,
    keys: int,
    head_dim: int,
    value_dim: int,
    is_causal: bool = False,
) -> float:
    """Counts multiply-adds per query of an approximation's scores and weighted sum, on average.

    All figures use this cost. It is the cost of the algorithm. Extra work that this code does for
    speed is not counted (the pairs of a chunk that causal features score, the keys of a block that
    a pattern hides). An oracle's choice in hindsight (sorting by exact weights, solving for the
    closest combination) is not counted either, because a practical method would have to predict it.
    Under a causal mask the queries are the last positions and only past keys count; more queries
    than keys raise ValueError.
    """
    if is_causal and queries > keys:
        raise ValueError(
            f"queries is {queries} and keys is {keys}; under a causal mask queries are the last "
            f"positions, so there are at most as many as keys"
        )
    return approximation.multiply_adds(  # type: ignore[operator]
        Sizes(queries, keys, head_dim, value_dim, is_causal)
    )
