"""The optimal choices against slow references, scipy and the identities of section 3."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import KERNELS
from scipy.optimize import nnls

from value_aware_attention import attention
from value_aware_attention.approximations import (
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
    reference,
)
from value_aware_attention.attention import attention_weights
from value_aware_attention.kernels import Exponential, Polynomial

SIMILARITIES = {name: getattr(reference, name) for name in KERNELS}
seeds = st.integers(0, 2**31)


def draw(seed: int, keys: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(keys, width, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=10, deadline=None)
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
        kept = reference.optimal_value_oblivious(expected, r)
        torch.testing.assert_close(oblivious[row], kept)
        closest = reference.optimal_value_aware_1(expected, value, visible)
        assert aware.indices[row].item() == closest
    assert aware.optimal is not None and aware.optimal.all()


@settings(max_examples=25, deadline=None)
@given(seed=seeds, keys=st.integers(1, 60), width=st.integers(1, 9), sharpness=st.floats(0, 6))
def test_more_keys_than_the_width_give_the_exact_output(
    seed: int, keys: int, width: int, sharpness: float
) -> None:
    query, key, value = draw(seed, keys, width)
    chosen = OptimalValueAware(width + 1).select(query * sharpness, key, value)
    assert chosen.indices.shape[-1] == min(width + 1, keys)
    assert (chosen.indices >= 0).all() and (chosen.indices < keys).all()
    assert (chosen.weights >= 0).all()
    torch.testing.assert_close(chosen.weights.sum(-1), torch.ones(keys, dtype=torch.float64))
    assert chosen.error.sqrt().max() <= 1e-8 * value.norm(dim=-1).max()


@pytest.mark.parametrize(
    "make",
    [
        lambda v: torch.ones_like(v),  # one point
        lambda v: v[:, :1] * torch.ones(8, dtype=v.dtype),  # a line
        lambda v: v[: len(v) // 4].repeat(4, 1),  # duplicates
        lambda v: v + 1e4,  # far from the origin
        lambda v: v**5,  # heavy tails
        lambda v: v * torch.logspace(0, -7, 8, dtype=v.dtype),  # nearly rank-deficient
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_values_are_combined_exactly(make, dtype: torch.dtype) -> None:
    query, key, value = draw(1, 64, 8)
    inputs = [x.to(dtype) for x in (query, key, make(value))]
    chosen = OptimalValueAware(9).select(*inputs)
    assert chosen.support().max() <= 9
    tolerance = 5e-6 if dtype == torch.float32 else 1e-9
    assert chosen.error.sqrt().max() <= tolerance * inputs[2].norm(dim=-1).max()


def test_combination_agrees_with_the_textbook_and_with_nnls() -> None:
    query, key, value = draw(3, 40, 5)
    alpha = attention_weights(query, key)
    exact = alpha @ value
    combined = OptimalValueAware(6)(query, key, value)
    stacked = torch.cat([value, torch.ones(40, 1, dtype=torch.float64)], dim=1).T.numpy()
    for row in range(0, 40, 7):
        textbook = reference.caratheodory(alpha[row], value)
        assert (textbook > 0).sum() <= 6
        torch.testing.assert_close(textbook @ value, exact[row])
        solution, residual = nnls(stacked, stacked @ alpha[row].numpy())
        assert residual < 1e-9 and (solution > 0).sum() <= 6
        torch.testing.assert_close(combined[row], exact[row])


def test_masked_keys_are_never_kept() -> None:
    query, key, value = draw(5, 30, 4)
    mask = torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) > 0.6
    mask[3] = False
    for method in (OptimalValueOblivious(6), OptimalValueAware(1), OptimalValueAware(5)):
        chosen = method.select(query, key, value, attn_mask=mask)
        assert (chosen.dense(30)[~mask] == 0).all()
        sums = chosen.weights.sum(-1)
        torch.testing.assert_close(sums, mask.any(-1).double())
        assert chosen.error[3] == 0


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


def test_equation_3_ranks_as_the_distance_does() -> None:
    query, key, value = draw(7, 10, 6)
    alpha = attention_weights(query, key)
    for row in range(10):
        a, output = alpha[row], alpha[row] @ value
        gram = value @ value.T
        others = gram @ a - gram.diagonal() * a
        equation_3 = gram.diagonal() * (0.5 - a) - others
        distance = ((output - value) ** 2).sum(-1)
        torch.testing.assert_close(equation_3, (distance - output @ output) / 2)


def test_degree_0_weighs_all_keys_alike_and_aware_1_takes_the_value_nearest_the_mean() -> None:
    query, key, value = draw(9, 12, 4)
    kernel = Polynomial(degree=0)
    output = attention(query, key, value, kernel=kernel)
    torch.testing.assert_close(output, value.mean(0).expand(12, -1))
    orthogonal = torch.linalg.qr(torch.randn(12, 12).double()).Q * torch.linspace(1, 2, 12)[:, None]
    chosen = OptimalValueAware(1).select(query, key, orthogonal, kernel=kernel)
    assert (chosen.indices == 0).all()  # section 3: argmin ||v_i||^2


def test_dropping_one_key_errs_by_its_share() -> None:
    """OVO-(M-1) errs by alpha_j / (1 - alpha_j) ||o - v_j||."""
    query, key, value = draw(11, 9, 5)
    alpha = attention_weights(query, key)
    smallest, dropped = alpha.min(dim=-1)
    expected = smallest / (1 - smallest) * (alpha @ value - value[dropped]).norm(dim=-1)
    chosen = OptimalValueOblivious(8).select(query, key, value)
    torch.testing.assert_close(chosen.error.sqrt(), expected)


def test_aware_is_never_worse_than_oblivious_and_ignores_shifts_and_rotations() -> None:
    query, key, value = draw(13, 50, 6)
    aware = OptimalValueAware(1).select(query, key, value)
    for other in (OptimalValueOblivious(1), SlidingWindow(1)):
        assert (aware.error <= other.select(query, key, value).error + 1e-12).all()
    rotation = torch.linalg.qr(torch.randn(6, 6).double()).Q
    moved = OptimalValueAware(1).select(query, key, value @ rotation + 3.0)
    assert (moved.indices == aware.indices).all()
    torch.testing.assert_close(moved.error, aware.error)


def test_unsolved_sizes_and_bad_arguments_are_refused() -> None:
    query, key, value = draw(15, 20, 8)
    with pytest.raises(ValueError, match="must be 1 or at least 9"):
        OptimalValueAware(4)(query, key, value)
    for bad in (0, -1, 1.5, True, "3"):
        with pytest.raises(ValueError, match="integer >= 1"):
            OptimalValueAware(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fast, default, best"):
        OptimalValueAware(1, search="slow")
