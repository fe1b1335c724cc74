"""Drops keys one by one, each time the key that increases the joint error least.

On a CPU it runs drops.cpp, compiled on first use; without a compiler or on a GPU it runs in torch.
"""

import ctypes
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention import native
from value_aware_attention.caches.joint_set import LEFT, UPDATED_KEYS, Rows, State
from value_aware_attention.call import uncompiled

DROPS_SOURCE = Path(__file__).with_name("drops.cpp")
DROPS = 64
"""Number of drops with incremental updates before costs are recomputed"""
STALE = 4 * UPDATED_KEYS
"""Most keys whose costs are recomputed between full recomputations: the cheapest ones, three per
key to drop, because costs hardly fall while other keys are dropped"""
DROPPED_SHARE = 0.1
"""Share of the keys dropped between full recomputations, unless costs are always recomputed"""


def eliminate(
    rows: Rows, left: Int[Tensor, "B K"], least: int, *, share: float = 0.0
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
    """Ranks keys by repeatedly dropping the key that increases the joint error least, down to
    `least`.

    Returns the remaining keys, then the dropped keys from last to first, and the cost of each drop
    (inf for remaining keys). All costs are recomputed after dropping `share` of the keys, and
    around a drop that takes nearly all of a row's mass. In between, the cheapest costs are
    recomputed every `DROPS` drops, and those of the `UPDATED_KEYS` cheapest are updated after each
    drop. A drop then costs the same for any number of keys; within so few drops, another key hardly
    becomes the cheapest.
    """
    dropped, costs = [left[:, :0]], [left[:, :0].double()]
    while left.shape[-1] > least:
        many = min(int(share * left.shape[-1]), STALE // 2)
        gone, cost = _drops(rows, left, min(max(DROPS, many), left.shape[-1] - least))
        dropped.append(left.gather(-1, gone))
        costs.append(cost)
        stays = torch.ones_like(left, dtype=torch.bool).scatter(-1, gone, value=False)
        left = left[stays].view(len(left), -1)
    costs.append(costs[0].new_full(left.shape, torch.inf))
    return torch.cat([*dropped, left.flip(-1)], dim=-1).flip(-1), torch.cat(costs, dim=-1).flip(-1)


def _drops(
    rows: Rows, left: Int[Tensor, "B K"], count: int
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Drops up to `count` keys after computing all costs; returns their indices and costs."""
    state, fixed = rows.start(left)
    most = max(UPDATED_KEYS, min(STALE, 3 * count) if count > DROPS else 0)
    cheapest = (state.cost() + fixed).topk(min(most, left.shape[-1]), dim=-1, largest=False).indices
    fixed = fixed.gather(-1, cheapest)
    is_large = rows.available.shape[-1] > UPDATED_KEYS
    state, unit = state.take(cheapest).eased(is_large)
    places: list[Tensor] = []
    costs: list[Tensor] = []
    while count > 0:
        gone, cost = _followed(state, fixed, min(DROPS, count), is_large, is_fresh=not places)
        places.append(cheapest.gather(-1, gone))
        costs.append(cost * unit)
        count -= DROPS
        if gone.shape[-1] < DROPS:
            break
        state, fixed = state.recomputed(gone), fixed.scatter(-1, gone, torch.inf)
        if state.is_single and not state.is_gentle:
            break
    return torch.cat(places, dim=-1), torch.cat(costs, dim=-1)


def _followed(
    state: State, fixed: Float[Tensor, "B K"], count: int, is_large: bool, *, is_fresh: bool
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Drops up to `count` keys of a state through `drop`, among the `UPDATED_KEYS` cheapest."""
    most = min(UPDATED_KEYS, fixed.shape[-1])
    cheapest = (state.cost() + fixed).topk(most, dim=-1, largest=False).indices
    state, unit = state.take(cheapest).eased(is_large)
    gone, cost = drop(state, fixed.gather(-1, cheapest), count, is_fresh=is_fresh)
    return cheapest.gather(-1, gone), cost * unit


def measured_in_order(rows: Rows, order: Int[Tensor, "B M"], first: int) -> Float[Tensor, "B K"]:
    """Computes the costs of dropping the keys after the `first`, in order; equal between cuts.

    Each cut drops a fifth of the keys, and errors are computed at the cuts.
    """
    keys = order.shape[-1]
    costs = [torch.zeros_like(order[:, :0], dtype=torch.float64)]
    upper, behind = keys, torch.zeros_like(order[:, :1], dtype=torch.float64)
    while upper > first:
        lower = max(first, min(upper - 1, int(0.8 * upper)))
        chosen = torch.zeros_like(rows.available).scatter(-1, order[:, :lower], value=True)
        error = rows.error(chosen)[:, None]
        costs.insert(0, ((error - behind) / (upper - lower)).expand(-1, upper - lower))
        upper, behind = lower, error
    return torch.cat(costs, dim=-1)


class _Call(ctypes.Structure):
    """Mirrors `Call` of drops.cpp, which does not compile unless both have the same size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("value", "weights", "mass", "error", "others")),
        *((name, ctypes.c_void_p) for name in ("to_kept", "to_exact", "fixed", "places", "costs")),
        *((name, ctypes.c_int64) for name in ("caches", "parts", "rows", "keys", "width")),
        *((name, ctypes.c_int64) for name in ("count", "is_fresh")),
        ("left", ctypes.c_double),
    )


@uncompiled  # a traced tensor has no memory address
def drop(
    state: State, fixed: Float[Tensor, "B K"], count: int, *, is_fresh: bool
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Returns up to `count` drops and their costs; overwrites the state and `fixed`.

    It stops before a drop that takes nearly all of a row's mass, because the cost of such a drop
    must be freshly computed. If all costs are fresh, that drop is the last.
    """
    size = f"-DSIZE_OF_CALL={ctypes.sizeof(_Call)}"
    if not state.error.is_cpu or (library := native.library(DROPS_SOURCE, size)) is None:
        return in_torch(state, fixed, count, is_fresh=is_fresh)
    places = torch.empty(len(fixed), count, dtype=torch.int64)
    costs = torch.empty(len(fixed), count, dtype=torch.float64)
    s, fixed = state, fixed.double()
    tensors = [
        x.contiguous() for x in (
            s.value, s.weights, s.mass.clone(), s.error.clone(), s.error_of_others, s.to_kept,
            s.to_exact, fixed,
        )
    ]  # fmt: skip
    rows, keys = s.weights.shape[-2:]
    call = _Call(
        *(tensor.data_ptr() for tensor in (*tensors, places, costs)),
        len(fixed), s.parts, rows, keys, s.value.shape[-1], count, is_fresh, LEFT[s.error.dtype],
    )  # fmt: skip
    done = (library.drop_float if s.is_single else library.drop_double)(ctypes.byref(call))
    return places[:, :done], costs[:, :done]


def in_torch(
    state: State, fixed: Float[Tensor, "B K"], count: int, *, is_fresh: bool
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Does the same as `drop` on batched tensors, on any device."""
    none = torch.zeros(len(fixed), 0, device=fixed.device)
    places, costs = [none.long()], [none.double()]
    for step in range(count):
        cost, cheapest = (state.cost() + fixed).min(dim=-1, keepdim=True)
        empties = state.empties(cheapest)
        if empties and (step or not is_fresh):
            break
        state.drop(cheapest)
        fixed.scatter_(-1, cheapest, torch.inf)
        places.append(cheapest)
        costs.append(cost)
        if empties:
            break
    return torch.cat(places, dim=-1), torch.cat(costs, dim=-1)
