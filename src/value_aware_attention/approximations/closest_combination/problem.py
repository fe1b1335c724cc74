"""Holds the problem of the searches: an attention call with flattened leading dimensions."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.call import Call
from value_aware_attention.searches import SEARCHES as SEARCHES
from value_aware_attention.weights import mean_of_visible, renormalised, smallest

KEY_GROUPS = 16
"""Number of interleaved groups of keys; the steepest key of each group is a candidate."""
BEAM = 32
"""Number of sets of every size that the "best" search extends"""
NEARLY = 0.5
"""Smallest slope of an evaluated candidate, relative to the steepest"""
LOOKS = 256
"""Number of evaluated candidates times the size of the set; large sets gain less from them."""
TOLERANCE = {torch.float32: 7e-7, torch.float64: 1e-10}
"""Largest ||o - o~|| that counts as zero in a search, relative to the row's spread"""
INDEPENDENCE = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Smallest relative norm outside the span of the others with which an atom may join"""
WIDE_SHARE = {torch.float32: 1e-6, torch.float64: 0.0}
"""A row is solved in fp64 if most squared distances are below this fraction of the largest."""
SMALLEST_DISTANCE = 2.0**-60
"""A row is solved in fp64 if its largest squared distance, in the problem's unit, is below this"""


@dataclass(frozen=True)
class Problem:
    """Holds for each query the point o = sum_i alpha_i v_i, to be approximated with few values.

    Attributes:
        value: Centred, because only differences matter and a large common offset costs digits.
        output: o, of the centred values.
        weights: alpha; 0 where hidden.
        unit: The unit of the values; input errors are unit^2 times the problem's.
        original: The input values, with all their digits; None means `value` times `unit`.
        mean: The mean of the values that each query sees, if it is a candidate too; else None.
    """

    value: Float[Tensor, "H M V"]
    output: Float[Tensor, "H N V"]
    weights: Float[Tensor, "H N M"]
    visible: Bool[Tensor, "H N M"] | None
    unit: Float[Tensor, " H"]
    original: Float[Tensor, "H M V"] | None = None
    mean: Float[Tensor, "H N V"] | None = None

    @property
    def mean_key(self) -> int:
        """Returns the index of the mean among the candidates, beyond the keys and their padding."""
        keys = self.value.shape[1]
        return keys + -keys % KEY_GROUPS

    def zero(self) -> Float[Tensor, "H N"]:
        """Returns the ||o - o~||^2 that counts as 0, row by row.

        It is a fraction of the values' spread around o, weighted by alpha (the smaller of the
        squared mean norm and the variance), plus the rounding of o. The weighting ensures that a
        distant value without attention weight hides no error.
        """
        norm = self.value.norm(dim=-1, keepdim=True)
        mean, square = (self.weights @ torch.cat([norm, norm.square()], dim=-1)).unbind(dim=-1)
        spread = (square - self.output.square().sum(dim=-1)).clamp_min(0)
        precision = torch.finfo(self.value.dtype)
        share, rounding = TOLERANCE[self.value.dtype] ** 2, (4 * precision.eps) ** 2
        mean = mean.square()
        return share * torch.minimum(spread, mean) + rounding * mean + precision.tiny

    def in_fp64(
        self, rows: Bool[Tensor, "H N"]
    ) -> Iterator[tuple[tuple[Int[Tensor, "G 1"], Int[Tensor, "G K"]], "Problem"]]:
        """Collects these rows of all heads; yields their places and one problem, if there are any.

        K is the largest number in a head. Heads with fewer are filled up with rows of weight 0.
        """
        counts = rows.sum(dim=1)
        if not (most := int(counts.max())):
            return
        heads = counts.nonzero()
        first = rows[heads[:, 0]].int().argsort(dim=1, descending=True, stable=True)[:, :most]
        filled = rows[heads, first]
        at = heads, first.where(filled, first[:, :1])  # no other row moves the centre
        as_given = self.value * self.unit[:, None, None] if self.original is None else self.original
        weights = renormalised(self.weights[at].double())
        value = as_given[heads[:, 0]].double()
        value = value - smallest(weights @ value)
        weights = weights * filled[..., None]
        visible = None if self.visible is None else self.visible[at]
        mean = None if self.mean is None else mean_of_visible(value, visible, most)
        output, unit = weights @ value, value.new_ones(len(value))
        yield (heads, first), Problem(value, output, weights, visible, unit, mean=mean)


def unresolved(
    distance: Float[Tensor, "*batch M"],
    farthest: Float[Tensor, "*batch"],
    output: Float[Tensor, "*batch V"],
) -> Bool[Tensor, "*batch"]:
    """Finds rows whose squared distances from o (infinite if hidden) fp32 cannot resolve.

    In such rows most values lie closer to o than 1e-3 of the largest distance or of ||o|| (values
    are centred). A distant value, or a row far from the centre, leaves the other values few digits.
    """
    wide = WIDE_SHARE[distance.dtype]
    farthest = torch.maximum(farthest, output.square().sum(dim=-1))
    close = (distance < wide * farthest[..., None]).sum(dim=-1)
    visible = (distance < torch.inf).sum(dim=-1)
    return (2 * close > visible) | ((visible > 0) & (farthest < SMALLEST_DISTANCE * (wide > 0)))


def tiny(x: Tensor) -> float:
    """Returns the smallest normal number of a tensor's precision."""
    return torch.finfo(x.dtype).tiny


def flatten(call: Call, mean: bool = False) -> Problem:
    """Converts an attention call to a Problem; H is the product of all leading dimensions.

    `mean` makes the mean of the visible values one more candidate.
    """
    weights, batch = call.weights, call.batch
    (queries, keys), heads = weights.shape[-2:], torch.Size(batch).numel()
    weights = weights.expand(*batch, queries, keys).reshape(heads, queries, keys)
    as_given, value = (
        x.value.expand(*batch, keys, -1).reshape(heads, keys, call.value.shape[-1])
        for x in (call, call.centred)
    )
    # Scaling by a power of two rounds nothing and keeps squares in range.
    _, exponent = value.abs().flatten(1).amax(-1).frexp()
    value = value * torch.exp2(-exponent.to(value.dtype))[:, None, None]
    visible = call.visible
    of_visible = None
    if mean:
        of_visible = mean_of_visible(value.reshape(*batch, keys, -1), visible, queries)
        of_visible = of_visible.reshape(heads, queries, -1)
    if visible is not None:
        visible = visible.expand(*batch, queries, keys).reshape(heads, queries, keys)
    unit = torch.exp2(exponent.to(value.dtype))
    return Problem(value, weights @ value, weights, visible, unit, as_given, of_visible)
