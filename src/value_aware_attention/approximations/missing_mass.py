"""Defines methods that differ in where they put the attention weight of the dropped keys."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import FewKeys
from value_aware_attention.arguments import check_choice
from value_aware_attention.call import Call
from value_aware_attention.weights import or_overflow, top_keys, usable, weighted_sum

LargestWeights = FewKeys  # its name until 1.2


class UnrenormalisedKeys(FewKeys):
    """Sums alpha_i v_i over the r largest weights; the missing weight goes to a zero vector."""

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        outputs = []
        for block in call.blocks():
            alpha = block.weights.expand(*call.batch, -1, -1)
            with torch.no_grad():
                indices = top_keys(alpha, usable(alpha), self.r)
            outputs.append(
                weighted_sum(indices, or_overflow(alpha.gather(-1, indices), alpha), call.value)
            )
        return torch.cat(outputs, dim=-2)


class MeanValueSlot(FewKeys):
    """Keeps the r - 1 largest weights and puts the mean of the other visible values in a last slot.

    With v_O the mean value and k_O the mean key of the n other keys that a query sees:

        mass "exact":     o~ = sum_i alpha_i v_i + (1 - sum_i alpha_i) v_O
        mass "mean_key":  o~ = (sum_i kappa(q, k_i) v_i + n kappa(q, k_O) v_O)
                               / (sum_i kappa(q, k_i) + n kappa(q, k_O))

    "exact" is an oracle, as is the choice of keys; "mean_key" needs two running sums per head. The
    last step of SparQ Attention (Ribar et al., 2023, arXiv 2312.04985) is similar, with the mean of
    all values. r = 1 gives the mean of the visible values; r - 1 >= visible keys is exact.
    """

    def __init__(self, r: int, mass: str = "mean_key") -> None:
        super().__init__(r)
        self.mass = check_choice(("mean_key", "exact"), mass=mass)

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        return torch.cat([self._of_block(block) for block in call.blocks()], dim=-2)

    def _of_block(self, call: Call) -> Float[Tensor, "*batch N V"]:
        scores = call.kernel.log_similarity(call.query, call.key)
        if call.visible is not None:
            scores = scores.masked_fill(~call.visible, torch.finfo(scores.dtype).min)
        scores = scores.expand(*call.batch, -1, -1)
        with torch.no_grad():
            indices = top_keys(scores, call.visible, self.r - 1)
        largest = scores.gather(-1, indices)
        visible = scores.new_ones(largest.shape)
        count = scores.new_full((*scores.shape[:-1], 1), call.keys)
        if call.visible is not None:
            visible = call.visible.expand(scores.shape).gather(-1, indices).to(scores.dtype)
            count = call.visible.sum(dim=-1, keepdim=True).expand(count.shape).to(scores.dtype)
        others = count - visible.sum(dim=-1, keepdim=True)
        if self.mass == "exact":
            weights = (largest - scores.logsumexp(dim=-1, keepdim=True)).exp() * visible
            slot = (1 - weights.sum(dim=-1, keepdim=True)).clamp_min(0) * (others > 0)
        else:
            mean_key = _mean_of_others(call, call.key, indices, visible, others)
            query = call.query.expand(*call.batch, -1, -1)[..., None, :]
            score = call.kernel.log_similarity(query, mean_key[..., None, :])[..., 0]
            logs = torch.cat([largest, score + others.clamp_min(1).log()], dim=-1)
            present = torch.cat([visible, (others > 0).to(visible.dtype)], dim=-1)
            logs = logs.masked_fill(present == 0, torch.finfo(logs.dtype).min)
            weights, slot = (logs.softmax(dim=-1) * present).tensor_split([-1], dim=-1)
        mean = _mean_of_others(call, call.value, indices, visible, others)
        return weighted_sum(indices, weights, call.value) + slot * mean


def _mean_of_others(
    call: Call,
    vectors: Float[Tensor, "*#batch M D"],
    indices: Int[Tensor, "*batch N R"],
    visible: Float[Tensor, "*batch N R"],
    others: Float[Tensor, "*batch N 1"],
) -> Float[Tensor, "*batch N D"]:
    """Averages the vectors that a query sees, except those at `indices`.

    All queries share the sums over all keys, in fp64 because a large vector may be subtracted.
    """
    precise, mask = vectors.double(), call.attn_mask
    if mask is not None and mask.shape[-2] == 1:
        precise = precise.where(mask.mT, 0.0)
    if mask is not None and mask.shape[-2] > 1 and call.visible is not None:
        total = call.visible.double() @ precise
    elif call.is_causal:
        total = precise.cumsum(dim=-2)[..., call.rows, :]
    else:
        total = precise.sum(dim=-2, keepdim=True)
    largest = weighted_sum(indices, visible.double(), vectors.double())
    return ((total - largest) / others.clamp_min(1)).to(vectors.dtype)
