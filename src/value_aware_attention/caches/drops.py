"""Drops keys of a state one by one, each time the one whose loss costs the joint error least.

On a CPU in drops.cpp, compiled on first use; in torch where there is no compiler, and on a GPU.
"""

import ctypes
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention import native
from value_aware_attention.caches.joint_set import LEFT, State
from value_aware_attention.call import uncompiled

SOURCE = Path(__file__).with_name("drops.cpp")


class _Call(ctypes.Structure):
    """Mirrors `Call` of drops.cpp, which does not compile unless both have the same size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("value", "weights", "mass", "error", "others")),
        *((name, ctypes.c_void_p) for name in ("to_kept", "to_exact", "fixed", "places", "costs")),
        *((name, ctypes.c_int64) for name in ("caches", "parts", "rows", "keys", "width")),
        *((name, ctypes.c_int64) for name in ("count", "is_fresh")),
        ("left", ctypes.c_double),
    )


@uncompiled  # a traced tensor has no memory to point to
def drop(
    state: State, fixed: Float[Tensor, "B K"], count: int, *, is_fresh: bool
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Returns up to `count` drops and their costs; the state and `fixed` are used up.

    It ends before a drop that takes nearly all of a row's mass, or, where all costs are fresh, with
    it: the cost of such a drop is that of the last time all was computed.
    """
    on_cpu = state.error.device.type == "cpu"
    size = f"-DSIZE_OF_CALL={ctypes.sizeof(_Call)}"
    library = native.library(SOURCE, size) if on_cpu else None
    if library is None:
        return in_torch(state, fixed, count, is_fresh=is_fresh)
    places = torch.empty(len(fixed), count, dtype=torch.int64)
    costs = torch.empty(len(fixed), count, dtype=torch.float64)
    s, fixed = state, fixed.double()
    tensors = [
        s.value, s.weights, s.mass.clone(), s.error.clone(), s.error_of_others, s.to_kept,
        s.to_exact, fixed,
    ]  # fmt: skip
    tensors = [tensor.contiguous() for tensor in tensors]
    rows, keys = s.weights.shape[-2:]
    call = _Call(
        *(tensor.data_ptr() for tensor in (*tensors, places, costs)),
        len(fixed), s.parts, rows, keys, s.value.shape[-1], count, is_fresh, LEFT[s.error.dtype],
    )  # fmt: skip
    function = library.drop_float if s.is_single else library.drop_double
    done = function(ctypes.byref(call))
    return places[:, :done], costs[:, :done]


def in_torch(
    state: State, fixed: Float[Tensor, "B K"], count: int, *, is_fresh: bool
) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Does it on batched tensors, on any device."""
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
