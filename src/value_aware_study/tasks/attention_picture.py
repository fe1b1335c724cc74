"""The weights that a method really gives, as a matrix of queries by keys that can be drawn."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.approximations import SparseApproximation
from value_aware_attention.measurement.tasks import LayerCall

__all__ = ["effective_weights", "first_head"]


def first_head(call: LayerCall, positions: int) -> LayerCall:
    """Cuts a call to its first sequence and head, and to its first positions."""
    query, key, value = (x[:1, :1, :positions] for x in (call.query, call.key, call.value))
    return LayerCall(query, key, value, call.kernel, call.is_causal)


@torch.inference_mode()
def effective_weights(method: nn.Module, call: LayerCall) -> Float[Tensor, "N M"]:
    """Finds W with output = W @ value: what the method uses for alpha, negative included.

    A method that names its keys says so itself; any other is linear in the values, so that the
    identity in their place reads W off.
    """
    options: dict[str, Any] = {"kernel": call.kernel, "is_causal": call.is_causal}
    keys = call.key.shape[-2]
    if isinstance(method, SparseApproximation):
        return method.select(call.query, call.key, call.value, **options).dense(keys)[0, 0]
    identity = torch.eye(keys, dtype=call.value.dtype, device=call.value.device)
    weights: Tensor = method(call.query, call.key, identity, **options)
    return weights[0, 0]
