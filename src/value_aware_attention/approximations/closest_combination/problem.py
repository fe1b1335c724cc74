"""What the searches solve: one attention call with its leading dimensions in one."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention.approximations.approximation import Inputs

__all__ = [
    "INDEPENDENCE",
    "SEARCHES",
    "TOLERANCE",
    "Problem",
    "flatten",
    "negligible",
]

SEARCHES = ("fast", "default", "best")
TOLERANCE = {torch.float32: 7e-7, torch.float64: 1e-10}
"""||o - o~|| that counts as none, as a part of the largest distance of a value from o."""
NEGLIGIBLE = {torch.float32: 3.5e-6, torch.float64: 1e-9}
"""||o - o~|| that is reported as none, as a part of the largest (centred) ||v|| a query sees."""
INDEPENDENCE = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Smallest part of an atom outside the span of the others that may still join them."""


@dataclass(frozen=True)
class Problem:
    """For every query the point o = sum_i alpha_i v_i to be written with few of the values."""

    value: Float[Tensor, "H M V"]
    """Centred: only differences of values matter, and large common offsets cost digits."""
    output: Float[Tensor, "H N V"]
    """o, of the centred values."""
    weights: Float[Tensor, "H N M"]
    """alpha; 0 where hidden."""
    visible: Bool[Tensor, "H N M"] | None
    unit: Float[Tensor, " H"]
    """What values are measured in; a squared error in the inputs' units is unit^2 times ours."""


def flatten(inputs: Inputs) -> Problem:
    """One attention call as a Problem; H counts all leading dimensions together."""
    weights, batch = inputs.weights(), inputs.batch
    (queries, keys), heads = weights.shape[-2:], torch.Size(batch).numel()
    weights = weights.expand(*batch, queries, keys).reshape(heads, queries, keys)
    value = inputs.centred().value
    value = value.expand(*batch, keys, -1).reshape(heads, keys, value.shape[-1])
    # To unit size by a power of two, which rounds nothing and keeps squares in range.
    _, exponent = value.abs().flatten(1).amax(-1).frexp()
    value = value * torch.exp2(-exponent.to(value.dtype))[:, None, None]
    visible = inputs.visible
    if visible is not None:
        visible = visible.expand(*batch, queries, keys).reshape(heads, queries, keys)
    return Problem(value, weights @ value, weights, visible, torch.exp2(exponent.to(value.dtype)))


def negligible(
    value: Float[Tensor, "*#batch M V"], visible: Bool[Tensor, "*#batch #N #M"] | None
) -> Float[Tensor, "*batch N"]:
    """The ||o - o~||^2 that counts as none, of centred values: N is 1 where all queries see all."""
    norms = value.square().sum(-1)[..., None, :]
    if visible is not None:
        norms = norms.where(visible, 0.0)
    return NEGLIGIBLE[value.dtype] ** 2 * norms.amax(-1)
