"""Section 3's argument, measured: the less skewed the kernel, the more the values matter.

The same queries and keys are weighed by kernels of different skewness, and the error of attention's
own top keys is held against that of the value-aware choice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.call import Call
from value_aware_attention.distributed import shared_map
from value_aware_attention.kernels import Polynomial
from value_aware_attention.measurement.layer_errors import oblivious_path, rounded
from value_aware_attention.measurement.record import GapCell, SkewnessGap
from value_aware_attention.measurement.recorded import sample_rows
from value_aware_attention.measurement.skewness import skewness_of

__all__ = ["skewness_gap"]

DEGREES = (0, 2, 4, 6)
SIZES = (1, 4, 16)
SHAPE = ("largest_weight", "effective_keys", "rows_over_half")


@torch.inference_mode()
def skewness_gap(
    calls: Sequence[Call], *, rows: int, search: str = "default", seed: int = 0
) -> SkewnessGap:
    """Measures, on `rows` queries of each head and unit, every layer under several kernels.

    They are the layer's own kernel and polynomials of degree 0, 2, 4, 6 in its place (post hoc),
    each with the skewness of its rows, the relative errors (summed squared error / summed squared
    norm of the output) of attention's top r keys and of r value-aware keys, and the share of rows
    where both keep the same key at r = 1. At degree 0 also: how often the value-aware key is
    argmin ||v_i||, which section 3 derives for orthogonal values, and argmin ||v_i||^2 -
    2 <v_i, mean v>, which Eq. 3 gives for any.

    Keys come in a random order, different in every head: weights that tie, as all do at degree 0,
    are taken in order, and the first tokens of a text are not like the others.
    """
    wanted = rows * len(calls[0].query) * calls[0].query.shape[1]

    def measured(layer: int) -> list[GapCell]:
        own_rows = _shuffled(sample_rows(calls[layer], wanted), seed + layer)
        return [_cell(layer, weighed, search, own) for own, weighed in _kernels(own_rows)]

    cells = chain.from_iterable(shared_map(measured, range(len(calls))))
    return SkewnessGap(rows=sample_rows(calls[0], wanted).rows.numel(), cells=tuple(cells))


def _kernels(rows: Call) -> Iterator[tuple[bool, Call]]:
    yield True, rows
    for degree in DEGREES:
        yield False, replace(rows, kernel=Polynomial(degree))


def _shuffled(rows: Call, seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows.key.shape[:-1], generator=generator).argsort(dim=-1)
    order = order.to(rows.key.device)
    key, value = (
        x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[-1]))
        for x in (rows.key, rows.value)
    )
    visible = rows.visible
    if visible is not None:
        visible = visible.gather(3, order[:, :, None].expand_as(visible))
    return replace(rows, key=key, value=value, attn_mask=visible)


def _cell(layer: int, rows: Call, search: str, own: bool) -> GapCell:
    weights = rows.weights
    shape = skewness_of(weights)
    first = OptimalValueAware(1).select(**rows.arguments()).indices[..., 0]
    same = first == weights.argmax(dim=-1)
    sizes = [r for r in SIZES if r <= rows.key.shape[-2]]
    norm = (weights @ rows.value).square().sum().item()
    aware = OptimalValueAware(sizes[-1], search).path(**rows.arguments())
    degree = rows.kernel.degree if isinstance(rows.kernel, Polynomial) else None
    return GapCell(
        layer=layer,
        kernel=type(rows.kernel).__name__.lower(),
        degree=degree,
        own=own,
        **{name: rounded(shape[name]) for name in SHAPE},
        oblivious=_relative(oblivious_path(rows, sizes[-1]), norm, sizes),
        aware=_relative(aware, norm, sizes),
        same_first_key=_share(same),
        **(_uniform(rows, first) if degree == 0 else {}),
    )


def _relative(path: Float[Tensor, "B H N R"], norm: float, sizes: list[int]) -> dict[str, float]:
    found = sizes if norm else []  # of outputs that are 0 no error is a share
    return {str(r): rounded(path[..., r - 1].sum().item() / norm) for r in found}


def _uniform(rows: Call, first: Int[Tensor, "B H N"]) -> dict[str, float]:
    """Compares the value-aware key at degree 0 (alpha = 1 / M) with two predictions, up to ties."""
    weights = rows.weights
    squared = rows.value.square().sum(dim=-1)[:, :, None].expand_as(weights)
    to_mean = squared - 2 * (weights @ rows.value) @ rows.value.transpose(-2, -1)
    return {
        "smallest_norm_key": _share(_smallest(squared, rows.visible, first)),
        "closest_to_mean_key": _share(_smallest(to_mean, rows.visible, first)),
    }


def _smallest(
    score: Float[Tensor, "B H N M"],
    visible: Bool[Tensor, "B H N M"] | None,
    chosen: Int[Tensor, "B H N"],
) -> Bool[Tensor, "B H N"]:
    """Tells where no visible key's score is below the chosen one's, up to rounding."""
    if visible is not None:
        score = score.masked_fill(~visible, torch.inf)
    scale = _rounding(score)
    return score.gather(-1, chosen[..., None])[..., 0] <= score.amin(dim=-1) + scale


def _rounding(score: Float[Tensor, "B H N M"]) -> float:
    """Bounds the difference of sums of these numbers that are taken in another order."""
    return 1e-12 * score[score.isfinite()].abs().max().item()


def _share(rows: Bool[Tensor, "B H N"]) -> float:
    return rounded(rows.double().mean().item())
