"""How far an approximate output is from the exact one, and what a method costs."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.attention import working_precision

__all__ = ["Sizes", "budget", "relative_output_error", "squared_output_error"]


def squared_output_error(
    approximate: Float[Tensor, "*batch V"], exact: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """Computes ||o - o~||^2 per query, the objective of section 3."""
    difference = working_precision(exact) - working_precision(approximate)
    return difference.square().sum(dim=-1)


def relative_output_error(
    approximate: Float[Tensor, "*batch V"], exact: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """Computes ||o - o~||^2 / ||o||^2 per query; 0 where both are zero.

    Infinite where only o is zero; NaN where an output holds NaN, which is never taken for exact.

    The reports pool queries as a ratio of sums, not as the mean of these ratios, which queries with
    a short output would decide.
    """
    error = squared_output_error(approximate, exact)
    norm = working_precision(exact).square().sum(dim=-1)
    return (error / norm).masked_fill((error == 0) & (norm == 0), 0.0)


@dataclass(frozen=True)
class Sizes:
    """Holds what the cost of an attention call depends on."""

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
        """Counts the keys that a query with a budget of r reads on average: at most those seen."""
        if not self.is_causal:
            return float(min(r, self.keys))
        first = self.keys - self.queries + 1  # what the first query sees
        return sum(min(r, seen) for seen in range(first, self.keys + 1)) / self.queries


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

    The one definition of cost that figures use, and of the algorithm: what this code computes
    besides for the sake of speed is left out (the pairs of a chunk that causal features score, the
    keys of a block that a pattern hides). The choice an oracle makes in hindsight (sorting by
    exact weights, solving for the closest combination) is not counted: it is what a practical
    method would have to predict. Under a causal mask only the past is counted.
    """
    sizes = Sizes(queries, keys, head_dim, value_dim, is_causal)
    return approximation.multiply_adds(sizes)  # type: ignore[operator]
