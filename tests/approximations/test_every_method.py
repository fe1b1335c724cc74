"""Every approximation handles masks, causality, dtypes, empty rows, gradients and bad input."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import HEAD_DIM, KERNELS, KEYS, METHODS, Method, draw
from torch import Tensor

from tests.refusals import assert_refused
from value_aware_attention import attention
from value_aware_attention.approximations import (
    Exact,
    LinearAttention,
    Nystrom,
    RandomFourierFeatures,
    SparseApproximation,
    SparseWeights,
    chunked,
    feature_attention,
)
from value_aware_attention.approximations.fixed_pattern import FixedPattern
from value_aware_attention.approximations.missing_mass import LargestWeights
from value_aware_attention.error import budget
from value_aware_attention.kernels import Kernel

Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def inputs(generator: torch.Generator) -> Inputs:
    shape = (2, 3, KEYS, HEAD_DIM)
    return tuple(torch.randn(shape, generator=generator) for _ in range(3))


every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
with_every_kernel = pytest.mark.parametrize(
    ("method", "kernel"),
    [
        pytest.param(method, kernel, id=f"{name}-{of_kernel}")
        for name, method in METHODS.items()
        for of_kernel, kernel in KERNELS.items()
        if method.kernel in (None, of_kernel)
    ],
)


def entries(method: Method) -> list[Callable[..., object]]:
    """Lists the ways to call a method: itself, and its `select` and `path` if it has them."""
    made = method.build()
    return [made, *(getattr(made, name) for name in ("select", "path") if hasattr(made, name))]


def padding(hidden: int) -> Tensor:
    mask = torch.ones(2, 1, 1, KEYS, dtype=torch.bool)
    mask[0, ..., KEYS - hidden :] = False
    return mask


@with_every_kernel
def test_output_has_the_shape_and_type_of_the_values(
    inputs: Inputs, method: Method, kernel: Kernel
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        output = method.build()(*(x.to(dtype) for x in inputs), kernel=kernel)
        assert output.shape == inputs[2].shape and output.dtype == dtype
        assert output.isfinite().all()


@with_every_kernel
def test_a_full_budget_is_exact(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    if method.exact_when_full is None:
        pytest.skip("no budget makes this method exact")
    for mask in (None, padding(5)):
        output = method.exact_when_full()(*inputs, kernel=kernel, attn_mask=mask)
        expected = attention(*inputs, kernel=kernel, attn_mask=mask)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)


@with_every_kernel
def test_padded_keys_do_not_move_anything(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    query, key, value = inputs
    mask = padding(6)
    approximation = method.build()
    before = approximation(query, key, value, kernel=kernel, attn_mask=mask)
    query, key, value = query.clone(), key.clone(), value.clone()
    for inputs_of_padding, content in ((query, -5.0), (key, 9.0), (value, -7.0)):
        inputs_of_padding[0, :, KEYS - 6 :] = 1e6 * content
    after = approximation(query, key, value, kernel=kernel, attn_mask=mask)
    torch.testing.assert_close(after[1], before[1], atol=1e-5, rtol=1e-5)
    visible = slice(None, KEYS - 6)
    torch.testing.assert_close(after[0, :, visible], before[0, :, visible], atol=1e-5, rtol=1e-5)


@with_every_kernel
def test_later_keys_do_not_move_earlier_outputs(
    inputs: Inputs, method: Method, kernel: Kernel
) -> None:
    query, key, value = inputs
    approximation = method.build()
    if not method.causal:
        assert_refused("is_causal", approximation, *inputs, kernel=kernel, is_causal=True)
        return
    before = approximation(query, key, value, kernel=kernel, is_causal=True)
    key, value = key.clone(), value.clone()
    key[..., 15:, :] = 1e6 * (key[..., 15:, :] + 3.0)
    value[..., 15:, :] *= -4e6
    after = approximation(query, key, value, kernel=kernel, is_causal=True)
    torch.testing.assert_close(after[..., :15, :], before[..., :15, :], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(after[..., 15:, :], before[..., 15:, :])


@with_every_kernel
def test_later_keys_do_not_move_the_choice_among_equal_ones(method: Method, kernel: Kernel) -> None:
    query, _, value = (x.float() for x in draw(0, 40, HEAD_DIM))
    key = torch.ones_like(query)  # as the keys of a repeated token without positions
    subject = method.build()
    if not (method.causal and subject.queries_alone):
        pytest.skip("not causal, or its keys follow from the number of queries")
    whole = subject(query, key, value, kernel=kernel, is_causal=True)
    first = subject(query[:10], key[:10], value[:10], kernel=kernel, is_causal=True)
    torch.testing.assert_close(whole[:10], first, rtol=1e-4, atol=1e-4)


@with_every_kernel
def test_is_causal_equals_the_triangular_mask(
    inputs: Inputs, kernel: Kernel, method: Method
) -> None:
    triangle = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    approximation = method.build()
    if not method.any_mask:
        assert_refused("padding", approximation, *inputs, kernel=kernel, attn_mask=triangle)
        return
    masked = approximation(*inputs, kernel=kernel, attn_mask=triangle)
    assert masked.isfinite().all()
    if not method.looks_back_when_causal:
        causal = approximation(*inputs, kernel=kernel, is_causal=True)
        torch.testing.assert_close(causal, masked, atol=1e-5, rtol=1e-4)


@with_every_kernel
def test_a_row_without_visible_keys_is_zero(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    output = method.build()(*inputs, kernel=kernel, attn_mask=padding(KEYS))
    assert (output[0] == 0).all()
    assert (output[1] != 0).any() and output.isfinite().all()


@with_every_kernel
def test_sharp_and_flat_inputs_stay_finite(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    query, key, value = inputs
    for scale in (0.0, 60.0):
        output = method.build()(query * scale, key * scale, value, kernel=kernel)
        assert output.isfinite().all()


SHARED: dict[str, Callable[..., Inputs]] = {
    "keys and values": lambda query, key, value: (query, key[0], value[0]),
    "queries and values": lambda query, key, value: (query[0], key, value[0]),
    "queries and keys": lambda query, key, value: (query[0], key[0], value),
    "one head of keys and values": lambda query, key, value: (query, key[:1, :1], value[:1, :1]),
}


@every_method
@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_leading_dimensions_broadcast(
    inputs: Inputs, method: Method, shared: Callable[..., Inputs]
) -> None:
    """Broadcast inputs give the outputs of expanded ones, and the errors of `select` and `path`."""
    some, kernel = shared(*inputs), KERNELS[method.kernel or "exponential"]
    expanded = [x.expand(2, 3, -1, -1) for x in some]
    for call in entries(method):
        output, expected = (call(*tensors, kernel=kernel) for tensors in (some, expanded))
        if isinstance(output, SparseWeights):
            output, expected = output.error, expected.error
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@every_method
def test_nothing_random_depends_on_the_global_state(inputs: Inputs, method: Method) -> None:
    options = {"kernel": KERNELS[method.kernel or "elu"]}
    torch.manual_seed(0)
    state, before = torch.random.get_rng_state(), method.build()(*inputs, **options)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(method.build()(*inputs, **options), before)


@every_method
def test_what_inference_mode_keeps_can_be_trained_through(method: Method) -> None:
    """Projections and layouts are made in inference mode, at sizes of this test alone."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(KEYS + 7, 11, generator=generator) for _ in range(3))
    options = {"kernel": KERNELS[method.kernel or "elu"]}
    approximation = method.build()
    with torch.inference_mode():
        before = approximation(query, key, value, **options)
    after = approximation(query, key.requires_grad_(), value.requires_grad_(), **options)
    torch.testing.assert_close(after, before.clone())
    after.sum().backward()
    assert value.grad is not None and value.grad.isfinite().all()


@with_every_kernel
def test_autocast_lowers_no_precision(inputs: Inputs, method: Method, kernel: Kernel) -> None:
    """Sums stay in fp32, and the compiled search never meets tensors of another width."""
    outside = method.build()(*inputs, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = method.build()(*inputs, kernel=kernel)
    torch.testing.assert_close(inside, outside, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_mask_means_what_it_broadcasts_to(name: str, data: st.DataObject) -> None:
    """Any of its dimensions may be left out or 1; chunks are small enough to be several."""
    method = METHODS[name]
    full = (2, 3, KEYS, KEYS)
    shape = [data.draw(st.sampled_from((1, size))) for size in full]
    shape = shape[data.draw(st.integers(0, 4)) :]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    mask = torch.rand(shape, generator=generator) < data.draw(st.sampled_from((0.3, 0.9, 1.1)))
    options = {"kernel": KERNELS[method.kernel or "elu"]}
    options |= {"is_causal": method.causal and data.draw(st.booleans())}
    tensors = [torch.randn(*full[:3], HEAD_DIM, generator=generator) for _ in range(3)]
    rows_differ = mask.ndim > 1 and mask.shape[-2] > 1
    if rows_differ and not method.any_mask:
        assert_refused("key padding only", method.build(), *tensors, attn_mask=mask, **options)
        return
    rows = KEYS if method.any_mask else 1
    with patch.multiple(feature_attention, CHUNK_SIZE=8, ROWS_IN_CACHE=8):
        output = method.build()(*tensors, attn_mask=mask, **options)
        expected = method.build()(*tensors, attn_mask=mask.expand(2, 3, rows, KEYS), **options)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@every_method
def test_precisions_may_differ(inputs: Inputs, method: Method) -> None:
    """All inputs are computed with in the highest precision given."""
    kernel = KERNELS[method.kernel or "exponential"]
    for place in range(3):
        mixed = [x.double() if i == place else x for i, x in enumerate(inputs)]
        output = method.build()(*mixed, kernel=kernel)
        expected = method.build()(*(x.double() for x in mixed), kernel=kernel)
        assert output.dtype == mixed[2].dtype
        torch.testing.assert_close(output, expected.to(output.dtype))


@with_every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_overflow_give_no_ordinary_numbers(
    inputs: Inputs, method: Method, kernel: Kernel, causal: bool
) -> None:
    """They give NaN where exact attention does."""
    approximation, value = method.build(), inputs[2]
    if causal and not method.causal:
        pytest.skip("the method refuses causal masks")
    if getattr(approximation, "share_query_key", False) or isinstance(
        approximation, LinearAttention
    ):
        pytest.skip("its scores are of normalised keys, or logarithms, and do not overflow")
    huge = torch.full_like(value, 1e30)
    assert attention(huge, huge, value, kernel=kernel, is_causal=causal).isnan().all()
    options = {"kernel": kernel, "is_causal": causal}
    if isinstance(approximation, Nystrom) and approximation.iterations is None:
        assert_refused(
            "numbers whose similarity overflows", approximation, huge, huge, value, **options
        )
        return
    assert approximation(huge, huge, value, **options).isnan().all()
    if chooses_by_numbers(method) and isinstance(approximation, SparseApproximation):
        assert approximation.select(huge, huge, value, **options).error.isnan().all()
    if hasattr(approximation, "path"):
        assert approximation.path(huge, huge, value, **options).isnan().all()


def chooses_by_numbers(method: Method) -> bool:
    approximation = method.build()
    ranks = isinstance(approximation, (SparseApproximation, LargestWeights))
    return ranks and not isinstance(approximation, FixedPattern)


@every_method
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_what_is_no_number_is_refused_by_name(
    inputs: Inputs, method: Method, name: str, bad: float
) -> None:
    if isinstance(method.build(), Exact):
        pytest.skip("exact attention gives NaN: tests/test_attention.py")
    inputs[("query", "key", "value").index(name)][0, 1, 7, 3] = bad
    for options in ({}, {"attn_mask": padding(6)}):
        for call in entries(method):
            message = f"^{name} holds NaN or infinity; it must be finite$"
            assert_refused(
                message, call, *inputs, kernel=KERNELS[method.kernel or "elu"], **options
            )


@with_every_kernel
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_is_nan_where_it_is_not_looked_for(
    inputs: Inputs, method: Method, kernel: Kernel, name: str
) -> None:
    """In training NaN is not looked for, and no method makes an ordinary number of it."""
    approximation = method.build()
    if name == "key" and getattr(approximation, "share_query_key", False):
        pytest.skip("its keys are its queries")
    inputs[("query", "key", "value").index(name)][0, 1, 7, 3] = torch.nan
    leaf = inputs[2].requires_grad_()
    refused = chooses_by_numbers(method) or (
        isinstance(approximation, Nystrom) and approximation.iterations is None and name != "value"
    )
    if refused:
        assert_refused("holds NaN or infinity", approximation, *inputs[:2], leaf, kernel=kernel)
        return
    output = approximation(*inputs[:2], leaf, kernel=kernel)
    assert output[0, 1, slice(7, 8) if name == "query" else slice(None)].isnan().any()
    assert output[1].isfinite().all()


@every_method
@pytest.mark.parametrize("name", ["key", "query"])
def test_what_is_hidden_need_not_be_a_number(inputs: Inputs, method: Method, name: str) -> None:
    """A key that no query sees, and a query that sees no key."""
    approximation = method.build()
    if isinstance(approximation, RandomFourierFeatures):
        pytest.skip("its features are multiplied by 0, which leaves NaN")
    if name == "query" and not method.any_mask:
        pytest.skip("the method refuses such a mask")
    visible = torch.arange(KEYS) < KEYS - 1
    mask = visible if name == "key" else visible[:, None].expand(KEYS, KEYS)
    options = {"kernel": KERNELS[method.kernel or "elu"], "attn_mask": mask}
    before = approximation(*inputs, **options)
    inputs[name == "key"][..., -1, :] = torch.nan
    if chooses_by_numbers(method):
        assert_refused(f"^{name} holds NaN", approximation, *inputs, **options)
        return
    torch.testing.assert_close(approximation(*inputs, **options), before)


@every_method
def test_blocks_of_queries_change_nothing(inputs: Inputs, method: Method) -> None:
    options = {"kernel": KERNELS[method.kernel or "exponential"]} | (
        {"is_causal": True} if method.causal else {}
    )
    whole = method.build()(*inputs, **options)
    with chunked(7 * 6 * KEYS):
        parts = method.build()(*inputs, **options)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)


EMPTY = (
    ((1, 0), (3, 5), (3, 5), 3),
    ((0,), (3, 5), (3, 5), 3),
    ((1, 4), (3, 0), (3, 0), 3),
    ((1, 4), (1, 0), (3, 0), 3),
    ((1, 4), (0, 5), (0, 5), 0),
    ((0, 4), (1, 5), (1, 5), 0),
    ((3, 0), (3, 0), (3, 0), 3),
)
"""Shapes of queries, keys and values, without their width, and the leading dimension of outputs"""


@every_method
def test_no_queries_give_no_outputs_and_no_keys_zeros(method: Method) -> None:
    """Their leading dimensions are broadcast, too."""
    approximation, kernel = method.build(), KERNELS[method.kernel or "exponential"]
    for queries, keys, values, leading in EMPTY:
        tensors = [torch.ones(*shape, HEAD_DIM) for shape in (queries, keys, values)]
        for mask in (None, torch.ones(1, keys[-1], dtype=torch.bool)):
            output = approximation(*tensors, kernel=kernel, attn_mask=mask)
            assert output.shape == (leading, queries[-1], HEAD_DIM) and (output == 0).all()
            assert attention(*tensors, kernel=kernel, attn_mask=mask).shape == output.shape
            if isinstance(approximation, SparseApproximation):
                chosen = approximation.select(*tensors, kernel=kernel, attn_mask=mask)
                assert chosen.error.shape == output.shape[:-1] and (chosen.error == 0).all()
                assert chosen.indices.shape[-1] <= keys[-1]
                assert chosen.optimal is None or chosen.optimal.all()


@every_method
def test_the_budget_counts_the_keys_that_a_query_attends_to(method: Method) -> None:
    sizes = {"queries": 4096, "keys": 4096, "head_dim": 64, "value_dim": 64}
    counted = budget(method.build(), **sizes) / 128
    assert counted > 0
    assert counted == pytest.approx(method.keys_counted or counted, rel=0.01)


@every_method
def test_a_causal_budget_is_of_queries_that_have_a_position(method: Method) -> None:
    """The first of more queries than keys would see a negative number of keys."""
    assert_refused(
        r"^queries is 5 and keys is 4; under a causal mask [^\n]*$",
        budget,
        method.build(),
        queries=5,
        keys=4,
        head_dim=8,
        value_dim=8,
        is_causal=True,
    )


@every_method
def test_other_kernels_are_refused_by_name(method: Method) -> None:
    x = torch.ones(1, 4, HEAD_DIM)
    for kernel in KERNELS.values() if method.kernel else ():
        if kernel is not KERNELS[method.kernel]:
            line = f"approximates {method.kernel.title()}"
            assert_refused(line, method.build(), x, x, x, kernel=kernel)


@every_method
def test_arguments_that_do_not_fit_are_refused_by_name(method: Method) -> None:
    x = torch.ones(1, 4, HEAD_DIM)
    for tensors, options, named in (
        ((x, x[..., :3], x), {}, "head_dim"),
        ((x, x[:, :2], x), {}, "same number of keys"),
        ((x, x, x), {"attn_mask": torch.ones(7, 4, dtype=torch.bool)}, "broadcast"),
        ((x, x, x), {"attn_mask": torch.ones(4, 4)}, r"torch\.bool"),
        ((x[:, :3], x, x), {"is_causal": True}, "is_causal"),
        ((x.long(), x, x), {}, "^query is torch.int64; it must be a tensor of floating"),
        ((x, x, x), {"kernel": "elu"}, "^kernel is 'elu'; it must be a kernel such as"),
    ):
        for call in entries(method):
            assert_refused(named, call, *tensors, **options)
