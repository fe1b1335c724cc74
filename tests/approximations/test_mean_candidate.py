"""The mean of the visible values as one more candidate of the closest combination."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from tests.approximations.instances import ENGINES, SEARCHES, TEMPERATURES, VALUES
from value_aware_attention.approximations import ObliviousKeysOptimalWeights, OptimalValueAware
from value_aware_attention.attention import attention, attention_weights
from value_aware_attention.kernels import KERNELS, Kernel

WIDTH = 5


def closest(candidates: Tensor) -> float:
    """Computes the squared norm of the shortest convex combination of vectors (C, V), in fp64."""
    scale = candidates.norm(dim=-1).max().clamp_min(1e-300)
    lifted = torch.cat([candidates / scale, torch.ones(len(candidates), 1)], dim=1).double()
    mass, _ = nnls(lifted.T.numpy(), [0.0] * candidates.shape[1] + [1.0], maxiter=10**4)
    weights = torch.from_numpy(mass / mass.sum())
    return float((weights @ candidates).square().sum())


def optimum(value: Tensor, alpha: Tensor, r: int) -> float:
    """Computes the smallest ||o - o~||^2 of r candidates, values or their mean, by trying all."""
    candidates = torch.cat([value, value.mean(dim=0, keepdim=True)]) - alpha @ value
    sets = combinations(range(len(candidates)), min(r, len(candidates)))
    return min(closest(candidates[list(places)]) for places in sets)


def drawn(seed: int, queries: int, keys: int, values: str, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
        for n in (queries, keys, keys)
    )
    return [query, key / scale, VALUES[values](value)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    keys=st.integers(1, 9),
    r=st.integers(1, 4),
    values=st.sampled_from(sorted(VALUES)),
    scale=st.sampled_from(sorted(TEMPERATURES.values())),
    engine=st.sampled_from(ENGINES),
    search=st.sampled_from(SEARCHES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    masked=st.booleans(),
)
def test_the_error_lies_between_the_optimum_and_that_without_the_mean(
    seed: int, keys: int, r: int, values: str, scale: float, engine: str, search: str,
    dtype: torch.dtype, masked: bool,
) -> None:  # fmt: skip
    inputs = [x.to(dtype) for x in drawn(seed, 3, keys, values, scale)]
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, keys, generator=generator) < 0.6 if masked else None
    method = OptimalValueAware(r, search, engine, mean=True)
    chosen = method.select(*inputs, attn_mask=mask)
    without = OptimalValueAware(r, search, engine).select(*inputs, attn_mask=mask)
    assert chosen.mean_weight is not None and without.mean_weight is None
    query, key, value = (x.double() for x in inputs)
    alpha = attention_weights(query, key, attn_mask=mask)
    assert (chosen.support() <= r).all()
    dense = chosen.dense(keys).double()
    for row, weights in enumerate(alpha):
        visible = torch.ones(keys, dtype=torch.bool) if mask is None else mask[row]
        if not visible.any():
            assert (dense[row] == 0).all() and (chosen.mean_weight[row] == 0)
            continue
        assert dense[row].sum() == pytest.approx(1, abs=1e-5)
        assert (dense[row][~visible] == 0).all() and (dense[row] >= 0).all()
        points = value[visible] - weights[visible] @ value[visible]
        spread = float(weights[visible] @ points.norm(dim=-1)) + float(value.abs().max())
        rounding = max((100 * torch.finfo(dtype).eps) ** 2, 1e-15) * spread**2
        error, least = float(chosen.error[row]), optimum(value[visible], weights[visible], r)
        reached = float((dense[row][visible] @ points).square().sum())
        assert error == pytest.approx(reached, rel=1e-3, abs=rounding)
        assert least * (1 - 1e-4) - rounding <= error
        assert error <= float(without.error[row]) * (1 + 1e-4) + rounding
        if r == 1 or (r == 2 and search == "best"):
            assert error == pytest.approx(least, rel=1e-4, abs=rounding)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("r", "search"), [(1, "fast"), (2, "best"), (WIDTH + 1, "fast")])
def test_the_proofs_hold_with_the_mean(kernel: type[Kernel], r: int, search: str) -> None:
    inputs = drawn(3, 30, 30, "gauss", 1.0)
    chosen = OptimalValueAware(r, search, mean=True).select(
        *inputs, kernel=kernel(), is_causal=True
    )
    assert chosen.optimal is not None and chosen.optimal.float().mean() > 0.9
    assert chosen.mean_weight is not None and bool((chosen.mean_weight > 0).any()) is (r <= 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("search", SEARCHES)
def test_engines_agree_and_the_path_holds_every_size(engine: str, search: str) -> None:
    inputs = [torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    options: dict[str, Any] = {"is_causal": True}
    method = OptimalValueAware(4, search, engine, mean=True)
    chosen = method.select(*inputs, **options)
    other = OptimalValueAware(4, search, mean=True).select(*inputs, **options)
    assert chosen.error.sum() == pytest.approx(float(other.error.sum()), rel=0.02)
    path = method.path(*inputs, **options)
    without = OptimalValueAware(4, search, engine).path(*inputs, **options)
    assert (path <= without * (1 + 1e-4) + 1e-9).all() and (path.diff() <= 0).all()
    assert path[..., 3].sum() < 0.9 * without[..., 3].sum()


def test_the_output_and_the_gradient_of_the_values_hold_the_mean() -> None:
    query, key, value = drawn(5, 12, 12, "gauss", 100.0)
    value.requires_grad_()
    method = OptimalValueAware(2, mean=True)
    chosen = method.select(query, key, value, is_causal=True)
    output = method(query, key, value, is_causal=True)
    torch.testing.assert_close(output, chosen.dense(12) @ value)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    expected = chosen.dense(12).sum(dim=0)[:, None].expand_as(value)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("r", [1, 2, 5, 31])
def test_fewer_keys_by_weight_and_the_mean_get_the_best_weights(r: int) -> None:
    query, key, value = drawn(7, 30, 30, "gauss", 0.5)
    method = ObliviousKeysOptimalWeights(r, mean=True)
    chosen = method.select(query, key, value, is_causal=True)
    alpha = attention_weights(query, key, is_causal=True)
    for row in range(30):
        heaviest = alpha[row, : row + 1].argsort(descending=True)[: r - 1]
        points = value[: row + 1] - alpha[row] @ value
        candidates = torch.cat([points[heaviest], points.mean(dim=0, keepdim=True)])
        assert float(chosen.error[row]) == pytest.approx(closest(candidates), rel=1e-4, abs=1e-12)
    exact = attention(query, key, value, is_causal=True)
    error = (method(query, key, value, is_causal=True) - exact).square().sum(dim=-1)
    torch.testing.assert_close(error, chosen.error, rtol=1e-3, atol=1e-12)


def test_mean_is_a_flag() -> None:
    with pytest.raises(ValueError, match="mean is 'yes'; it must be True or False"):
        OptimalValueAware(3, mean="yes")  # type: ignore[arg-type]
    assert "mean" not in str(OptimalValueAware(3)) and "mean=True" in str(
        OptimalValueAware(3, mean=True)
    )
