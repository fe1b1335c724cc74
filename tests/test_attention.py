"""Kernels and exact attention: definitions, numerical edges, gradients, public references."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from value_aware_attention import attention, error, kernels
from value_aware_attention.approximations import reference
from value_aware_attention.attention import attention_weights

KERNELS = {
    "exponential": kernels.Exponential(),
    "polynomial": kernels.Polynomial(),
    "elu": kernels.Elu(),
}


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


@pytest.mark.parametrize("degree", [-2, 1, 2.0, "2", True])
def test_odd_or_negative_degrees_are_refused(degree: object) -> None:
    with pytest.raises(ValueError, match="even integer >= 0"):
        kernels.Polynomial(degree=degree)  # type: ignore[arg-type]


def test_low_precision_is_accumulated_in_fp32() -> None:
    query, key, _ = (x.bfloat16() for x in draw(64, 8))
    weights = attention_weights(query, key, kernel=kernels.Elu())
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(64))


def test_output_errors() -> None:
    exact, approximate = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.zeros(2, 2)
    torch.testing.assert_close(
        error.squared_output_error(approximate, exact), torch.tensor([25.0, 0.0])
    )
    torch.testing.assert_close(
        error.relative_output_error(approximate, exact), torch.tensor([1.0, 0.0])
    )


def test_is_causal_with_other_lengths_is_refused() -> None:
    query, key, value = draw(4, 8)
    with pytest.raises(ValueError, match="pass attn_mask"):
        attention(query[:2], key, value, is_causal=True)


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_that_sees_nothing_gives_no_gradient_rather_than_nan(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(4, 5, generator=generator).requires_grad_() for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    attention(*leaves, kernel=KERNELS[name], attn_mask=mask).square().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
    assert (leaves[0].grad[1] == 0).all() and (leaves[0].grad[0] != 0).any()


@pytest.mark.parametrize("name", ["polynomial", "elu"])
def test_autocast_changes_no_sum(name: str) -> None:
    inputs = [x.float() for x in draw(6, 8)]
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*inputs, kernel=KERNELS[name], is_causal=True)
        weights = attention_weights(*inputs[:2], kernel=KERNELS[name])
    assert torch.equal(output, attention(*inputs, kernel=KERNELS[name], is_causal=True))
    assert torch.equal(weights, attention_weights(*inputs[:2], kernel=KERNELS[name]))
