"""The fused kernels give the losses of fp64 under Triton's interpreter, and are optional."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.caches.seen import observed
from value_aware_attention.attention import AttentionState
from value_aware_attention.caches import Observed, triton_losses
from value_aware_attention.caches.batched_losses import batched_losses
from value_aware_attention.caches.leave_one_out import single_losses
from value_aware_attention.kernels import Exponential, Polynomial

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED or find_spec("triton") is None, reason="needs triton and TRITON_INTERPRET=1"
)


@pytest.fixture
def _selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(triton_losses.VARIABLE, "ieee")
    monkeypatch.setattr(triton_losses, "TILE", 16)
    monkeypatch.setattr(triton_losses, "_CHECKED", {})


def drawn(
    *, groups: int = 2, queries: int = 20, keys: int = 35, dim: int = 16, width: int = 16,
    sharp: float = 3.0, beside: bool = True,
) -> Observed:  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    own = (2, 1, groups, queries)
    state = AttentionState(normal(*own, width), normal(*own, 1).exp(), 3 * normal(*own, 1))
    return Observed(
        query=sharp * normal(*own, dim), key=normal(2, 1, keys, dim),
        value=normal(2, 1, keys, width) + 1, kernel=Exponential(),
        beside=state if beside else None, projection=normal(1, groups, width, 24),
    )  # fmt: skip


def in_double(seen: Observed) -> Observed:
    names = ("query", "key", "value", "projection")
    beside = None if seen.beside is None else seen.beside.rearranged(torch.Tensor.double)
    return replace(seen, beside=beside, **{name: getattr(seen, name).double() for name in names})


def assert_close(seen: Observed, projected: bool = True) -> None:
    losses, output = triton_losses.triton_losses(seen, projected=projected)
    exact, exact_output = batched_losses(in_double(seen), projected=projected)
    assert ((losses - exact).abs() <= 3e-5 * exact).all()
    torch.testing.assert_close(output, exact_output.float(), rtol=1e-4, atol=1e-5)


@needs_interpreter
@pytest.mark.usefixtures("_selected")
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dim": 5, "width": 33},
        {"groups": 1, "queries": 2, "keys": 2},
        {"queries": 33, "keys": 16, "beside": False},
        {"sharp": 0.1},
    ],
)
@pytest.mark.parametrize("projected", [False, True])
def test_kernels_agree_with_fp64(shape: dict[str, int], projected: bool) -> None:
    assert_close(drawn(**shape), projected)


@needs_interpreter
@pytest.mark.usefixtures("_selected")
@pytest.mark.parametrize("place", [0, 17, 34])
def test_a_sink_with_nearly_all_weight(place: int) -> None:
    """The weight of the sink is 1 - 1e-6, where alpha / (1 - alpha) cancels in fp32."""
    seen = drawn(sharp=0.1, beside=False)
    seen.key[..., 0] = 0
    seen.key[..., place, :] = torch.eye(1, 16)
    seen.query[..., 0] = 4 * (14 + math.log(seen.keys))  # e^14 is 1.2e6
    assert ((1 - in_double(seen).weights[..., place]) * 1e6 - 0.8).abs().max() < 0.4
    assert_close(seen)


@needs_interpreter
@pytest.mark.usefixtures("_selected")
def test_a_first_head_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn()
    exact = batched_losses(seen)
    assert triton_losses.selected(seen) == "ieee"
    torch.testing.assert_close(single_losses(seen)[0], exact[0], rtol=1e-4, atol=0.0)
    real = triton_losses.triton_losses
    for fault in (
        lambda *x, **options: tuple(1.1 * part for part in real(*x, **options)),
        lambda *x, **options: 1 // 0,
    ):
        monkeypatch.setattr(triton_losses, "_CHECKED", {})
        monkeypatch.setattr(triton_losses, "triton_losses", fault)
        with pytest.warns(UserWarning, match="the Triton kernels do not run as they should"):
            assert torch.equal(single_losses(seen)[0], exact[0])
        assert torch.equal(single_losses(seen)[0], exact[0])  # one warning


def test_what_the_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are off by default; then PyTorch computes whatever they cannot."""
    assert triton_losses.selected(drawn()) == ""
    monkeypatch.setenv(triton_losses.VARIABLE, "bf16")
    monkeypatch.setattr(triton_losses, "find_spec", lambda name: None)
    assert triton_losses.selected(drawn()) == ""  # no Triton
    monkeypatch.setattr(triton_losses, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"is 'bf16'; it must be one of ieee, tf32x3$"):
        triton_losses.selected(drawn())
    monkeypatch.setenv(triton_losses.VARIABLE, "tf32x3")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_losses, "_is_right", lambda *_: True)
    assert triton_losses.selected(drawn()) == "tf32x3"
    for seen in (
        in_double(drawn()), observed(), replace(drawn(), kernel=Polynomial(2)),
        drawn(queries=1), drawn(keys=1), drawn(dim=257),
    ):  # fmt: skip
        assert triton_losses.selected(seen) == ""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert triton_losses.selected(drawn()) == ""


@pytest.mark.skipif(INTERPRETED or find_spec("triton") is None, reason="runs the tests above")
def test_kernels_under_the_interpreter() -> None:
    """Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    assert subprocess.run(command, env=environment, check=False).returncode == 0
