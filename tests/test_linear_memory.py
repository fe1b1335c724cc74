"""Attention in linear memory equals the plain product, forward and in gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.testing import assert_close

from tests.pretend_device import PretendDevice
from tests.training.tiny import causal_batch, causal_module
from value_aware_attention import linear_memory
from value_aware_attention.attention import attention
from value_aware_attention.kernels import Elu, Exponential, Polynomial
from value_aware_attention.linear_memory import (
    LinearMemory,
    elu_in_chunks,
    polynomial_by_flex,
    with_linear_memory,
)
from value_aware_study.training.modules import CausalTraining

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor"
)
Form = Callable[..., Tensor]


@pytest.fixture
def _flex_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention has a backward pass on a CPU, but refuses to take it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


def inputs(length: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(3, 1, 2, length, 16, generator=generator, dtype=torch.float64)
    x[:2] *= scale
    return [part.to(dtype).requires_grad_() for part in x]


def differences(form: Form, kernel: Any, tensors: list[Tensor]) -> list[float]:
    """Returns the errors of output and gradients beside fp64 `attention`, relative to its norms."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    outputs = form(*tensors, kernel), attention(*exact, kernel=kernel, is_causal=True)
    towards = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1))
    gradients = [
        torch.autograd.grad((output.double() * towards).sum(), leaves)
        for output, leaves in zip(outputs, (tensors, exact), strict=True)
    ]
    pairs = [outputs, *zip(*gradients, strict=True)]
    return [float(((x - y).norm() / y.norm().clamp_min(1e-3)).detach()) for x, y in pairs]


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 70),
    chunk=st.sampled_from([1, 3, 16, 64]),
    log_scale=st.floats(-3, 4),
)
def test_chunks_of_elu_equal_the_plain_product(length: int, chunk: int, log_scale: float) -> None:
    form = partial(elu_in_chunks, chunk=chunk)
    assert max(differences(form, Elu(), inputs(length, scale=10**log_scale))) < 1e-9


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
def test_chunks_of_elu_in_lower_precision(dtype: torch.dtype, most: float) -> None:
    """Autocast changes nothing."""
    tensors = inputs(1000, dtype=dtype)
    assert max(differences(elu_in_chunks, Elu(), tensors)) < most
    with torch.autocast("cpu", torch.bfloat16):
        under = elu_in_chunks(*tensors, Elu())
    assert torch.equal(under, elu_in_chunks(*tensors, Elu())) and under.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_that_vanish_leave_finite_rows(dtype: torch.dtype) -> None:
    """A small query cancels in its row; keys without any feature weigh the same."""
    query, key, value = inputs(20, dtype=dtype)
    exact = partial(attention, kernel=Elu(), is_causal=True)
    small = elu_in_chunks(query - 200, key, value, Elu(), chunk=8)
    expected = exact((query - 200).double(), key.double(), value.double())
    assert_close(small.double(), expected, atol=2e-2, rtol=0)
    none = elu_in_chunks(query - 2e4, key - 2e4, value, Elu(), chunk=8)
    means = value.double().cumsum(-2) / torch.arange(1, 21)[:, None]
    assert_close(none.double(), means, atol=2e-2, rtol=0)
    gradients = torch.autograd.grad((small + none).sum(), (query, key, value))
    assert all(bool(x.isfinite().all()) for x in gradients)


def test_chunks_of_no_position_and_of_broadcast_heads() -> None:
    query, key, value = inputs(9)
    assert elu_in_chunks(*(x[..., :0, :] for x in (query, key, value)), Elu()).numel() == 0
    shared = elu_in_chunks(query, key[0, 0], value[:, :1], Elu(), chunk=4)
    assert_close(shared, attention(query, key[0, 0], value[:, :1], kernel=Elu(), is_causal=True))


@pytest.mark.usefixtures("_flex_with_gradients")
@pytest.mark.parametrize(
    ("length", "degree", "scale"),
    [(1, 2, 1.0), (130, 2, 1e3), (7, 4, 1e-3), (9, 0, 1.0)],
)
def test_flex_equals_the_plain_product(length: int, degree: int, scale: float) -> None:
    tensors = inputs(length, scale=scale)
    assert max(differences(polynomial_by_flex, Polynomial(degree), tensors)) < 1e-9
    assert (
        max(
            differences(
                polynomial_by_flex, Polynomial(degree), inputs(length, dtype=torch.bfloat16)
            )
        )
        < 2e-2
    )


@pytest.mark.usefixtures("_flex_with_gradients")
def test_flex_has_the_rule_of_products_that_are_zero() -> None:
    """They weigh the smallest normal number, and their gradient is 0."""
    query, key, value = (x.detach() for x in inputs(6))
    query[..., 2, :], key[..., 1, :] = 0, 0
    tensors = [x.requires_grad_() for x in (query, key, value)]
    assert max(differences(polynomial_by_flex, Polynomial(), tensors)) < 1e-9


@pytest.mark.slow
@pytest.mark.usefixtures("_flex_with_gradients")
def test_forms_are_compiled_whole() -> None:
    for form, kernel in ((elu_in_chunks, Elu()), (polynomial_by_flex, Polynomial())):
        compiled = torch.compile(form, backend="aot_eager", fullgraph=True, dynamic=False)
        assert max(differences(compiled, kernel, inputs(67))) < 1e-9


@pytest.mark.usefixtures("_flex_with_gradients")
@pytest.mark.parametrize(
    ("kernel", "form"),
    [(Exponential(), None), (Polynomial(), "polynomial_by_flex"), (Elu(), "elu_in_chunks")],
)
def test_a_model_uses_the_forms_on_a_gpu_alone(
    kernel: Any, form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU not a bit of its loss and gradients moves, and its folder holds the same."""
    monkeypatch.setattr(linear_memory, "FLEX_WIDTH", 8)
    names = ("polynomial_by_flex", "elu_in_chunks")
    calls = {name: Mock(wraps=getattr(linear_memory, name)) for name in names}
    for name, call in calls.items():
        monkeypatch.setattr(linear_memory, name, call)
    plain = step_of(causal_module(kernel=kernel, dropout=0.0))
    module = causal_module(kernel=kernel, dropout=0.0)
    config = module.model.config.to_dict()
    assert with_linear_memory(module.model) is module.model
    assert all(type(layer.attention.approximation) is LinearMemory for layer in module.layers())
    assert module.model.config.to_dict() == config
    assert all(map(torch.equal, step_of(module), plain)) and not any(
        x.called for x in calls.values()
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for ours, theirs in zip(step_of(module), plain, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    layers = len(module.layers())
    assert {name: x.call_count for name, x in calls.items()} == {
        name: layers * (name == form) for name in names
    }


def step_of(module: CausalTraining) -> list[Tensor]:
    module.zero_grad()
    loss = module.loss(causal_batch(0))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "changed",
    [
        {"is_compiling": False},
        {"dtype": torch.float16},
        {"width": 8},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool)},
        {"is_causal": False},
        {"heads": 1},
    ],
    ids=str,
)
def test_what_no_form_serves_is_attentions(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"is_compiling": True, "dtype": torch.float32, "width": 16, "heads": 2} | changed
    query, key, value = (x.detach()[..., : case["width"]] for x in inputs(6, dtype=case["dtype"]))
    options = {"attn_mask": changed.get("attn_mask"), "is_causal": changed.get("is_causal", True)}
    tensors = query, key[:, : case["heads"]], value[:, : case["heads"]]
    expected = attention(*tensors, kernel=Polynomial(), **options)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: case["is_compiling"])
    monkeypatch.setattr(linear_memory, "polynomial_by_flex", Mock(side_effect=AssertionError))
    assert torch.equal(LinearMemory()(*tensors, kernel=Polynomial(), **options), expected)


def test_on_another_device_no_tensor_meets_the_cpus() -> None:
    tensors = [x.detach() for x in inputs(70, dtype=torch.float32)]
    with PretendDevice():
        output = LinearMemory()(*(x.to("cuda") for x in tensors), kernel=Elu(), is_causal=True)
        output = output.cpu()
    assert_close(output, elu_in_chunks(*tensors, Elu()))


def test_bad_arguments_are_refused_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    query, key, value = inputs(5)
    with pytest.raises(ValueError, match="is_causal needs as many queries"):
        LinearMemory()(query[..., :3, :], key, value, kernel=Elu(), is_causal=True)
