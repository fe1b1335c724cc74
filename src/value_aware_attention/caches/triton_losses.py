"""Computes the losses of single keys with two fused Triton kernels, which store no weights.

The first is attention that keeps the key of each query's largest weight apart from the others. The
second sums over all queries of a head what a tile of keys needs; no other program adds to these
sums, so that two runs give the same numbers. Scores are in fp32, or in tf32x3, which is nearly as
precise; the products with values and outputs are in tf32.

The kernels have not been measured on a GPU, so `batched_losses` is the default. The environment
variable VALUE_AWARE_TRITON selects these: "ieee" or "tf32x3", the precision of the scores.
"""

import os
import warnings
from importlib import import_module
from importlib.util import find_spec

import torch

from value_aware_attention.caches.batched_losses import Heads, Losses, batched_losses
from value_aware_attention.caches.observed import Observed
from value_aware_attention.kernels import Exponential

VARIABLE, SCORES = "VALUE_AWARE_TRITON", ("ieee", "tf32x3")
TILE = 64
"""Queries and keys of a tile"""
WIDEST = 256
"""Largest head size: a tile of it must fit a processor's shared memory"""
LARGEST_ERROR = 1e-2
"""Largest error of a first head, relative to its largest loss; tf32 has three digits"""


def selected(observed: Observed) -> str:
    """Returns the precision of the scores; "" if the kernels do not compute these losses.

    They serve the exponential kernel in fp32 without a mask, at least two queries and two keys.
    Raises ValueError for an unknown value of the variable.
    """
    if not (scores := os.environ.get(VARIABLE, "")) or find_spec("triton") is None:
        return ""
    if scores not in SCORES:
        raise ValueError(f"{VARIABLE} is {scores!r}; it must be one of {', '.join(SCORES)}")
    is_served = (
        type(observed.kernel) is Exponential
        and observed.visible is None
        and torch.float64 not in (observed.query.dtype, observed.key.dtype, observed.value.dtype)
        and min(observed.query.shape[-2], observed.keys) > 1
        and max(observed.query.shape[-1], observed.value.shape[-1]) <= WIDEST
        and (observed.key.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")
    )
    return scores if is_served and _is_right(observed, scores) else ""


_CHECKED: dict[tuple[torch.device, str], bool] = {}


def _is_right(observed: Observed, scores: str) -> bool:
    """Compares one head with the batched form at the first use on a device; warns if it differs."""
    place = (observed.key.device, scores)
    if place not in _CHECKED:
        if problem := _difference(observed.cache((0,) * len(observed.batch)), scores):
            warnings.warn(
                f"the Triton kernels do not run as they should on {place[0]} ({problem}); losses "
                f"of single keys are computed by PyTorch",
                stacklevel=2,
            )
        _CHECKED[place] = not problem
    return _CHECKED[place]


def _difference(observed: Observed, scores: str) -> str:
    """Describes how the kernels fail; empty if they do not."""
    try:
        losses, outputs = triton_losses(observed, scores=scores)
    except Exception as error:  # a compiler or a driver may raise any kind
        return f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    exact, exact_outputs = batched_losses(observed)
    largest = max(
        float((x - y).abs().max() / y.abs().max().clamp_min(torch.finfo(y.dtype).tiny))
        for x, y in ((losses, exact), (outputs, exact_outputs))
    )
    return "" if largest <= LARGEST_ERROR else f"a relative difference of {largest:.1e}"


def triton_losses(
    observed: Observed, *, projected: bool = False, scores: str = "ieee", sums: str = "tf32"
) -> Losses:
    """Computes the losses and outputs of `single_losses`, in these precisions of products."""
    kernels = import_module("value_aware_attention.caches.triton_kernels")  # may lack Triton
    heads = Heads.of(observed, projected)
    (caches, keys, width), (groups, queries, dim) = heads.value.shape, observed.query.shape[-3:]
    assert isinstance(observed.kernel, Exponential)
    query = (heads.query * observed.kernel.scale_for(dim)).contiguous()
    key, value = heads.key.contiguous(), heads.value.contiguous()
    top, others = (value.new_empty(caches, groups * queries, 1) for _ in range(2))
    number = torch.empty(others.shape, dtype=torch.int32, device=value.device)
    changed = value.new_empty(caches, groups * queries, width)
    padded = (max(16, 1 << (size - 1).bit_length()) for size in (dim, width))
    sizes = (groups, queries, keys, dim, width, *padded, TILE, scores, sums)
    kernels.states[-(-queries // TILE), caches * groups](
        query, key, value, top, number, others, changed, *sizes
    )
    scale = torch.maximum(top, heads.log_mass)
    of_top = (top - scale).exp_()
    output, total, lost = heads.joined(
        None, number.long(), of_top, (heads.log_mass - scale).exp_(), others * of_top,
        changed * of_top,
    )  # fmt: skip
    by_head = heads.by_head(output)
    turned = heads.turned(by_head)
    length, norm = (
        (turned * by_head).sum(dim=-1),
        heads.squared(value.repeat_interleave(groups, dim=0)),
    )
    loss = value.new_empty(caches * groups, keys, 1)
    kernels.losses[-(-keys // TILE), caches * groups](
        query, key, value, turned, length, scale, total, number, norm, loss, *sizes
    )
    return heads.finished(loss, lost, output)
