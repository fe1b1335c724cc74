"""Keys ranked by the exact output error of dropping each of them alone."""

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.ranked_keys import RankedKeys
from value_aware_attention.call import Call

__all__ = ["LeaveOneOutKeys"]


class LeaveOneOutKeys(RankedKeys):
    """Keeps the top r keys by alpha_i / (1 - alpha_i) ||o - v_i||, weighted by attention (Eq. 2).

    The score of CAOTE (arXiv 2504.14051): without key i and with the others renormalised, the
    output moves by exactly that much. A key with alpha = 1 comes first.
    """

    def scores(
        self, call: Call, weights: Float[Tensor, "*#batch N M"]
    ) -> Float[Tensor, "*batch N M"]:
        value = call.centred.value  # distances keep their digits far from 0
        distance = torch.cdist(weights @ value, value)
        left = 1 - weights
        return (weights / left * distance).masked_fill(left <= 0, torch.inf)
