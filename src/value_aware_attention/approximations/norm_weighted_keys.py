"""Ranks keys by alpha ||v||, the attention weight times the norm of the value."""

from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.ranked_keys import RankedKeys
from value_aware_attention.arguments import check_choice
from value_aware_attention.call import Call
from value_aware_attention.error import typical_unit

NORMS = (1, 2)


class NormWeightedKeys(RankedKeys):
    """Keeps the top r keys by alpha_i ||v_i||, weighted by attention (Eq. 2).

    norm 2: the norm-based analysis of Kobayashi et al. (2020), of a value before the output
    projection W_O instead of after. norm 1: VATP's score (Guo et al., 2024, arXiv 2406.12335), for
    each query alone; VATP sums alpha over the queries, and always keeps the first tokens. The score
    looks at the size of a value and not at its direction, so it depends on where the origin is; the
    output error does not.
    """

    def __init__(self, r: int, norm: int = 2) -> None:
        super().__init__(r)
        self.norm = check_choice(NORMS, norm=norm)

    def scores(
        self, call: Call, weights: Float[Tensor, "*#batch N M"]
    ) -> Float[Tensor, "*batch N M"]:
        value = call.seen.value
        return weights * (value / typical_unit(value)).norm(p=self.norm, dim=-1)[..., None, :]
