"""Keeps the r keys of each query with the largest score: the attention weight, or another."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import SparseApproximation
from value_aware_attention.arguments import check_choice
from value_aware_attention.call import Call
from value_aware_attention.error import typical_unit
from value_aware_attention.weights import or_overflow, renormalised, top_keys, usable


class RankedKeys(SparseApproximation):
    """Keeps the top r keys by a score, weighted by attention as in Eq. 2: alpha / sum of alpha.

    Attributes:
        is_sorted: Whether the keys are returned in the order of their scores.
    """

    is_sorted = True

    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        alpha = call.weights.expand(*call.batch, -1, -1)
        with torch.no_grad():
            indices = top_keys(
                self.scores(call, alpha), usable(alpha), self.r, is_sorted=self.is_sorted
            )
        return indices, or_overflow(renormalised(alpha.gather(-1, indices)), alpha)

    @abstractmethod
    def scores(
        self, call: Call, weights: Float[Tensor, "*#batch N M"]
    ) -> Float[Tensor, "*batch N M"]:
        """Computes the scores that rank the keys, given the attention weights."""


class OptimalValueOblivious(RankedKeys):
    """Keeps the top r keys by alpha, renormalised (Eq. 2): what sparse methods try to emulate."""

    is_sorted = False

    def scores(
        self, call: Call, weights: Float[Tensor, "*#batch N M"]
    ) -> Float[Tensor, "*batch N M"]:
        return weights


class NormWeightedKeys(RankedKeys):
    """Keeps the top r keys by alpha_i ||v_i||, weighted by attention (Eq. 2).

    norm 2: the norm-based analysis of Kobayashi et al. (2020), but before instead of after the
    output projection W_O. norm 1: VATP's score (Guo et al., 2024, arXiv 2406.12335) per query; VATP
    sums alpha over the queries and always keeps the first tokens. The score uses the norm of a
    value but not its direction, so unlike the output error it depends on the origin.
    """

    def __init__(self, r: int, norm: int = 2) -> None:
        super().__init__(r)
        self.norm = check_choice((1, 2), norm=norm)

    def scores(
        self, call: Call, weights: Float[Tensor, "*#batch N M"]
    ) -> Float[Tensor, "*batch N M"]:
        value = call.seen.value
        return weights * (value / typical_unit(value)).norm(p=self.norm, dim=-1)[..., None, :]


class LeaveOneOutKeys(RankedKeys):
    """Keeps the top r keys by alpha_i / (1 - alpha_i) ||o - v_i||, weighted by attention (Eq. 2).

    This is the score of CAOTE (arXiv 2504.14051): exactly how far the output moves if key i is
    removed and the other weights are renormalised. A key with alpha = 1 comes first.
    """

    def scores(
        self, call: Call, weights: Float[Tensor, "*#batch N M"]
    ) -> Float[Tensor, "*batch N M"]:
        value = call.centred.value  # distances keep their digits far from 0
        return output_change(weights, value / typical_unit(value))


def output_change(
    weights: Float[Tensor, "*#batch N M"], value: Float[Tensor, "*#batch M V"]
) -> Float[Tensor, "*batch N M"]:
    """Computes alpha_i / (1 - alpha_i) ||o - v_i|| of every key; inf for the only visible key.

    As alpha approaches 1, 1 - alpha and o - v lose all digits. For a key with more than half of the
    weight, the equal alpha_i ||o_i - v_i|| is computed instead, where o_i is the renormalised
    output of the other keys.
    """
    change = weights / (1 - weights) * torch.cdist(weights @ value, value)
    weights = weights.expand_as(change)
    value = value.expand(*change.shape[:-2], *value.shape[-2:])
    heaviest = weights.argmax(dim=-1, keepdim=True)
    others = weights.scatter(-1, heaviest, 0.0)
    total = others.sum(dim=-1, keepdim=True)
    distance = others @ value / total - value.take_along_dim(heaviest, dim=-2)
    largest = weights.gather(-1, heaviest)
    moved = (largest * distance.norm(dim=-1, keepdim=True)).masked_fill(total <= 0, torch.inf)
    return change.scatter(-1, heaviest, moved.where(largest > 0.5, change.gather(-1, heaviest)))
