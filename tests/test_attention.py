"""Kernels and exact attention: definitions, edges, gradients, and errors at the public boundary."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from hypothesis import given
from hypothesis import strategies as st
from methods import KERNELS
from torch.nn.functional import scaled_dot_product_attention

from tests.reference import approximations as reference
from tests.refusals import assert_refused
from tests.shapes import PUBLIC
from value_aware_attention import attention, caches, call, error, kernels
from value_aware_attention.approximations import (
    Exact,
    LinearAttention,
    OptimalValueAware,
    ValueAwareKeysAttentionWeights,
)
from value_aware_attention.attention import attention_weights, weights_over

X = torch.ones(3, 2)
DTYPES = (torch.float32, torch.float64)


def draw(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("name", KERNELS)
def test_log_similarity_is_the_log_of_the_definition(name: str) -> None:
    query, key, _ = draw(5, 8)
    similarity = getattr(reference, name)
    expected = torch.tensor([[similarity(q, k) for k in key] for q in query]).double()
    torch.testing.assert_close(KERNELS[name].log_similarity(query, key).exp(), expected)


def test_exponential_attention_is_torchs() -> None:
    query, key, value = draw(2, 3, 7, 8)
    mask = torch.rand(2, 1, 7, 7) > 0.3
    mask[..., 0] = True
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        torch.testing.assert_close(
            attention(query, key, value, **options),
            scaled_dot_product_attention(query, key, value, **options),
        )


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_in_common_gives_the_mean_of_the_values(name: str) -> None:
    query, key, value = draw(6, 8)
    output = attention(query * 0, key, value, kernel=KERNELS[name])
    if name != "elu":  # 1 + elu(0) = 1: elu weighs keys by their features even then
        torch.testing.assert_close(output, value.mean(0).expand_as(output))
    assert output.isfinite().all()


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_match_finite_differences_and_exist_at_zero(name: str) -> None:
    inputs = [x.requires_grad_() for x in draw(4, 3)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, kernel=KERNELS[name], is_causal=True), inputs
    )
    zero = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    attention(zero, zero, inputs[2], kernel=KERNELS[name]).sum().backward()
    assert zero.grad is not None and zero.grad.isfinite().all()


def test_large_polynomial_scores_do_not_overflow() -> None:
    query, key, value = (x.float() for x in draw(6, 8))
    output = attention(query * 1e15, key * 1e15, value, kernel=kernels.Polynomial())
    expected = attention(query, key, value, kernel=kernels.Polynomial())
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_low_precision_is_accumulated_in_fp32() -> None:
    query, key, _ = (x.bfloat16() for x in draw(64, 8))
    weights = attention_weights(query, key, kernel=kernels.Elu())
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(64))


@given(seed=st.integers(0, 2**20), exponent=st.integers(-60, 60), dtype=st.sampled_from(DTYPES))
def test_relative_errors_do_not_depend_on_the_scale(
    seed: int, exponent: int, dtype: torch.dtype
) -> None:
    """Bit for bit, at scales whose squares over- or underflow too; fp32 holds 2**-149 to 2**128."""
    generator = torch.Generator().manual_seed(seed)
    outputs = [torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(2)]
    approximate, exact = (x.to(torch.float32) for x in outputs)
    expected = error.relative_output_error(approximate, exact)
    plain = error.squared_output_error(approximate, exact) / exact.square().sum(-1)
    assert torch.equal(expected, plain)
    factor = 2.0 ** (exponent * (2 if dtype == torch.float32 else 16))
    scaled = [x.to(dtype) * factor for x in (approximate, exact)]
    relative = error.relative_output_error(*scaled)
    if dtype == torch.float32:
        rounded = [x / factor for x in scaled]  # what the smallest scales leave of the digits
        assert torch.equal(relative, error.relative_output_error(*rounded))
    else:
        torch.testing.assert_close(relative.float(), expected)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("approximate", "exact", "expected"),
    [
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([0.0, 8.0], [3.0, 4.0], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [1e-18, 0.0], 1e36),
        ([1e-3, 0.0], [1e15, 0.0], 1.0),
        ([1e20, 0.0], [1e-30, 1e-30], INF),
        ([1e-30, 0.0], [0.0, 0.0], INF),
        ([NAN, 2.0], [1.0, 2.0], NAN),
        ([INF, 2.0], [1.0, 2.0], INF),
        ([NAN, 1.0], [NAN, 1.0], NAN),
        ([INF, 1.0], [INF, 1.0], NAN),
    ],
)
def test_relative_errors_of_outputs_of_any_sizes(
    approximate: list[float], exact: list[float], expected: float
) -> None:
    """What is no number is not zero."""
    relative = error.relative_output_error(torch.tensor([approximate]), torch.tensor([exact]))
    torch.testing.assert_close(relative, torch.tensor([expected]), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relative_errors_of_outputs_whose_difference_overflows(dtype: torch.dtype) -> None:
    """Rows of another size beside them keep their digits."""
    size = torch.finfo(dtype).max * 0.9
    exact = torch.tensor([[size, size], [1.0, 0.1], [size, 0.0]], dtype=dtype)
    approximate = torch.tensor([[-size, size], [0.3, 0.1], [0.5 * size, 0.0]], dtype=dtype)
    approximate.requires_grad_()
    relative = error.relative_output_error(approximate, exact)
    expected = torch.tensor([2.0, 0.49 / 1.01, 0.25], dtype=dtype)
    torch.testing.assert_close(relative, expected)
    assert torch.equal(relative[1], error.relative_output_error(approximate[1], exact[1]))
    relative.sum().backward()
    slope = torch.tensor([-2 / size, -1.4 / 1.01, -1 / size], dtype=dtype)
    torch.testing.assert_close(approximate.grad[:, 0], slope, rtol=1e-5, atol=0.0)


def test_scales_and_degrees_may_be_numpys() -> None:
    assert kernels.Exponential(np.float32(0.5)) == kernels.Exponential(0.5)
    assert str(kernels.Polynomial(np.int64(4))) == "Polynomial(degree=4)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": X.long()}, "query is torch.int64; it must be a tensor of floating-point"),
        ({"key": X.bool()}, "key is torch.bool; it must be a tensor of floating-point"),
        (
            {"value": np.ones((3, 2))},
            "value is of type ndarray; it must be a tensor of floating-point numbers$",
        ),
        ({"query": [[1.0, 2.0]]}, "query is of type list; it must be a tensor of floating-point"),
        ({"key": None}, "key is None; it must be a tensor of floating-point numbers$"),
        (
            {"value": X[:, :0]},
            r"query \(3, 2\), .*value \(3, 0\): the last dimension must be at least 1$",
        ),
        (
            {"query": X[:, :0], "key": X[:, :0]},
            r"query \(3, 0\), .*the last dimension must be at least 1$",
        ),
        ({"query": X[:2], "is_causal": True}, ".*pass attn_mask"),
        ({"is_causal": "no"}, "is_causal is 'no'; it must be True or False"),
        ({"is_causal": 1}, "is_causal is 1; it must be True or False"),
        ({"is_causal": None}, "is_causal is None; it must be True or False"),
        ({"attn_mask": [True]}, "attn_mask is of type list; it must be torch.bool"),
        (
            {"attn_mask": np.ones((3, 3), bool)},
            "attn_mask is of type ndarray; it must be torch.bool",
        ),
        ({"kernel": kernels.Elu}, "kernel is the class Elu; it must be a kernel such as"),
        ({"kernel": "elu"}, "kernel is 'elu'; it must be a kernel such as kernels"),
        ({"kernel": None}, "kernel is None; it must be a kernel such as"),
        ({"kernel": torch.nn.ReLU()}, "kernel is of type ReLU; it must be a kernel such as"),
    ],
)
def test_arguments_that_attention_cannot_take_are_named(arguments: dict, message: str) -> None:
    assert_refused(f"^{message}", attention, **{"query": X, "key": X, "value": X} | arguments)


@pytest.mark.parametrize(
    ("message", "build"),
    [
        *(
            ("degree is .*even integer >= 0", partial(kernels.Polynomial, degree=degree))
            for degree in (-2, 1, 2.0, "2", True)
        ),
        *(
            (
                "scale is .*; it must be None or a finite number >= 0$",
                partial(kernels.Exponential, scale),
            )
            for scale in (math.nan, math.inf, -1, -0.5, "1", True, [1.0])
        ),
        *(
            (message, partial(error.relative_output_error, approximate, exact))
            for approximate, exact, message in (
                (
                    torch.ones(16, 8),
                    torch.ones(16, 1),
                    r"approximate \(16, 8\), exact \(16, 1\): both",
                ),
                (
                    torch.ones(16, 8),
                    torch.ones(1, 2, 16, 8),
                    r"approximate \(16, 8\), exact \(1, 2, 16, 8",
                ),
                (
                    torch.tensor(1.0),
                    torch.tensor(1.0),
                    r"approximate \(\), exact \(\): both must have one",
                ),
                (X[:, :0], X[:, :0], r"approximate \(3, 0\), .* value_dim >= 1\)$"),
                (X.int(), X, "approximate is torch.int32; it must be a tensor"),
                (X, [[1.0, 2.0]], "exact is of type list; it must be a tensor of floating-point"),
            )
        ),
    ],
)
def test_other_bad_arguments_are_named(message: str, build: Callable[[], object]) -> None:
    assert_refused(f"^{message}", build)


@pytest.mark.parametrize("low", [-8.0, -12.0, -18.0, -25.0, -40.0])
@pytest.mark.parametrize("causal", [False, True])
def test_elu_keeps_its_digits_for_negative_inputs(low: float, causal: bool) -> None:
    """1 + elu(x) is exp(x) there, which 1 + (exp(x) - 1) is not in fp32."""
    query, key, value = (x.float() for x in draw(2, 70, 8))
    query, key = query + low, key + low
    options = {"kernel": kernels.Elu(), "is_causal": causal}
    exact = attention(query.double(), key.double(), value.double(), **options).float()
    torch.testing.assert_close(attention(query, key, value, **options), exact)
    torch.testing.assert_close(LinearAttention()(query, key, value, **options), exact)


@pytest.mark.parametrize("x", [-200.0, -88.0, -20.0, -1.0, 0.0, 1.0, 89.0, 1e30])
def test_elu_features_and_their_gradients(x: float) -> None:
    leaf = torch.tensor(x, requires_grad=True)
    feature = kernels.Elu().features(leaf)
    feature.backward()
    expected = 1 + x if x > 0 else math.exp(x)
    assert feature.item() == pytest.approx(expected, rel=1e-6, abs=1e-38)
    assert leaf.grad.item() == pytest.approx(min(1.0, expected), rel=1e-6, abs=1e-38)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("keys", [1, 5, 15, 16, 17, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_gives_nan_however_few_the_keys(name: str, keys: int, causal: bool) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        query, key, value = (x.to(dtype) for x in draw(2, keys, 8))
        options = {"kernel": KERNELS[name], "is_causal": causal}
        broken = query.clone()
        broken[0, keys - 1, 2] = torch.nan
        output = attention(broken, key, value, **options)
        assert output[0, keys - 1].isnan().all() and output[1].isfinite().all()
        assert output[0, : keys - 1].isfinite().all()
        broken = torch.full_like(key, torch.nan)
        assert attention(query, broken, value, **options).isnan().all()


def test_few_keys_are_attended_to_as_torch_does_it() -> None:
    """Bit for bit."""
    for keys in (1, 7, 15):
        query, *rest = (x.float() for x in draw(2, 3, keys, 8))
        for rows, causal in ((query, True), (query[..., :1, :], False)):
            expected = scaled_dot_product_attention(rows, *rest, is_causal=causal)
            assert torch.equal(attention(rows, *rest, is_causal=causal), expected)


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_that_sees_nothing_gives_no_gradient_rather_than_nan(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(4, 5, generator=generator).requires_grad_() for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    attention(*leaves, kernel=KERNELS[name], attn_mask=mask).square().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
    assert (leaves[0].grad[1] == 0).all() and (leaves[0].grad[0] != 0).any()


TWO, THREE = torch.zeros(5, 2), torch.zeros(5, 3)


def test_below_the_public_boundary_a_wrong_shape_is_an_error_of_its_annotation() -> None:
    with pytest.raises(BeartypeCallHintViolation, match="D is 3"):
        weights_over(TWO, THREE, kernels.Exponential(), None)
    with pytest.raises(BeartypeCallHintViolation, match="V is 3"):
        error.squared_output_error(TWO, THREE)


def test_the_public_boundary_raises_value_errors() -> None:
    aware, exact = OptimalValueAware(1), Exact()
    keys = ValueAwareKeysAttentionWeights(1)
    after = caches.AfterPrefix(caches.Recent(1), prefix=1)
    calls = (attention, aware, aware.select, aware.path, keys.path, exact, after)
    for public in (*calls, lambda *x: call.Call.of(*x, kernel=kernels.Exponential())):
        assert_refused(r"same last dimension \(head_dim\)$", public, TWO, THREE, THREE)
    assert_refused(r"same last dimension \(head_dim\)$", attention_weights, TWO, THREE)
    assert_refused("both must have one shape", error.relative_output_error, TWO, THREE)
    assert len(PUBLIC) == len(calls) + 3
