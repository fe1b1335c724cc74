"""The compiled drops are those of torch, and both end where a row loses nearly all of its mass."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.caches.seen import kinds, observed
from value_aware_attention import native
from value_aware_attention.caches import Observed, ValueAware
from value_aware_attention.caches.elimination import drop, in_torch
from value_aware_attention.caches.joint_set import Rows, State

M = 8
Drops = Callable[..., tuple[Tensor, Tensor]]


def after(drops: Drops, rows: Rows, count: int, is_fresh: bool = True) -> tuple[Tensor, Tensor]:
    state, fixed = rows.start(torch.arange(M).expand(len(rows.available), -1))
    return drops(state, fixed, count, is_fresh=is_fresh)


@settings(deadline=None, max_examples=60)
@given(kinds(), st.integers(1, M - 3), st.booleans())
def test_both_engines_drop_the_same_keys_at_the_same_costs(
    seen: Observed, count: int, is_fresh: bool
) -> None:
    rows = Rows.of(seen)
    places, costs = after(in_torch, rows, count, is_fresh)
    compiled, expected = after(drop, rows, count, is_fresh)
    size = rows.output.square().sum() + rows.value.square().sum()
    assert compiled.shape == places.shape
    assert torch.equal(compiled, places) or costs.sort().values.diff().min() < 1e-9 * size
    torch.testing.assert_close(expected, costs, rtol=1e-6, atol=float(1e-9 * size))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_engines_drop_alike_in_any_precision_and_for_values_of_each_head(
    parts: int, dtype: torch.dtype
) -> None:
    seen = observed(40, rows=24, batch=(3,))
    projection = torch.randn(3, 1, 2, 3, 3, dtype=torch.float64)[:, 0]
    rows = Rows.of(replace(seen, projection=projection), projected=parts == 2)
    assert rows.parts == parts
    found = []
    for drops in (in_torch, drop):
        state, fixed = rows.start(torch.arange(40).expand(3, -1))
        if dtype == torch.float32:
            state, _ = state.eased(True)
        assert state.error.dtype == dtype
        before = state.mass.clone(), state.error.clone()
        found.append(drops(state, fixed, 20, is_fresh=True))
        assert drops is in_torch or torch.equal(state.mass, before[0])
        assert drops is in_torch or torch.equal(state.error, before[1])
    (places, costs), (expected, measured) = found
    assert torch.equal(places, expected) and places.shape[-1] == 20
    torch.testing.assert_close(costs, measured, rtol=1e-3, atol=1e-5)


def emptied() -> State:
    """Builds the state of a row whose second cheapest key has all of the mass that is left."""
    rows = Rows.of(observed(M, batch=(1,), group=1, rows=1, sharpness=0.1))
    state, _ = rows.start(torch.arange(M)[None])
    state.weights[..., 2:] = 0
    state.weights[..., 0], state.weights[..., 1] = 1e-4, 1
    state.mass = state.weights.sum(dim=-1, keepdim=True)
    return state


@pytest.mark.parametrize("drops", [in_torch, drop])
def test_drops_end_before_a_row_is_emptied_and_with_it_where_costs_are_fresh(drops: Drops) -> None:
    fixed = torch.tensor([[1e9, -1e9, *[torch.inf] * (M - 2)]], dtype=torch.float64)
    places, _ = drops(emptied(), fixed.clone(), 2, is_fresh=True)
    assert places.tolist() == [[1]]
    assert drops(emptied(), fixed.clone(), 2, is_fresh=False)[0].shape == (1, 0)
    places, _ = drops(
        emptied(), -fixed.abs() * torch.tensor([2, 1] + [-1] * (M - 2)), 2, is_fresh=True
    )
    assert places.tolist() == [[0]]


@pytest.mark.parametrize("drops", [in_torch, drop])
def test_costs_that_are_no_number_come_first(drops: Drops) -> None:
    """As they do in torch: a model whose values are NaN is not searched among the others."""
    state = emptied()
    state.to_exact[..., 3] = torch.nan
    state.weights[..., 3] = 1e-6
    assert drops(state, torch.zeros(1, M, dtype=torch.float64), 1, is_fresh=True)[0].item() == 3


@pytest.mark.slow  # the compiler is imported
def test_a_compiled_caller_drops_the_same_keys() -> None:
    """A traced tensor has no memory that C++ could read."""
    rows = Rows.of(observed(40, rows=24, batch=(2,)))

    def twenty() -> tuple[Tensor, Tensor]:
        state, fixed = rows.start(torch.arange(40).expand(2, -1))
        return drop(state, fixed, 20, is_fresh=True)

    places, costs = twenty()
    found = torch.compile(twenty, backend="eager")()
    assert torch.equal(found[0], places) and torch.equal(found[1], costs)


def test_without_a_compiler_the_same_keys_are_kept() -> None:
    seen = observed(40, rows=24, batch=(2, 2))
    kept = ValueAware(5).keep(seen)
    with patch.object(native, "library", return_value=None) as library:
        assert torch.equal(ValueAware(5).keep(seen).indices, kept.indices)
    assert library.called
