"""Keeps keys by the change of the output when each is dropped alone."""

from jaxtyping import Float
from torch import Tensor

from value_aware_attention.arguments import check_choice
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.batched_losses import batched_losses
from value_aware_attention.caches.compiled_losses import compiled_losses, is_compiled
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import check_pool, pooled
from value_aware_attention.caches.triton_losses import selected, triton_losses


def single_losses(
    observed: Observed, *, projected: bool = False
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch G W V"]]:
    """Computes the squared change of the outputs when each key is dropped alone, and the outputs.

    Changes are summed over the queries of a group as if drops were additive. A query that sees no
    other key loses its output. `projected` measures outputs after W_o, if it is known. Losses are
    returned in fp64, computed in at least fp32 with the memory of a block of queries, by the form
    that suits the device.
    """
    if is_compiled(observed):
        return compiled_losses(observed, projected=projected)
    if scores := selected(observed):
        return triton_losses(observed, projected=projected, scores=scores)
    return batched_losses(observed, projected=projected)


class LeaveOneOut(CacheMethod):
    """Keeps the r keys with the largest sum_i (alpha_ij / (1 - alpha_ij))^2 ||v_j - o_i||^2.

    This is the exact squared change of the observed outputs when only key j is dropped, summed as
    if drops were additive. A query that sees no other key loses its output. `pool` averages over
    that many neighbouring keys, including protected ones (odd; 1 = none). DropKV (kvpress pull
    request 285) uses the last 8 rows, pool 11, recent 8 and sinks 0, and adds 1e-6 to 1 - alpha.
    """

    def __init__(self, r: int, pool: int = 1) -> None:
        super().__init__(r)
        self.pool = check_pool(pool)

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        return pooled(single_losses(observed)[0], self.pool)

    def losses(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        """Computes the losses after W_o, relative to the layer's squared output."""
        losses, output = single_losses(observed, projected=True)
        norm = observed.squared_layer_output(output).view(-1, *(1,) * len(observed.batch))
        return pooled(losses, self.pool) / norm

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * keys * (head_dim + 2 * value_dim))


class OBCache(CacheMethod):
    """Keeps the r keys with the largest sum_i alpha_ij^2 ||v_j + z_ij (v_j - o_i)||^2.

    This is OBCache (arXiv 2510.07651), with z = log kappa. It has closed forms of Optimal Brain
    Damage for pruning key and value ("joint", above), the value alone, sum_i alpha_ij^2 ||v_j||^2,
    and the key alone, sum_i (alpha_ij z_ij)^2 ||v_j - o_i||^2. The authors' code was not available:
    the formulas are taken from a public derivative. The sum over a group is ours; in the original,
    each query head has its own cache.
    """

    def __init__(self, r: int, part: str = "joint") -> None:
        super().__init__(r)
        self.part = check_choice(("joint", "key", "value"), part=part)

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        value, output = working_precision(observed.value)[..., None, :, :], observed.output
        logits = observed.log_similarity.masked_fill(observed.weights == 0, 0.0)
        norm = value.square().sum(dim=-1)[..., None, :]
        along = output @ value.mT
        distance = norm - 2 * along + output.square().sum(dim=-1, keepdim=True)
        change = {
            "value": norm,
            "key": logits.square() * distance,
            "joint": norm + 2 * logits * (norm - along) + logits.square() * distance,
        }[self.part]
        return (observed.weights.square() * change).sum(dim=(-3, -2))

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * keys * (head_dim + 2 * value_dim))
