"""What every approximation promises: masks, causality, dtypes, empty rows, gradients, errors."""

import pytest
import torch
from methods import HEAD_DIM, KERNELS, KEYS, METHODS, Method
from torch import Tensor

from value_aware_attention import attention
from value_aware_attention.approximations import Exact, chunked
from value_aware_attention.error import budget
from value_aware_attention.kernels import Kernel

Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def inputs(generator: torch.Generator) -> Inputs:
    shape = (2, 3, KEYS, HEAD_DIM)
    return tuple(torch.randn(shape, generator=generator) for _ in range(3))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    return METHODS[request.param]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, method: Method) -> Kernel:
    if method.kernel is not None and request.param != method.kernel:
        with pytest.raises(ValueError, match=f"approximates {method.kernel.title()}"):
            method.build()(*(torch.ones(1, 4, HEAD_DIM),) * 3, kernel=KERNELS[request.param])
        pytest.skip("the method refuses this kernel, as just shown")
    return KERNELS[request.param]


def padding(hidden: int) -> Tensor:
    mask = torch.ones(2, 1, 1, KEYS, dtype=torch.bool)
    mask[0, ..., KEYS - hidden :] = False
    return mask


def test_output_has_the_shape_and_type_of_the_values(
    inputs: Inputs, method: Method, kernel: Kernel
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        output = method.build()(*(x.to(dtype) for x in inputs), kernel=kernel)
        assert output.shape == inputs[2].shape and output.dtype == dtype
        assert output.isfinite().all()


def test_a_full_budget_is_exact(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    if method.exact_when_full is None:
        pytest.skip("no budget makes this method exact")
    for mask in (None, padding(5)):
        output = method.exact_when_full()(*inputs, kernel=kernel, attn_mask=mask)
        expected = attention(*inputs, kernel=kernel, attn_mask=mask)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)


def test_padded_keys_do_not_move_anything(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    query, key, value = inputs
    mask = padding(6)
    approximation = method.build()
    before = approximation(query, key, value, kernel=kernel, attn_mask=mask)
    query, key, value = query.clone(), key.clone(), value.clone()
    for inputs_of_padding, content in ((query, -5.0), (key, 9.0), (value, -7.0)):
        inputs_of_padding[0, :, KEYS - 6 :] = content
    after = approximation(query, key, value, kernel=kernel, attn_mask=mask)
    torch.testing.assert_close(after[1], before[1], atol=1e-5, rtol=1e-5)
    shown = slice(None, KEYS - 6)
    torch.testing.assert_close(after[0, :, shown], before[0, :, shown], atol=1e-5, rtol=1e-5)


def test_later_keys_do_not_move_earlier_outputs(
    inputs: Inputs, method: Method, kernel: Kernel
) -> None:
    query, key, value = inputs
    approximation = method.build()
    if not method.causal:
        with pytest.raises(ValueError, match="is_causal"):
            approximation(*inputs, kernel=kernel, is_causal=True)
        return
    before = approximation(query, key, value, kernel=kernel, is_causal=True)
    key, value = key.clone(), value.clone()
    key[..., 15:, :] += 3.0
    value[..., 15:, :] *= -4.0
    after = approximation(query, key, value, kernel=kernel, is_causal=True)
    torch.testing.assert_close(after[..., :15, :], before[..., :15, :], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(after[..., 15:, :], before[..., 15:, :])


def test_is_causal_equals_the_triangular_mask(
    inputs: Inputs, kernel: Kernel, method: Method
) -> None:
    triangle = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    approximation = method.build()
    if not method.any_mask:
        with pytest.raises(ValueError, match="padding"):
            approximation(*inputs, kernel=kernel, attn_mask=triangle)
        return
    masked = approximation(*inputs, kernel=kernel, attn_mask=triangle)
    assert masked.isfinite().all()
    if not method.looks_back_when_causal:
        causal = approximation(*inputs, kernel=kernel, is_causal=True)
        torch.testing.assert_close(causal, masked, atol=1e-5, rtol=1e-4)


def test_a_row_without_visible_keys_is_zero(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    mask = padding(KEYS)
    output = method.build()(*inputs, kernel=kernel, attn_mask=mask)
    assert (output[0] == 0).all()
    assert (output[1] != 0).any() and output.isfinite().all()


def test_sharp_and_flat_inputs_stay_finite(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    query, key, value = inputs
    for scale in (0.0, 60.0):
        output = method.build()(query * scale, key * scale, value, kernel=kernel)
        assert output.isfinite().all()


def test_leading_dimensions_broadcast(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    query, key, value = inputs
    shared = method.build()(query, key[:1, :1], value[:1, :1], kernel=kernel)
    expanded = method.build()(
        query, key[:1, :1].expand_as(key), value[:1, :1].expand_as(value), kernel=kernel
    )
    torch.testing.assert_close(shared, expanded, atol=1e-5, rtol=1e-5)


def test_autocast_lowers_no_precision(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    """Sums stay in fp32, and the compiled search never meets tensors of another width."""
    if isinstance(method.build(), Exact):
        pytest.skip("exact attention is torch's own, and lowers what autocast lowers")
    outside = method.build()(*inputs, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = method.build()(*inputs, kernel=kernel)
    torch.testing.assert_close(inside, outside, atol=1e-6, rtol=1e-5)


def test_a_mask_may_name_keys_only(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    mask = torch.arange(KEYS) < KEYS - 5
    named = method.build()(*inputs, kernel=kernel, attn_mask=mask)
    spread = method.build()(*inputs, kernel=kernel, attn_mask=mask[None, None, None])
    torch.testing.assert_close(named, spread)


def test_blocks_of_queries_change_nothing(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    options = {"kernel": kernel} | ({"is_causal": True} if method.causal else {})
    whole = method.build()(*inputs, **options)
    with chunked(7 * 6 * KEYS):
        parts = method.build()(*inputs, **options)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)


def test_no_queries_give_no_outputs(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    query, key, value = inputs
    for some in (query[:, :, :0], query[:0]):
        some_key, some_value = (x[: len(some)] for x in (key, value))
        if some.shape[-2] == 0 and not method.any_mask:
            continue  # LSH chunks queries and keys of one length
        output = method.build()(some, some_key, some_value, kernel=kernel)
        assert output.shape == (*some.shape[:-1], HEAD_DIM)


def test_gradients_are_finite(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    leaves = [x.clone().requires_grad_() for x in inputs]
    method.build()(*leaves, kernel=kernel).square().sum().backward()
    for leaf in leaves[2:]:
        assert leaf.grad is not None and leaf.grad.isfinite().all() and (leaf.grad != 0).any()


def test_the_budget_is_that_of_exact_attention_or_less_than_a_few_times(method: Method) -> None:
    sizes = {"queries": 4096, "keys": 4096, "head_dim": 64, "value_dim": 64}
    cost = budget(method.build(), **sizes)
    assert 0 < cost <= 4096 * 128


def test_shapes_that_do_not_fit_are_refused_by_name(method: Method) -> None:
    x = torch.ones(1, 4, HEAD_DIM)
    approximation = method.build()
    with pytest.raises(ValueError, match="head_dim"):
        approximation(x, x[..., :3], x)
    with pytest.raises(ValueError, match="same number of keys"):
        approximation(x, x[:, :2], x)
    with pytest.raises(ValueError, match="broadcast"):
        approximation(x, x, x, attn_mask=torch.ones(7, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"torch\.bool"):
        approximation(x, x, x, attn_mask=torch.ones(4, 4))
