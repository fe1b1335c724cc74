"""The optimal choices of keys equal references and keep their promises."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import ENGINES, SEARCHES, VALUES, spread
from methods import KERNELS, draw

from tests.reference import approximations as reference
from tests.reference import solver as reference_solver
from value_aware_attention import attention
from value_aware_attention.approximations import (
    ObliviousKeysOptimalWeights,
    OptimalValueAware,
    OptimalValueOblivious,
    SparseWeights,
    ValueAwareKeysAttentionWeights,
)
from value_aware_attention.attention import attention_weights
from value_aware_attention.kernels import Exponential

SIMILARITIES = {name: getattr(reference, name) for name in KERNELS}
seeds = st.integers(0, 2**31)
quick = settings(max_examples=10, deadline=None)
every_search = pytest.mark.parametrize("search", SEARCHES)
every_solver = pytest.mark.parametrize(
    ("search", "engine"), list(itertools.product(SEARCHES, ENGINES))
)


@pytest.mark.parametrize("name", KERNELS)
@quick
@given(seed=seeds, keys=st.integers(1, 12), r=st.integers(1, 12), causal=st.booleans())
def test_oblivious_and_aware_1_against_their_references(
    name: str, seed: int, keys: int, r: int, causal: bool
) -> None:
    query, key, value = draw(seed, keys, 4)
    options = {"kernel": KERNELS[name], "is_causal": causal}
    alpha = attention_weights(query, key, **options)
    oblivious = OptimalValueOblivious(r).select(query, key, value, **options).dense(keys)
    aware = OptimalValueAware(1).select(query, key, value, **options)
    for row in range(keys):
        visible = torch.arange(keys) <= (row if causal else keys)
        expected = reference.attention_weights(query[row], key, SIMILARITIES[name], visible)
        torch.testing.assert_close(alpha[row], expected)
        torch.testing.assert_close(oblivious[row], reference.optimal_value_oblivious(expected, r))
        closest = reference.optimal_value_aware_1(expected, value, visible)
        assert aware.indices[row].item() == closest
    assert aware.optimal is not None and aware.optimal.all()


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
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", [0, 20])
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


def test_the_error_is_recomputed_in_fp64() -> None:
    query, key, value = (x.float() for x in draw(6, 40, 8))
    for r in (2, 9):
        chosen = OptimalValueAware(r).select(query, key, value)
        output = attention(query.double(), key.double(), value.double())
        combined = (chosen.weights.double()[..., None] * value.double()[chosen.indices]).sum(-2)
        error = (combined - output).norm(dim=-1)
        # fp32 sums could be wrong by more than what they leave at r = value_dim + 1
        torch.testing.assert_close(chosen.error.sqrt().double(), error, atol=2e-6, rtol=1e-5)


# Against the other choices


INPUTS = {
    "peaked": lambda q, k, v: (8 * q, k, v),
    "usual": lambda q, k, v: (q, k, v),
    "flat": lambda q, k, v: (0.01 * q, k, v),
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
        for row in range(0, 16, 3):
            alone = method.select(query[row : row + 1], key[: row + 1], value[: row + 1])
            torch.testing.assert_close(causal.error[row], alone.error[0], rtol=1e-7, atol=tolerance)
            assert causal.optimal is not None and alone.optimal is not None
            assert causal.optimal[row] == alone.optimal[0]
    path = OptimalValueAware(3, search, engine).path(query, key, value, is_causal=True)
    for row in range(0, 16, 3):
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
        for r in (1, 4, 8):
            error = OptimalValueAware(r, search, engine).select(*tensors, is_causal=causal).error
            assert (path[:, r - 1] <= error * (1 + 1e-7) + slack).all()
            oblivious = ObliviousKeysOptimalWeights(r).select(*tensors, is_causal=causal).error
            assert (error <= oblivious * (1 + 1e-7) + slack).all()
            assert (path[:, r - 1] <= oblivious * (1 + 1e-7) + slack).all()
            if r in (1, 8):
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


# Identities of section 3


def test_the_example_of_section_3() -> None:
    """v = (1,0,0), (0,2,0), (0,0,3) with alpha = .25, .35, .4: distances 2.4925, 3.1925, 3.7925."""
    value = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    alpha = torch.tensor([0.25, 0.35, 0.40], dtype=torch.float64)
    query, key = torch.ones(1, 1, dtype=torch.float64), alpha.log()[:, None]
    kernel = Exponential(scale=1.0)
    torch.testing.assert_close(attention_weights(query, key, kernel=kernel)[0], alpha)
    distances = (attention(query, key, value, kernel=kernel) - value).square().sum(-1)
    torch.testing.assert_close(distances, torch.tensor([2.4925, 3.1925, 3.7925]).double())
    assert OptimalValueAware(1).select(query, key, value, kernel=kernel).indices.item() == 0
    assert OptimalValueOblivious(1).select(query, key, value, kernel=kernel).indices.item() == 2
