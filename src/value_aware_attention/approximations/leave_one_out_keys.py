"""Ranks keys by the exact output error of dropping each of them alone."""

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.ranked_keys import RankedKeys
from value_aware_attention.call import Call
from value_aware_attention.error import typical_unit


class LeaveOneOutKeys(RankedKeys):
    """Keeps the top r keys by alpha_i / (1 - alpha_i) ||o - v_i||, weighted by attention (Eq. 2).

    The score of CAOTE (arXiv 2504.14051): without key i and with the others renormalised, the
    output moves by exactly that much. A key with alpha = 1 comes first.
    """

    def scores(
        self, call: Call, weights: Float[Tensor, "*#batch N M"]
    ) -> Float[Tensor, "*batch N M"]:
        value = call.centred.value  # distances keep their digits far from 0
        return output_change(weights, value / typical_unit(value))


def output_change(
    weights: Float[Tensor, "*#batch N M"],
    value: Float[Tensor, "*#batch M V"],
    beside: tuple[Float[Tensor, "*#batch N 1"], Float[Tensor, "*#batch N V"]] | None = None,
) -> Float[Tensor, "*batch N M"]:
    """Computes alpha_i / (1 - alpha_i) ||o - v_i|| of every key; inf for the only key seen.

    As alpha approaches 1 neither 1 - alpha nor o - v has a digit left. For a key with more than
    half of the weight alpha_i ||o_i - v_i|| is computed instead, which is equal, with o_i the
    output of the others renormalised. `beside` holds the weight, and the weighted sum of the
    values, of keys seen beside these.
    """
    weight, sums = beside or (0.0, 0.0)
    change = weights / (1 - weights) * torch.cdist(weights @ value + sums, value)
    weights = weights.expand_as(change)
    value = value.expand(*change.shape[:-2], *value.shape[-2:])
    heaviest = weights.argmax(dim=-1, keepdim=True)
    others = weights.scatter(-1, heaviest, 0.0)
    total = others.sum(dim=-1, keepdim=True) + weight
    distance = (others @ value + sums) / total - value.take_along_dim(heaviest, dim=-2)
    largest = weights.gather(-1, heaviest)
    moved = (largest * distance.norm(dim=-1, keepdim=True)).masked_fill(total <= 0, torch.inf)
    return change.scatter(-1, heaviest, moved.where(largest > 0.5, change.gather(-1, heaviest)))
