"""Effective attention weights of a method, as a matrix of queries by keys to draw."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.approximations import SparseApproximation
from value_aware_attention.call import Call

__all__ = ["effective_weights", "first_head"]


def first_head(call: Call, positions: int) -> Call:
    """Cuts a call to its first sequence and head, and to its first positions."""
    return call.unit(0, heads=slice(1), positions=positions)


@torch.inference_mode()
def effective_weights(method: nn.Module, call: Call) -> Float[Tensor, "N M"]:
    """Finds W with output = W @ value: what the method uses for alpha, negative included.

    A method that names its keys says so itself; any other is linear in the values, so that the
    identity in their place reads W off.
    """
    if isinstance(method, SparseApproximation):
        return method.select(**call.arguments()).dense(call.keys)[0, 0]
    identity = torch.eye(call.keys, dtype=call.dtype, device=call.value.device)
    weights: Tensor = method(**call.arguments() | {"value": identity})
    return weights[0, 0]
