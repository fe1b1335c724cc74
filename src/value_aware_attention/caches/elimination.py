"""Drops keys one by one, each time the one whose loss costs the joint error of the rest least."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.caches.joint_set import Rows, State

DROPS = 64
"""Number of drops followed by updates before costs are computed again"""
CANDIDATES = 4 * DROPS
"""Number of keys whose costs are updated: the cheapest to drop when costs were computed"""
STALE, QUICK = 4 * CANDIDATES, 4
"""Largest number of keys whose costs are computed again between drops where not all are: three for
each key to drop, the cheapest when all were computed, because a cost hardly falls while others go.
There `DROPS` and `CANDIDATES` are `QUICK` times fewer."""
SHARE = 0.1
"""Share of the keys that is dropped before all costs are computed again, where not every time"""


def eliminate(
    rows: Rows, left: Int[Tensor, "B K"], least: int, *, share: float = 0.0
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
    """Orders keys by dropping the one whose loss costs the joint error least, down to `least`.

    Returns the keys, the last one dropped before the others and those that stay in front of it,
    and the cost of each drop (inf: it stays). All costs are computed again after `share` of the
    keys, and around a drop that takes nearly all of a row's mass; in between those of the
    cheapest after every `DROPS` drops, and after each drop those of the `CANDIDATES` cheapest, so
    that the cost of a drop does not grow with the number of keys: within so few drops another key
    hardly becomes the cheapest.
    """
    dropped, costs = [left[:, :0]], [left[:, :0].double()]
    step = DROPS if share == 0 else DROPS // QUICK
    while left.shape[-1] > least:
        many = min(int(share * left.shape[-1]), STALE // 2)
        gone, cost = _drops(rows, left, min(max(step, many), left.shape[-1] - least), step)
        dropped.append(left.gather(-1, gone))
        costs.append(cost)
        stays = torch.ones_like(left, dtype=torch.bool).scatter(-1, gone, value=False)
        left = left[stays].view(len(left), -1)
    kept = costs[0].new_full(left.shape, torch.inf)
    return (
        torch.cat([left, torch.cat(dropped, dim=-1).flip(-1)], dim=-1),
        torch.cat([kept, torch.cat(costs, dim=-1).flip(-1)], dim=-1),
    )


def _drops(
    rows: Rows, left: Int[Tensor, "B K"], count: int, step: int
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Drops up to `count` keys after computing all costs; returns their places and costs."""
    state, fixed = rows.start(left)
    most = max(4 * step, min(STALE, 3 * count) if count > step else 0)
    cheapest = (state.cost() + fixed).topk(min(most, left.shape[-1]), dim=-1, largest=False).indices
    fixed = fixed.gather(-1, cheapest)
    state, unit = state.take(cheapest).eased()
    places: list[Tensor] = []
    costs: list[Tensor] = []
    while count > 0:
        gone, cost = _followed(state, fixed, min(step, count), 4 * step, is_fresh=not places)
        places.append(cheapest.gather(-1, gone))
        costs.append(cost * unit)
        count -= step
        if gone.shape[-1] < step:
            break
        state, fixed = state.recomputed(gone), fixed.scatter(-1, gone, torch.inf)
        if state.is_single and not state.is_gentle:
            break
    return torch.cat(places, dim=-1), torch.cat(costs, dim=-1)


def _followed(
    state: State, fixed: Float[Tensor, "B K"], count: int, among: int, *, is_fresh: bool
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Drops up to `count` keys of a state, following the costs of the `among` cheapest.

    It ends before a drop that takes nearly all of a row's mass, or, where all costs are fresh, with
    it: the cost of such a drop is that of the last time all was computed.
    """
    found = (state.cost() + fixed).topk(min(among, fixed.shape[-1]), dim=-1, largest=False).indices
    fixed = fixed.gather(-1, found)
    state, unit = state.take(found).eased()
    places, costs = [], []
    for step in range(count):
        cost, cheapest = (state.cost() + fixed).min(dim=-1, keepdim=True)
        empties = state.empties(cheapest)
        if empties and (step or not is_fresh):
            break
        state.drop(cheapest)
        fixed.scatter_(-1, cheapest, torch.inf)
        places.append(cheapest)
        costs.append(cost * unit)
        if empties:
            break
    none = torch.zeros(len(fixed), 0, device=fixed.device)
    gone = found.gather(-1, torch.cat([none.long(), *places], dim=-1))
    return gone, torch.cat([none.double(), *costs], dim=-1)


def measured_in_order(rows: Rows, order: Int[Tensor, "B M"], first: int) -> Float[Tensor, "B K"]:
    """Measures what keys behind the first ones cost, dropped in this order, all alike between cuts.

    Errors are computed where a fifth of the keys is dropped.
    """
    keys = order.shape[-1]
    costs = [torch.zeros_like(order[:, :0], dtype=torch.float64)]
    upper, behind = keys, torch.zeros_like(order[:, :1], dtype=torch.float64)
    while upper > first:
        lower = max(first, min(upper - 1, int(0.8 * upper)))
        kept = torch.zeros_like(rows.available).scatter(-1, order[:, :lower], value=True)
        error = rows.error(kept)[:, None]
        costs.insert(0, ((error - behind) / (upper - lower)).expand(-1, upper - lower))
        upper, behind = lower, error
    return torch.cat(costs, dim=-1)
