"""The optimal choices of keys equal references and keep their promises."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import ENGINES, SEARCHES, TEMPERATURES, VALUES, spread
from methods import KERNELS, draw

from tests.reference import solver as reference_solver
from value_aware_attention import attention
from value_aware_attention.approximations import (
    ObliviousKeysOptimalWeights,
    OptimalValueAware,
    OptimalValueOblivious,
    SparseWeights,
    ValueAwareKeysAttentionWeights,
)
from value_aware_attention.approximations.closest_combination import pairs
from value_aware_attention.attention import attention_weights
from value_aware_attention.kernels import Exponential, Kernel

seeds = st.integers(0, 2**31)
quick = settings(max_examples=10, deadline=None)
every_search = pytest.mark.parametrize("search", SEARCHES)
every_solver = pytest.mark.parametrize(
    ("search", "engine"), list(itertools.product(SEARCHES, ENGINES))
)


# One value far from all others


def outlier(where: int, size: float, *, attended: bool = True) -> list[torch.Tensor]:
    """Draws 64 fp32 rows of width 8 and multiplies one value, which is attended to or not."""
    query, key, value = (x.float() for x in draw(1, 64, 8))
    value[where] *= size
    if not attended:
        query[:, 0], key[:, 0], key[where, 0] = -30, 0, 5
    return [query, key, value]


def exactly(
    chosen: SparseWeights, inputs: list[torch.Tensor], mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes ||o - o~||, all ||o - v|| and ||o|| in fp64, measured from each row's o."""
    query, key, value = inputs
    alpha = attention_weights(query, key, attn_mask=mask).double()
    output = alpha / alpha.sum(-1, keepdim=True) @ value.double()
    away = value.double() - output[:, None]
    weights = chosen.weights.double() / chosen.weights.double().sum(-1, keepdim=True)
    left = (weights[..., None] * away.take_along_dim(chosen.indices[..., None], 1)).sum(1)
    distance = away.norm(dim=-1)
    distance = distance if mask is None else distance.masked_fill(~mask, torch.inf)
    return left.norm(dim=-1), distance, output.norm(dim=-1)


@every_solver
@pytest.mark.parametrize(("where", "causal"), [(0, True), (20, False)])
def test_a_value_far_away_takes_no_digits_from_the_others(
    search: str, engine: str, causal: bool, where: int
) -> None:
    inputs = outlier(where, 1e6, attended=False)
    mask = torch.ones(64, 64, dtype=torch.bool).tril() if causal else None
    for r in (1, 4, 9):
        chosen = OptimalValueAware(r, search, engine).select(*inputs, attn_mask=mask)
        left, distance, norm = exactly(chosen, inputs, mask)
        if r == 1:
            assert (left <= distance.amin(-1) * (1 + 1e-5) + 1e-6 * norm).all()
        if r == 9:
            assert (left <= 5e-6 * norm).all()
            path = OptimalValueAware(9, search, engine).path(*inputs, attn_mask=mask)
            assert (path.diff(dim=-1) <= 0).all() and (path[:, 8].sqrt() <= 5e-6 * norm).all()
        assert chosen.optimal is not None and (r == 4 or bool(chosen.optimal.all()))
        torch.testing.assert_close(
            chosen.error.double().sqrt(), left, rtol=1e-4, atol=float(1e-6 * norm.median())
        )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e3, 1e6, 1e20])
def test_what_is_called_optimal_is(engine: str, size: float) -> None:
    """Beyond the digits of fp64 nothing is called optimal."""
    for where, attended in ((0, False), (20, False), (20, True)):
        for r, causal in itertools.product((1, 2, 9), (False, True)):
            inputs = outlier(where, size, attended=attended)
            mask = torch.ones(64, 64, dtype=torch.bool).tril() if causal else None
            chosen = OptimalValueAware(r, engine=engine).select(*inputs, attn_mask=mask)
            left, distance, norm = exactly(chosen, inputs, mask)
            alpha = attention_weights(*inputs[:2], attn_mask=mask).double()
            spread_of_row = (alpha * distance.nan_to_num(posinf=0.0)).sum(-1)
            proved = left <= 4e-6 * spread_of_row + 1.2e-6 * norm
            proved |= (r == 1) & (left <= distance.amin(-1) * (1 + 1e-5))
            assert chosen.optimal is not None and proved[chosen.optimal].all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e3, 1e6, 1e20])
def test_values_a_row_does_not_see_do_not_move_it(engine: str, size: float) -> None:
    """Neither the future nor padding moves a row, not even by rounding."""
    padding = torch.ones(1, 64, dtype=torch.bool)
    padding[0, 63] = False
    for r, options in itertools.product((1, 4, 9), ({"is_causal": True}, {"attn_mask": padding})):
        for method in (
            OptimalValueAware(r, engine=engine),
            ObliviousKeysOptimalWeights(r),
            ValueAwareKeysAttentionWeights(r),
            OptimalValueOblivious(r),
        ):
            near, far = (method.select(*outlier(63, factor), **options) for factor in (1.0, size))
            rows = slice(63) if "is_causal" in options else slice(64)
            weights, errors = (x.dense(64)[rows] for x in (near, far)), (near.error, far.error)
            if size < 1e20 and (engine == "compiled" or not isinstance(method, OptimalValueAware)):
                assert torch.equal(*weights) and torch.equal(*(x[rows] for x in errors))
                continue
            # Batched products round by how many rows they hold; beyond 1e18 rows go to fp64.
            torch.testing.assert_close(*weights, rtol=0, atol=5e-6)
            torch.testing.assert_close(*(x[rows] for x in errors), rtol=1e-4, atol=1e-10)


# What a selection is


@every_solver
@quick
@given(seed=seeds, r=st.integers(1, 7), name=st.sampled_from(list(KERNELS)))
def test_the_error_is_that_of_the_indices_and_weights_returned(
    search: str, engine: str, seed: int, r: int, name: str
) -> None:
    query, key, value = draw(seed, 14, 5)
    mask = torch.rand(14, 14, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[3] = False
    options = {"kernel": KERNELS[name], "attn_mask": mask}
    chosen = OptimalValueAware(r, search, engine).select(query, key, value, **options)
    assert chosen.indices.shape == chosen.weights.shape == (14, min(r, 14))
    output = attention(query, key, value, **options)
    recomputed = (chosen.weights[..., None] * value[chosen.indices]).sum(-2)
    torch.testing.assert_close(
        chosen.error, (output - recomputed).square().sum(-1), rtol=1e-9, atol=1e-20
    )
    assert (chosen.weights >= 0).all() and (chosen.dense(14)[~mask] == 0).all()
    torch.testing.assert_close(chosen.weights.sum(-1), mask.any(-1).double())
    assert chosen.optimal is not None and chosen.optimal[3] and chosen.error[3] == 0
    few = mask.sum(-1) <= r
    assert chosen.optimal[few].all() and (chosen.error[few] <= 1e-18).all()


# Against the other choices


INPUTS = {
    "peaked": lambda q, k, v: (8 * q, k, v),
    "heavy tails": lambda q, k, v: (q, k, v * torch.exp(3 * v[:, :1].roll(1, dims=0))),
}


@every_solver
@pytest.mark.parametrize("values", ["heavy tails", "duplicates"])
def test_a_causal_row_is_the_call_on_its_prefix(search: str, engine: str, values: str) -> None:
    query, key, value = draw(12, 16, 6)
    value = VALUES[values](value)
    tolerance = float(1e-12 * spread(value) ** 2)
    for r in (1, 3, 7):
        method = OptimalValueAware(r, search, engine)
        causal = method.select(query, key, value, is_causal=True)
        assert (causal.indices <= torch.arange(16)[:, None]).logical_or(causal.weights == 0).all()
        for row in (0, 5, 15):
            alone = method.select(query[row : row + 1], key[: row + 1], value[: row + 1])
            torch.testing.assert_close(causal.error[row], alone.error[0], rtol=1e-7, atol=tolerance)
            assert causal.optimal is not None and alone.optimal is not None
            assert causal.optimal[row] == alone.optimal[0]
    path = OptimalValueAware(3, search, engine).path(query, key, value, is_causal=True)
    for row in (0, 5, 15):
        prefix = query[row : row + 1], key[: row + 1], value[: row + 1]
        alone_path = OptimalValueAware(3, search, engine).path(*prefix)[0]
        torch.testing.assert_close(path[row], alone_path, rtol=1e-7, atol=tolerance)


# Every size from one solve


@every_solver
@pytest.mark.parametrize("inputs", INPUTS)
def test_the_path_holds_the_error_of_every_size(search: str, engine: str, inputs: str) -> None:
    tensors = INPUTS[inputs](*draw(14, 12, 7))
    method = OptimalValueAware(8, search, engine)
    for causal in (False, True):
        path = method.path(*tensors, is_causal=causal)
        assert path.shape == (12, 8) and (path >= 0).all()
        assert (path.diff(dim=-1) <= 0).all()
        slack = 1e-12 * spread(tensors[2]) ** 2
        for r in (1, 2, 4, 8):
            error = OptimalValueAware(r, search, engine).select(*tensors, is_causal=causal).error
            assert (path[:, r - 1] <= error * (1 + 1e-7) + slack).all()
            oblivious = ObliviousKeysOptimalWeights(r).select(*tensors, is_causal=causal).error
            assert (error <= oblivious * (1 + 1e-7) + slack).all()
            assert (path[:, r - 1] <= oblivious * (1 + 1e-7) + slack).all()
            if r in (1, 8) or (r, search) == (2, "best"):
                torch.testing.assert_close(path[:, r - 1], error, rtol=1e-7, atol=float(slack))
    assert (path[:, 7] <= slack).all()  # value_dim + 1 keys


@every_solver
def test_the_path_never_goes_below_brute_force(search: str, engine: str) -> None:
    query, key, value = draw(16, 9, 6)
    output = attention(query, key, value)
    path = OptimalValueAware(5, search, engine).path(query, key, value)
    for row, size in itertools.product(range(9), range(1, 6)):
        best = reference_solver.brute_force(value, output[row], size)
        optimum = reference_solver.squared_error(best, value, output[row])
        assert path[row, size - 1] >= optimum - 1e-12


@every_solver
def test_the_path_is_flat_beyond_the_keys_and_zero_where_nothing_is_visible(
    search: str, engine: str
) -> None:
    query, key, value = draw(18, 4, 9)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    path = OptimalValueAware(7, search, engine).path(query, key, value, attn_mask=mask)
    assert path.shape == (4, 7)
    assert (path[:, 4:] == path[:, 3:4]).all() and (path[:, 3] <= 1e-18).all()
    assert (path[2] == 0).all() and (path[0, :3] > 1e-3).all()
    chosen = OptimalValueAware(7, search, engine).select(query, key, value, attn_mask=mask)
    assert chosen.indices.shape == (4, 4)


# Against every set of few keys, with and without the mean of the visible values


def drawn(seed: int, queries: int, keys: int, values: str, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (queries, keys, keys)
    )
    return [query, key / scale, VALUES[values](value)]


def least_error(points: torch.Tensor, weights: torch.Tensor) -> float:
    """Computes ||sum_i w_i p_i||^2, the error of weights on values centred on the output."""
    return float(reference_solver.squared_error(weights, points, torch.zeros_like(points[0])))


def of_pairs(points: torch.Tensor) -> float:
    return least_error(points, reference_solver.all_pairs(points, torch.zeros_like(points[0])))


def with_the_mean(points: torch.Tensor, r: int) -> float:
    candidates = torch.cat([points, points.mean(dim=0, keepdim=True)])
    return least_error(
        candidates, reference_solver.brute_force(candidates, torch.zeros_like(points[0]), r)
    )


def held_to(
    chosen: SparseWeights, inputs: list[torch.Tensor], mask: torch.Tensor | None,
    least: Callable[[torch.Tensor], float], kernel: Kernel = Exponential(),
) -> list[tuple[int, float, float, float]]:  # fmt: skip
    """Lists each row that sees a key, its error, the least error of its values, and the rounding.

    The weights must be a distribution on the visible keys, and leave the error that is reported.
    """
    query, key, value = (x.double() for x in inputs)
    alpha = attention_weights(query, key, kernel=kernel, attn_mask=mask)
    visible, dense = alpha == alpha if mask is None else mask, chosen.dense(len(key)).double()
    assert (dense >= 0).all() and (dense[~visible] == 0).all()
    torch.testing.assert_close(dense.sum(-1), visible.any(-1).double(), atol=1e-5, rtol=0)
    rows = []
    for row in visible.any(-1).nonzero()[:, 0].tolist():
        keys, error = visible[row], float(chosen.error[row])
        points = value[keys] - alpha[row, keys] @ value[keys]
        scale = float(alpha[row, keys] @ points.norm(dim=-1) + value.abs().max())
        rounding = max((100 * torch.finfo(inputs[2].dtype).eps) ** 2, 1e-15) * scale**2
        reached = least_error(points, dense[row, keys])
        assert error == pytest.approx(reached, rel=1e-3, abs=rounding)
        rows.append((row, error, least(points), rounding))
    return rows


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds,
    keys=st.integers(1, 14),
    values=st.sampled_from(sorted(VALUES)),
    scale=st.sampled_from(sorted(TEMPERATURES.values())),
    engine=st.sampled_from(ENGINES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    masked=st.booleans(),
    outlier=st.sampled_from([0.0, 1e2, 1e6]),
)
def test_no_pair_is_closer_than_that_of_the_best_search(
    seed: int, keys: int, values: str, scale: float, engine: str, dtype: torch.dtype,
    masked: bool, outlier: float,
) -> None:  # fmt: skip
    query, key, value = drawn(seed, 5, keys, values, scale)
    value[0] += outlier
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, keys, generator=generator) < 0.6 if masked else None
    inputs = [x.to(dtype) for x in (query, key, value)]
    chosen = OptimalValueAware(2, "best", engine).select(*inputs, attn_mask=mask)
    for _, error, least, rounding in held_to(chosen, inputs, mask, of_pairs):
        assert error == pytest.approx(least, rel=2e-5, abs=rounding)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_pairs_of_ordinary_rows_are_proved_with_every_kernel(kernel: Kernel) -> None:
    inputs, mask = draw(3, 12, 8, dtype=torch.float32), torch.ones(12, 12, dtype=torch.bool).tril()
    chosen = OptimalValueAware(2, "best").select(*inputs, kernel=kernel, attn_mask=mask)
    for _, error, least, rounding in held_to(chosen, inputs, mask, of_pairs, kernel):
        assert error == pytest.approx(least, rel=2e-5, abs=rounding)
    assert chosen.optimal is not None and chosen.optimal.float().mean() > 0.9


def test_above_512_keys_nothing_is_proved_by_pairs() -> None:
    generator = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(n, 8, generator=generator) for n in (2, 513, 513))
    for keys, is_proved in ((pairs.PAIR_KEYS, True), (pairs.PAIR_KEYS + 1, False)):
        chosen = OptimalValueAware(2, "best").select(query, key[:keys], value[:keys])
        assert chosen.optimal is not None and bool(chosen.optimal.all()) is is_proved


@settings(max_examples=40, deadline=None)
@given(
    seed=seeds,
    keys=st.integers(1, 9),
    r=st.integers(1, 4),
    values=st.sampled_from(sorted(VALUES)),
    scale=st.sampled_from(sorted(TEMPERATURES.values())),
    engine=st.sampled_from(ENGINES),
    search=st.sampled_from(SEARCHES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    masked=st.booleans(),
)
def test_the_error_with_the_mean_lies_between_the_optimum_and_that_without(
    seed: int, keys: int, r: int, values: str, scale: float, engine: str, search: str,
    dtype: torch.dtype, masked: bool,
) -> None:  # fmt: skip
    inputs = [x.to(dtype) for x in drawn(seed, 3, keys, values, scale)]
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, keys, generator=generator) < 0.6 if masked else None
    chosen, without = (
        OptimalValueAware(r, search, engine, mean=mean).select(*inputs, attn_mask=mask)
        for mean in (True, False)
    )
    assert chosen.mean_weight is not None and without.mean_weight is None
    assert (chosen.support() <= r).all()
    for row, error, least, rounding in held_to(
        chosen, inputs, mask, lambda points: with_the_mean(points, r)
    ):
        assert least * (1 - 1e-4) - rounding <= error
        assert error <= float(without.error[row]) * (1 + 1e-4) + rounding
        if r == 1 or (r == 2 and search == "best"):
            assert error == pytest.approx(least, rel=1e-4, abs=rounding)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("r", "search"), [(1, "fast"), (2, "best"), (6, "fast")])
def test_the_proofs_hold_with_the_mean(kernel: Kernel, r: int, search: str) -> None:
    inputs = drawn(3, 30, 30, "gauss", 1.0)
    chosen = OptimalValueAware(r, search, mean=True).select(*inputs, kernel=kernel, is_causal=True)
    assert chosen.optimal is not None and chosen.optimal.float().mean() > 0.9
    assert chosen.mean_weight is not None and bool((chosen.mean_weight > 0).any()) is (r <= 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("search", SEARCHES)
def test_engines_agree_and_the_path_holds_every_size(engine: str, search: str) -> None:
    inputs = [torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    method = OptimalValueAware(4, search, engine, mean=True)
    chosen = method.select(*inputs, is_causal=True)
    other = OptimalValueAware(4, search, mean=True).select(*inputs, is_causal=True)
    assert chosen.error.sum() == pytest.approx(float(other.error.sum()), rel=0.02)
    path = method.path(*inputs, is_causal=True)
    without = OptimalValueAware(4, search, engine).path(*inputs, is_causal=True)
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
        mean = value[: row + 1].mean(dim=0, keepdim=True)
        candidates, output = torch.cat([value[heaviest], mean]), alpha[row] @ value
        weights = reference_solver.closest_in_hull(candidates, output)
        least = float(reference_solver.squared_error(weights, candidates, output))
        assert float(chosen.error[row]) == pytest.approx(least, rel=1e-4, abs=1e-12)
    exact = attention(query, key, value, is_causal=True)
    error = (method(query, key, value, is_causal=True) - exact).square().sum(dim=-1)
    torch.testing.assert_close(error, chosen.error, rtol=1e-3, atol=1e-12)
