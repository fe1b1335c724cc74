"""The losses of single keys are those of dropping each key from the exact output, in any blocks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.caches.seen import kinds, observed
from value_aware_attention.attention import AttentionState, attention_state
from value_aware_attention.caches import Observed
from value_aware_attention.caches import batched_losses as module
from value_aware_attention.caches.single_losses import single_losses

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
    monkeypatch.setitem(module.BLOCK, "cpu", rows * 6 * seen.keys)
    for once, again in zip(whole, single_losses(seen), strict=True):
        torch.testing.assert_close(once, again)


def test_fp32_holds_where_one_key_has_nearly_all_weight() -> None:
    """There t is large and v - o cancels."""
    seen = observed(sharpness=30.0, group=2, rows=40)
    losses, _ = single_losses(
        replace(seen, query=seen.query.float(), key=seen.key.float(), value=seen.value.float())
    )
    torch.testing.assert_close(losses, dropped(seen, projected=False), rtol=1e-2, atol=1e-4)


def test_a_query_that_sees_nothing_loses_nothing() -> None:
    seen = observed()
    seen = replace(seen, visible=torch.zeros(2, 2, 5, 8, dtype=torch.bool))
    losses, output = single_losses(seen)
    assert (losses == 0).all() and (output == 0).all()


def test_state_beside_alone_is_an_output() -> None:
    seen = observed()
    state = attention_state(torch.zeros(2, 2, 5, 1).double(), torch.ones(2, 2, 1, 3).double())
    seen = replace(seen, visible=torch.zeros(2, 2, 5, 8, dtype=torch.bool), beside=state)
    assert isinstance(seen.beside, AttentionState)
    losses, output = single_losses(seen)
    assert (losses == 0).all() and torch.equal(output, torch.ones_like(output))
