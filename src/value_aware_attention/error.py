"""How far an approximate output is from the exact one, and what a method costs."""

from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.attention import working_precision

__all__ = ["budget", "relative_output_error", "squared_output_error"]


def squared_output_error(
    approximate: Float[Tensor, "*batch V"], exact: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """||o - o~||^2 per query, the objective of section 3."""
    difference = working_precision(exact) - working_precision(approximate)
    return difference.square().sum(dim=-1)


def relative_output_error(
    approximate: Float[Tensor, "*batch V"], exact: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch"]:
    """||o - o~||^2 / ||o||^2 per query; 0 where both are zero."""
    error = squared_output_error(approximate, exact)
    norm = working_precision(exact).square().sum(dim=-1)
    return (error / norm).where(error > 0, 0.0)


def budget(
    approximation: nn.Module, *, queries: int, keys: int, head_dim: int, value_dim: int
) -> float:
    """Multiply-adds per query of an approximation's scores and weighted sum.

    The one definition of cost that figures use. The choice an oracle makes in hindsight (sorting by
    exact weights, solving for the closest combination) is not counted: it is what a practical
    method would have to predict.
    """
    return approximation.multiply_adds(  # type: ignore[operator]
        queries=queries, keys=keys, head_dim=head_dim, value_dim=value_dim
    )
