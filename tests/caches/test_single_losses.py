"""The losses of single keys are those of dropping each key from the exact output, in any blocks."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies
from torch import Tensor

from tests.caches.seen import kinds, observed
from value_aware_attention.caches import Observed, batched_losses, compiled_losses
from value_aware_attention.caches.leave_one_out import single_losses
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial

quick = settings(deadline=None, max_examples=20)


def dropped(seen: Observed, projected: bool) -> Tensor:
    """Computes the squared change of the outputs where each key in turn is hidden."""
    losses = []
    for key in range(seen.keys):
        assert seen.visible is not None
        hidden = replace(seen, visible=seen.visible & (torch.arange(seen.keys) != key))
        change = hidden.output - seen.output
        if projected and seen.projection is not None:
            change = change @ seen.projection
        losses.append(change.square().sum(dim=(-3, -2, -1)))
    return torch.stack(losses, dim=-1)


@pytest.mark.parametrize("projected", [False, True])
@quick
@given(kinds(dtype=torch.float64))
def test_they_are_those_of_hiding_each_key(projected: bool, seen: Observed) -> None:
    projection = torch.randn(
        2, 2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    seen = replace(seen, projection=projection)
    losses, output = single_losses(seen, projected=projected)
    expected = dropped(seen, projected)
    torch.testing.assert_close(output, seen.output)
    scale = expected.amax(dim=-1, keepdim=True).clamp_min(1e-300)
    assert ((losses - expected).abs() <= 1e-7 * scale + 1e-6 * expected).all()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    seen = observed(group=3, rows=7, causal=True, beside=True, padding=2)
    whole = single_losses(seen)
    monkeypatch.setitem(batched_losses.WEIGHTS, "cpu", rows * 6 * seen.keys)
    for once, again in zip(whole, single_losses(seen), strict=True):
        torch.testing.assert_close(once, again)


@pytest.mark.parametrize("kernel", [Exponential(), Polynomial(2), Polynomial(0), Elu()])
@pytest.mark.parametrize("projected", [False, True])
@quick
@given(data=strategies.data())
def test_compiled_losses_are_those_of_fp64(
    kernel: Kernel, projected: bool, data: strategies.DataObject
) -> None:
    """Several texts and blocks, padding, masks and what lies beside the keys."""
    exact = data.draw(kinds(kernel=kernel, dtype=torch.float64, batch=(2, 2), rows=13, keys=40))
    if exact.visible is not None and exact.visible.all():
        exact = replace(exact, visible=None, available=None)
    projection = torch.randn(2, 2, 2, 3, 5, generator=torch.Generator().manual_seed(1)).double()
    exact = replace(exact, projection=projection)
    beside = None if exact.beside is None else exact.beside.rearranged(Tensor.float)
    single = {name: getattr(exact, name).float() for name in ("query", "key", "value")}
    seen = replace(exact, **single, projection=projection.float(), beside=beside)
    assert compiled_losses.is_compiled(seen)
    with patch.object(compiled_losses, "BLOCK", 500):  # of twelve queries
        losses, output = single_losses(seen, projected=projected)
    expected, output_expected = single_losses(exact, projected=projected)
    largest = float(exact.value.abs().max())
    torch.testing.assert_close(output.double(), output_expected, rtol=1e-4, atol=1e-5 * largest)
    scale = expected.amax(dim=-1, keepdim=True)
    assert ((losses - expected).abs() <= 1e-5 * scale + 1e-4 * expected).all()


def test_a_sink_of_nearly_all_weight_is_measured_in_fp32() -> None:
    """A weight rounded near 1 would give a loss that is wrong by a factor of 1e5."""
    seen = observed(20, group=1, rows=30, sharpness=0.1)
    query = seen.query.float()
    query[..., 0] = 1.0
    key = seen.key.float()
    key[..., 0, :] = torch.tensor([math.log(1e6 * 19) * 2, 0, 0, 0])
    single = replace(seen, query=query, key=key, value=seen.value.float(), visible=None)
    exact = replace(single, query=query.double(), key=key.double(), value=seen.value)
    assert compiled_losses.is_compiled(single) and 1 - exact.weights[..., 0].max() < 1e-5
    torch.testing.assert_close(
        single_losses(single)[0], single_losses(exact)[0], rtol=1e-4, atol=0.0
    )


def test_threads_change_nothing() -> None:
    seen = observed(30, batch=(2, 3), rows=20, dtype=torch.float32)
    once = single_losses(seen)
    with patch.object(torch, "get_num_threads", return_value=2):
        again = single_losses(seen)
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("change", ["gradient", "double", "kernel"])
def test_torch_computes_what_the_compiled_code_does_not_serve(change: str) -> None:
    seen = observed(dtype=torch.float32)
    assert compiled_losses.is_compiled(seen)
    match change:
        case "gradient":
            seen = replace(seen, value=seen.value.requires_grad_())
        case "double":
            seen = replace(seen, query=seen.query.double())
        case _:
            seen = replace(seen, kernel=type("Own", (Exponential,), {})())
    assert not compiled_losses.is_compiled(seen)


def test_without_a_compiler_torch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observed(30, beside=True, padding=2, rows=9, dtype=torch.float32)
    compiled = single_losses(seen, projected=True)
    monkeypatch.setattr(compiled_losses, "library", lambda: None)
    for ours, torchs in zip(compiled, single_losses(seen, projected=True), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
