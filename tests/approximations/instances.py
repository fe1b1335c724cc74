"""Draws problems for the tests of the optimal choices, with values and weights of every kind."""

import torch
from torch import Tensor

from value_aware_attention.approximations.closest_combination import Problem

ENGINES = ("compiled", "torch")
SEARCHES = ("fast", "default", "best")

TEMPERATURES = {"peaked": 0.1, "usual": 1.0, "flat": 100.0}

VALUES = {
    "gauss": lambda v: v,
    "heavy tails": lambda v: v * torch.exp(3 * v[..., :1].roll(1, dims=-2)),
    "far away": lambda v: 100 + 1e-3 * v,
    "rank 2": lambda v: v[..., :1] + v[..., -1:] * v.new_ones(v.shape[-1]).cumsum(0),
    "duplicates": lambda v: v[..., torch.arange(v.shape[-2]) // 3, :],
    "constant": lambda v: v[..., :1, :].expand_as(v),
    "small integers": lambda v: v.round(),  # many ties
    "fading directions": lambda v: v * torch.logspace(0, -5, v.shape[-1], dtype=v.dtype),
}


def draw(
    seed: int,
    *,
    heads: int = 1,
    queries: int = 4,
    keys: int = 12,
    width: int = 8,
    values: str = "gauss",
    weights: str = "usual",
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Draws values of one of VALUES, and weights softmax(standard normal / temperature)."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(heads, keys, width, generator=generator, dtype=torch.float64)
    scores = torch.randn(heads, queries, keys, generator=generator, dtype=torch.float64)
    alpha = (scores / TEMPERATURES[weights]).softmax(dim=-1)
    return problem(VALUES[values](raw), alpha, dtype=dtype)


def problem(
    value: Tensor,
    alpha: Tensor,
    visible: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Builds a problem of values (H, M, V), rounded to `dtype` and centred, and weights (H, N, M).

    The output is rounded once, at the end: rounded more often, it could leave the hull of values
    that lie far from the origin.
    """
    value = value.to(dtype)
    value = value - value.mean(dim=-2, keepdim=True)
    output = (alpha.double() @ value.double()).to(dtype)
    unit = torch.ones(len(value), dtype=dtype)
    return Problem(value, output, alpha.to(dtype), visible, unit)


def spread(value: Tensor) -> Tensor:
    """Computes max ||v - mean v|| per head (H,), the scale of errors."""
    value = value.double()
    return (value - value.mean(dim=-2, keepdim=True)).norm(dim=-1).amax(dim=-1)


def errors(problem: Problem, indices: Tensor, weights: Tensor) -> Tensor:
    """Computes ||o - sum_s w_s v_s||^2 (H, N) in fp64, with the values centred on o."""
    heads = torch.arange(len(indices))[:, None, None]
    centred = problem.value.double()[heads, indices] - problem.output.double()[:, :, None]
    return (weights.double()[..., None] * centred).sum(dim=-2).square().sum(dim=-1)


def attended(instance: Problem) -> Tensor:
    """Computes ||o|| + sum_i alpha_i ||v_i - o|| per row (H, N) in fp64, the scale of its rounding.

    A value far away that a row does not attend to makes nothing larger.
    """
    value, output, weights = (
        x.double() for x in (instance.value, instance.output, instance.weights)
    )
    away = (value[:, None] - output[:, :, None]).norm(dim=-1)
    return output.norm(dim=-1) + (weights * away).sum(dim=-1)
