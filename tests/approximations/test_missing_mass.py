"""The mean slot equals a slow reference, is exact with all keys, and cheap to take for every r."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.approximations.methods import KERNELS
from tests.reference import approximations as reference
from value_aware_attention import attention
from value_aware_attention.approximations import (
    MeanValueSlot,
    OptimalValueOblivious,
    UnrenormalisedKeys,
)
from value_aware_attention.attention import attention_weights
from value_aware_attention.call import Call
from value_aware_attention.measurement.layers import SLOTS, slot_path

KEYS, WIDTH = 9, 4
MASKS = ("none", "causal", "padding", "padding and causal", "rows")
masses = st.sampled_from(sorted(SLOTS))
kernels = st.sampled_from(sorted(KERNELS))
seeds = st.integers(0, 2**31)


def drawn(seed: int, outlier: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, KEYS, WIDTH, generator=generator) for _ in range(3))
    value[0, 2] *= outlier
    return [query, key, value]


def masked(kind: str, seed: int) -> tuple[dict[str, object], Tensor]:
    """Draws the options of a call with a mask of some kind, and the visible pairs."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.ones(2, KEYS, KEYS, dtype=torch.bool)
    options: dict[str, object] = {"is_causal": "causal" in kind}
    if "causal" in kind:
        visible = visible.tril()
    if kind == "rows" or "padding" in kind:
        shape = (2, KEYS if kind == "rows" else 1, KEYS)
        mask = torch.rand(shape, generator=generator) > 0.4
        options["attn_mask"] = mask
        visible = visible & mask
    return options, visible


@settings(max_examples=60, deadline=None)
@given(
    kernel=kernels, kind=st.sampled_from(MASKS), r=st.integers(1, KEYS + 1), mass=masses,
    seed=seeds, outlier=st.sampled_from([1.0, 1e5]),
)  # fmt: skip
def test_the_slot_equals_its_reference(
    kernel: str, kind: str, r: int, mass: str, seed: int, outlier: float
) -> None:
    inputs = drawn(seed, outlier)
    options, visible = masked(kind, seed)
    output = MeanValueSlot(r, mass)(*inputs, kernel=KERNELS[kernel], **options)
    query, key, value = (x.double() for x in inputs)
    similarity = getattr(reference, kernel)
    for head in range(2):
        scale = value[head].abs().max()
        for row in range(KEYS):
            expected = reference.mean_value_slot(
                query[head, row], key[head], value[head], similarity, visible[head, row], r, mass
            )
            error = (output[head, row] - expected).abs().max()
            assert error <= 3e-4 * (scale if visible[head, row, 2] and head == 0 else 10)


@settings(max_examples=40, deadline=None)
@given(kernel=kernels, kind=st.sampled_from(MASKS), mass=masses, seed=seeds)
def test_one_sort_gives_the_errors_of_every_r(kernel: str, kind: str, mass: str, seed: int) -> None:
    options, visible = masked(kind, seed)
    mask = options.pop("attn_mask", None)
    tensors = [x[:, None] for x in drawn(seed)]
    call = Call.of(
        *tensors, kernel=KERNELS[kernel], attn_mask=None if mask is None else mask[:, None],
        **options,
    )  # fmt: skip
    rows = call.at(torch.arange(KEYS).expand(2, 1, KEYS), torch.float64)
    errors, exact, seeing = slot_path(rows, mass), rows.output(), visible.any(-1)[:, None]
    for r in range(1, KEYS + 1):
        expected = (MeanValueSlot(r, mass)(**rows.arguments()) - exact).square().sum(-1)
        torch.testing.assert_close(
            errors[..., r - 1][seeing], expected[seeing], atol=1e-9, rtol=1e-6
        )


@pytest.mark.parametrize("mass", SLOTS)
def test_one_slot_is_the_mean_of_the_values_seen(mass: str) -> None:
    query, key, value = drawn(0)
    means = value.cumsum(dim=-2) / torch.arange(1, KEYS + 1)[:, None]
    output = MeanValueSlot(1, mass)(query, key, value, is_causal=True)
    torch.testing.assert_close(output, means)


@pytest.mark.parametrize("mass", SLOTS)
def test_gradients_reach_every_key_and_value_that_is_seen(mass: str) -> None:
    inputs = [x.double().requires_grad_() for x in drawn(3)]
    assert torch.autograd.gradcheck(
        lambda *x: MeanValueSlot(3, mass)(*x, is_causal=True), inputs, atol=1e-6
    )


def test_weights_that_are_not_renormalised_leave_the_missing_mass_out() -> None:
    inputs = drawn(1)
    mass = attention_weights(*inputs[:2]).topk(3).values.sum(-1, keepdim=True)
    expected = mass * OptimalValueOblivious(3)(*inputs)
    torch.testing.assert_close(UnrenormalisedKeys(3)(*inputs), expected)
    torch.testing.assert_close(UnrenormalisedKeys(KEYS)(*inputs), attention(*inputs))


def test_an_unknown_mass_is_refused() -> None:
    with pytest.raises(ValueError, match="mass is 'true'; it must be one of mean_key, exact"):
        MeanValueSlot(4, "true")
