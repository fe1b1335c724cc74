"""Linformer and Nystrom equal slow references and published packages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import KERNELS, draw
from nystrom_attention import NystromAttention
from torch import Tensor

from tests.reference import approximations as reference
from value_aware_attention import attention
from value_aware_attention.approximations import Linformer, Nystrom
from value_aware_attention.approximations.nystrom import iterated_pseudo_inverse
from value_aware_attention.error import budget


def padded(inputs: list[Tensor], hidden: int) -> tuple[list[Tensor], Tensor]:
    """Inserts hidden positions in front of the inputs, between and behind them."""
    length = inputs[0].shape[0] + hidden
    generator = torch.Generator().manual_seed(hidden)
    places = torch.randperm(length, generator=generator)[: length - hidden].sort().values
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[0, places] = True
    longer = [torch.full((length, x.shape[1]), 3.0, dtype=x.dtype) for x in inputs]
    for x, filled in zip(inputs, longer, strict=True):
        filled[places] = x
    return longer, mask


@pytest.mark.parametrize("name", KERNELS)
def test_linformer_against_its_reference(name: str) -> None:
    query, key, value = draw(0, 13, 5)
    method = Linformer(4, seed=2, length=20).double()
    method.value_projection.data = Linformer(4, seed=3).draw(20).double()
    projections = [p.detach() for p in method.projections(13)]
    expected = reference.linformer(query, key, value, getattr(reference, name), *projections)
    output = method(query, key, value, kernel=KERNELS[name])
    torch.testing.assert_close(output, expected, atol=1e-7, rtol=1e-6)


def test_an_untrained_linformer_projects_keys_and_values_by_one_gaussian_matrix() -> None:
    drawn = Linformer(64, seed=5).draw(500)
    assert drawn.mean().abs() < 3 * (64 * 64 * 500) ** -0.5
    assert drawn.var() * 64 == pytest.approx(1, abs=0.03)
    for method in (Linformer(64, 5), Linformer(64, 5, length=500)):
        for projection in method.projections(500):
            torch.testing.assert_close(projection, drawn)
    assert not torch.equal(Linformer(64, seed=6).draw(500), drawn)


@settings(max_examples=20, deadline=None)
@given(shorter=st.integers(4, 200), longer=st.integers(4, 200))
def test_linformers_projection_of_a_longer_sequence_extends_the_shorter(
    shorter: int, longer: int
) -> None:
    shorter, longer = sorted((shorter, longer))
    growing = Linformer(3, 1)
    first = growing.draw(shorter).clone()
    assert torch.equal(growing.draw(longer)[:, :shorter], first)
    assert torch.equal(Linformer(3, 1).draw(longer)[:, :shorter], first)


def test_a_learned_linformer_trains_both_projections_and_refuses_longer_sequences() -> None:
    query, key, value = (x.float() for x in draw(2, 9, 4))
    method = Linformer(3, 0, length=10)
    with torch.inference_mode():
        method(query, key, value)
    method(query, key, value).square().sum().backward()
    for projection in (method.key_projection, method.value_projection):
        assert (projection.grad[:, :9] != 0).all() and (projection.grad[:, 9:] == 0).all()
    with pytest.raises(ValueError, match="11 keys; the trained length is 10"):
        method(*(torch.zeros(11, 4),) * 3)
    assert not list(Linformer(3, 0).parameters()) and not Linformer(3, 0).state_dict()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("length", "landmarks"), [(12, 4), (13, 5), (13, 4), (11, 11), (7, 1)])
def test_nystrom_against_its_reference(name: str, length: int, landmarks: int) -> None:
    query, key, value = draw(landmarks, length, 5)
    expected = reference.nystrom(query, key, value, getattr(reference, name), landmarks)
    output = Nystrom(landmarks)(query, key, value, kernel=KERNELS[name])
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 30), landmarks=st.integers(1, 30), hidden=st.integers(1, 9))
def test_nystrom_on_a_padded_sequence_gives_what_the_bare_one_gives(
    length: int, landmarks: int, hidden: int
) -> None:
    """Wherever the hidden positions stand; fewer visible keys than landmarks are exact."""
    inputs = draw(length, length, 4)
    longer, mask = padded(inputs, hidden)
    landmarks = min(landmarks, length + hidden)
    output = Nystrom(landmarks)(*longer, attn_mask=mask)[mask[0]]
    expected = Nystrom(min(landmarks, length))(*inputs)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    iterated = Nystrom(landmarks, 3)(*longer, attn_mask=mask)[mask[0]]
    torch.testing.assert_close(iterated, Nystrom(min(landmarks, length), 3)(*inputs))
    if landmarks >= length:
        torch.testing.assert_close(output, attention(*inputs), atol=1e-6, rtol=1e-5)


def test_nystrom_takes_fewer_queries_than_landmarks() -> None:
    query, key, value = draw(3, 12, 4)
    torch.testing.assert_close(Nystrom(12)(query[:5], key, value), attention(query[:5], key, value))


def test_six_iterations_leave_an_error_that_forty_do_not() -> None:
    query, key, value = draw(4, 32, 4)
    exact = Nystrom(8)(query, key, value)
    errors = [float((Nystrom(8, n)(query, key, value) - exact).abs().max()) for n in (6, 40)]
    assert errors[0] > 1e-3 and errors[1] < 1e-6
    matrix = draw(5, 3, 6, 6)[0].softmax(dim=-1)
    inverse = iterated_pseudo_inverse(matrix, 40)
    torch.testing.assert_close(inverse, torch.linalg.pinv(matrix), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("length", [32, 30])
def test_nystrom_equals_the_nystrom_attention_package(length: int) -> None:
    """NystromAttention(residual=False, pinv_iterations=6), where the landmarks divide the length.

    Its iteration starts at the largest norms of the whole batch, so it is given one head. Where
    they do not divide, it pads with zeros that enter its means and its softmax: another formula.
    """
    torch.manual_seed(0)
    peer = NystromAttention(8, 8, heads=1, num_landmarks=8, pinv_iterations=6, residual=False)
    x = torch.randn(1, length, 8)
    heads = [y[:, None] for y in peer.to_qkv(x).chunk(3, dim=-1)]
    output = peer.to_out(Nystrom(8, iterations=6)(*heads)[:, 0])
    assert torch.allclose(output, peer(x), atol=1e-5, rtol=1e-4) == (length % 8 == 0)


@pytest.mark.parametrize("scale", [0.0, 1.0, 60.0])
def test_the_pseudo_inverse_has_finite_gradients(scale: float) -> None:
    """Flat queries make all landmarks alike, sharp ones give rows of zeros and ones."""
    leaves = [(x * scale).float().requires_grad_() for x in draw(6, 20, 4)[:2]]
    Nystrom(5)(*leaves, draw(7, 20, 4)[2].float()).square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_costs_are_counted() -> None:
    sizes = {"queries": 100, "keys": 100, "head_dim": 8, "value_dim": 4}
    assert budget(Linformer(10, 0), **sizes) == 10 * 12 * 2
    assert budget(Nystrom(10, 3), **sizes) == 10 * 12 * 2 + (4 * 3 * 10**3 + 10**2 * 12) / 100
