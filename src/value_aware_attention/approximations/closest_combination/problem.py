"""Holds the problem that the searches solve: an attention call, its leading dimensions in one."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.call import Call
from value_aware_attention.searches import SEARCHES as SEARCHES
from value_aware_attention.weights import renormalised, smallest

GROUPS = 16
"""Number of interleaved groups of keys; the steepest of each group is looked at closely."""
BEAM = 32
"""Number of sets of every size that the "best" search extends"""
NEARLY = 0.5
"""Part of the steepest slope from which a key is looked at closely"""
LOOKS = 256
"""Number of keys looked at closely, times the size of the set: a large set gains less by it."""
TOLERANCE = {torch.float32: 7e-7, torch.float64: 1e-10}
"""Largest ||o - o~|| that counts as none in a search, relative to the row's spread"""
INDEPENDENCE = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Smallest part of an atom outside the span of the others that may still join them."""
WIDE = {torch.float32: 1e-6, torch.float64: 0.0}
"""Part of the largest squared distance: a row is solved in fp64 if most are below it."""
SMALLEST = 2.0**-60
"""Largest squared distance, in the problem's unit, below which a row is solved in fp64"""


@dataclass(frozen=True)
class Problem:
    """Holds for every query the point o = sum_i alpha_i v_i, to be written with few values.

    Attributes:
        value: Centred: only differences of values matter, and large common offsets cost digits.
        output: o, of the centred values.
        weights: alpha; 0 where hidden.
        unit: The unit of the values; a squared error of the inputs is unit^2 times one of these.
        original: The values as they came, with all their digits; None: `value`, times `unit`.
    """

    value: Float[Tensor, "H M V"]
    output: Float[Tensor, "H N V"]
    weights: Float[Tensor, "H N M"]
    visible: Bool[Tensor, "H N M"] | None
    unit: Float[Tensor, " H"]
    original: Float[Tensor, "H M V"] | None = None

    def zero(self) -> Float[Tensor, "H N"]:
        """Returns the ||o - o~||^2 that counts as 0, row by row.

        It is a part of the values' spread around o, weighted by alpha (the squared mean norm or the
        variance, whichever is smaller), plus the rounding of o. A value to which the row does not
        attend, however far away, hides no error.
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
    ) -> Iterator[tuple[int, Int[Tensor, " K"], "Problem"]]:
        """Yields each head that has such rows, their indices, and the problem of these K alone."""
        as_given = self.value * self.unit[:, None, None] if self.original is None else self.original
        for head, some in enumerate(rows.any(dim=-1).tolist()):
            if some:
                which = rows[head].nonzero()[:, 0]
                weights = renormalised(self.weights[head, which].double())[None]
                value = as_given[head].double()[None]
                value = value - smallest(weights @ value)
                visible = None if self.visible is None else self.visible[head, which][None]
                unit = value.new_ones(1)
                yield head, which, Problem(value, weights @ value, weights, visible, unit)


def unresolved(
    distance: Float[Tensor, "*batch M"],
    farthest: Float[Tensor, "*batch"],
    output: Float[Tensor, "*batch V"],
) -> Bool[Tensor, "*batch"]:
    """Finds rows whose squared distances from o (infinite where hidden) fp32 cannot tell apart.

    Most values lie closer to o than 1e-3 of the largest distance, or of ||o||, of centred values:
    next to one value far away, or in a row far from the centre, little is left of the others'
    digits.
    """
    wide = WIDE[distance.dtype]
    farthest = torch.maximum(farthest, output.square().sum(dim=-1))
    close = (distance < wide * farthest[..., None]).sum(dim=-1)
    visible = (distance < torch.inf).sum(dim=-1)
    return (2 * close > visible) | ((visible > 0) & (farthest < SMALLEST * (wide > 0)))


def flatten(call: Call) -> Problem:
    """Makes a Problem of one attention call; H counts all leading dimensions together."""
    weights, batch = call.weights, call.batch
    (queries, keys), heads = weights.shape[-2:], torch.Size(batch).numel()
    weights = weights.expand(*batch, queries, keys).reshape(heads, queries, keys)
    as_given, value = (
        x.value.expand(*batch, keys, -1).reshape(heads, keys, call.value.shape[-1])
        for x in (call, call.centred)
    )
    # To unit size by a power of two, which rounds nothing and keeps squares in range.
    _, exponent = value.abs().flatten(1).amax(-1).frexp()
    value = value * torch.exp2(-exponent.to(value.dtype))[:, None, None]
    visible = call.visible
    if visible is not None:
        visible = visible.expand(*batch, queries, keys).reshape(heads, queries, keys)
    unit = torch.exp2(exponent.to(value.dtype))
    return Problem(value, weights @ value, weights, visible, unit, as_given)
