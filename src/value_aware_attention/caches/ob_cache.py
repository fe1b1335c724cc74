"""Keeps keys by the second-order change of the outputs as keys, values or both are lost."""

from jaxtyping import Float
from torch import Tensor

from value_aware_attention.arguments import check_choice
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed


class OBCache(CacheMethod):
    """Keeps the r keys with the largest sum_i alpha_ij^2 ||v_j + z_ij (v_j - o_i)||^2.

    OBCache (arXiv 2510.07651), with z = log kappa: closed forms of Optimal Brain Damage for a
    pruned key and value ("joint", above), for the value alone, sum_i alpha_ij^2 ||v_j||^2, and for
    the key alone, sum_i (alpha_ij z_ij)^2 ||v_j - o_i||^2. The authors' code could not be read: the
    formulas are those of a public derivative. The sum over a group is ours; there each query head
    has a cache of its own.
    """

    def __init__(self, r: int, part: str = "joint") -> None:
        super().__init__(r)
        self.part = check_choice(("joint", "key", "value"), part=part)

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        value, output = working_precision(seen.value)[..., None, :, :], seen.output
        logits = seen.log_similarity.masked_fill(seen.weights == 0, 0.0)
        norm = value.square().sum(dim=-1)[..., None, :]
        along = output @ value.mT
        distance = norm - 2 * along + output.square().sum(dim=-1, keepdim=True)
        change = {
            "value": norm,
            "key": logits.square() * distance,
            "joint": norm + 2 * logits * (norm - along) + logits.square() * distance,
        }[self.part]
        return (seen.weights.square() * change).sum(dim=(-3, -2))

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * keys * (head_dim + 2 * value_dim))
