"""Computes the loss from dropping each key alone, with the code that suits the device."""

from jaxtyping import Float
from torch import Tensor

from value_aware_attention.caches.batched_losses import batched_losses
from value_aware_attention.caches.compiled_losses import compiled_losses, is_compiled
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.triton_losses import selected, triton_losses


def single_losses(
    observed: Observed, *, projected: bool = False
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch G W V"]]:
    """Computes the squared change of the outputs when each key is dropped alone, and the outputs.

    Changes are summed over the queries of a group as if drops were additive. A query that sees no
    other key loses its output. `projected` measures outputs after W_o, if it is known. Losses are
    returned in fp64, computed in at least fp32 with the memory of a block of queries.
    """
    if is_compiled(observed):
        return compiled_losses(observed, projected=projected)
    if scores := selected(observed):
        return triton_losses(observed, projected=projected, scores=scores)
    return batched_losses(observed, projected=projected)
