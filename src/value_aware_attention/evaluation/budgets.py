"""Methods of equal cost: the parameter with which each comes closest to a number of keys."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from value_aware_attention.error import budget

__all__ = ["Affordable", "closest_to_budget", "cost_in_keys"]


class Affordable(NamedTuple):
    """A parameter and what the method then costs."""

    parameter: int
    cost: float
    """In keys a query: multiply-adds over those of one key's score and weighted value."""


def cost_in_keys(method: nn.Module, *, length: int, head_dim: int, is_causal: bool) -> float:
    """`error.budget` over the head_dim + value_dim multiply-adds that attending to one key takes.

    For self-attention over `length` positions with values as wide as the queries.
    """
    sizes = {"queries": length, "keys": length, "head_dim": head_dim, "value_dim": head_dim}
    return budget(method, **sizes, is_causal=is_causal) / (2 * head_dim)


def closest_to_budget(
    build: Callable[[int], nn.Module],
    keys: int,
    *,
    length: int,
    head_dim: int,
    is_causal: bool,
    within: float,
) -> Affordable | None:
    """The parameter 1 to `length` whose cost is closest to `keys`, the smallest of equals.

    None where no cost is within the share `within` of `keys`: a pattern may have no such setting,
    as strided attention never sees fewer than about 2 sqrt(2 length) keys. Parameters that `build`
    refuses with ValueError are passed over.
    """
    found: Affordable | None = None
    for parameter in range(1, length + 1):
        try:
            method = build(parameter)
            cost = cost_in_keys(method, length=length, head_dim=head_dim, is_causal=is_causal)
        except ValueError:
            continue
        if found is None or abs(cost - keys) < abs(found.cost - keys):
            found = Affordable(parameter, cost)
    return found if found and abs(found.cost - keys) <= within * keys else None
