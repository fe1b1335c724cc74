"""Parameters with which methods come closest to the cost of a number of keys."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from value_aware_attention.error import budget

__all__ = ["Affordable", "closest_to_budget", "cost_in_keys"]

POINTS = 16


class Affordable(NamedTuple):
    """Holds a parameter and what the method then costs."""

    parameter: int
    cost: float
    """In keys a query: multiply-adds over those of one key's score and weighted value."""


def cost_in_keys(method: nn.Module, *, length: int, head_dim: int, is_causal: bool) -> float:
    """Divides `error.budget` by the head_dim + value_dim multiply-adds of attending to one key.

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
    """Searches the parameter 1 to `length` whose cost is closest to `keys`, from coarse to fine.

    None where no cost is within the share `within` of `keys`: a pattern may have no such setting,
    as strided attention never sees fewer than about 2 sqrt(2 length) keys. Parameters that `build`
    refuses with ValueError are passed over.
    """
    costs: dict[int, float] = {}

    def away(parameter: int) -> float:
        return abs(costs[parameter] - keys)

    low, high = 1, length
    while True:
        for parameter in _spread(low, high):
            if parameter not in costs:
                costs[parameter] = _cost(build, parameter, length, head_dim, is_causal)
        best = min(sorted(costs), key=away)
        tried = sorted(costs)
        place = tried.index(best)
        low, high = tried[max(0, place - 1)], tried[min(len(tried) - 1, place + 1)]
        if not set(_spread(low, high)) - set(costs):
            break
    return Affordable(best, costs[best]) if away(best) <= within * keys else None


def _spread(low: int, high: int) -> list[int]:
    """Lists a few integers from low to high, both included; all of them where they are few."""
    step = max(1, (high - low) // POINTS)
    return [*range(low, high, step), high]


def _cost(
    build: Callable[[int], nn.Module], parameter: int, length: int, head_dim: int, is_causal: bool
) -> float:
    """Computes the cost in keys; infinite where the method refuses the parameter."""
    try:
        method = build(parameter)
        return cost_in_keys(method, length=length, head_dim=head_dim, is_causal=is_causal)
    except ValueError:
        return math.inf
