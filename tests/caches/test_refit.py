"""Biases and values of kept keys: least squares, chosen by rows that were held out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.caches.seen import kinds, observed
from value_aware_attention import caches
from value_aware_attention.caches import AttentionMatching, KeptKeys, Observed, ValueAware, refit
from value_aware_attention.caches.joint_set import Rows
from value_aware_attention.caches.kept import kept_state

quick = settings(deadline=None, max_examples=15)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rows", [2, 9])
def test_a_ridge_pulls_to_zero_by_the_mean_square(rows: int) -> None:
    factor, target = drawn(1, rows, 4), drawn(1, rows, 3, seed=1)
    pull = (0.3 * factor.square().sum(-2).mean()).sqrt() * torch.eye(4, dtype=torch.float64)
    extended = torch.cat([factor[0], pull]), torch.cat([target[0], target.new_zeros(4, 3)])
    expected = torch.linalg.lstsq(*extended).solution
    torch.testing.assert_close(refit._least_squares(factor, target, 0.3)[0], expected)


@pytest.mark.parametrize("rows", [2, 9])
def test_keys_without_weight_are_not_changed(rows: int) -> None:
    found = refit._least_squares(torch.zeros(1, rows, 4), 1e3 * torch.ones(1, rows, 3), 0.3)
    assert (found == 0).all()


def test_what_is_kept_has_weights_and_values_of_its_own() -> None:
    """A slot of log-weight b and value w stands for exp(b) keys with that value."""
    seen = observed(6)
    kept = KeptKeys(torch.tensor([[1, 4]] * 2), drawn(2, 2), drawn(2, 2, 3, seed=1))
    found = kept_state(seen.query, seen.key, seen.value, seen.kernel, seen.visible, kept).output()
    similarity = seen.kernel.log_similarity(seen.query, seen.key[:, None]).exp()[..., [1, 4]]
    weights = similarity * kept.log_weight.exp()[:, None, None]
    expected = (weights / weights.sum(-1, keepdim=True)) @ kept.value[:, None]
    torch.testing.assert_close(found, expected)


def plain(seen: Observed, r: int) -> KeptKeys:
    return caches.ObservedAttention(r).keep(seen)


@quick
@given(kinds(keys=9, rows=12, causal=False), st.integers(2, 9))
def test_the_error_that_it_fits_is_the_error_of_what_it_keeps(seen: Observed, r: int) -> None:
    kept = plain(seen, r)
    fit = refit._Fit.of(Rows.of(seen), kept)
    size = seen.value.square().sum((-2, -1)) * 24
    none = fit.error(torch.ones_like(fit.weights[:, 0]), torch.zeros_like(fit.value))
    assert ((none - seen.error(kept)).abs() <= 1e-12 * size).all()
    found = refit.refitted(seen, kept)
    best = torch.stack([fit.error(*fit.solve(*how)) for how in refit.CHOICES])
    assert ((best - seen.error(found)).abs().amin(0) <= 1e-9 * size).all()


@quick
@given(kinds(keys=9, rows=12, dtype=torch.float32), st.integers(2, 8))
def test_it_is_never_worse_on_rows_held_out(seen: Observed, r: int) -> None:
    """The refit is kept only where it leaves less error there than the original keys."""
    kept = plain(seen, r)
    fit = refit._Fit.of(Rows.of(seen), kept)
    held_out = torch.arange(24) % refit.HELD_OUT == 0
    fitted, checked = fit.of_rows(~held_out), fit.of_rows(held_out)
    errors = torch.stack([checked.error(*fitted.solve(*how)) for how in refit.CHOICES])
    best, found = errors.argmin(0), refit.refitted(seen, kept)
    for cache in range(2):
        if best[cache] == 0:  # the original keys
            used = kept.log_weight[cache] > -torch.inf
            before = seen.value[cache, kept.indices[cache]][used]
            digits = 1e-6 * float(seen.value[cache].abs().max())
            torch.testing.assert_close(found.value[cache][used], before, rtol=0, atol=digits)
            assert torch.equal(found.log_weight[cache], kept.log_weight[cache])


def test_a_refit_recovers_what_fewer_slots_can_say() -> None:
    """Its error is less than half of that without a refit."""
    seen = observed(12, group=1, rows=200, sharpness=2.0)
    kept = plain(seen, 6)
    assert (seen.error(refit.refitted(seen, kept)) < 0.5 * seen.error(kept)).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_refit_nothing(rows: int) -> None:
    seen = observed(rows=rows)
    kept = plain(seen, 4)
    found = refit.refitted(seen, kept)
    assert torch.equal(found.indices, kept.indices) and not found.log_weight.any()
    torch.testing.assert_close(seen.error(found), seen.error(kept))
    assert not torch.allclose(refit.refitted(observed(rows=4), kept).value, found.value)


@quick
@given(kinds(keys=7, rows=8, padding=4), st.sampled_from([AttentionMatching, ValueAware]))
def test_slots_of_padding_stay_unused(seen: Observed, method: type) -> None:
    kept = (method(5) if method is AttentionMatching else method(5, refit=True)).keep(seen)
    unused = ~seen.available.take_along_dim(kept.indices, -1)
    assert unused[0].sum() == 2 and not unused[1].any()
    assert torch.equal(kept.log_weight == -torch.inf, unused)
    assert kept.value.isfinite().all() and kept.log_weight[~unused].isfinite().all()


@quick
@given(kinds(keys=8, rows=10), st.integers(2, 8))
def test_factors_stay_in_their_range(seen: Observed, r: int) -> None:
    bias = AttentionMatching(r).keep(seen).log_weight.exp()
    used = bias[bias > 0]
    least, most = refit.FACTOR_RANGE
    assert (used >= least * 0.999).all() and (used <= most * 1.001).all()


def test_one_budget_for_the_keys_and_their_refit() -> None:
    with pytest.raises(ValueError, match=r"^r is 4; the method given keeps 5$"):
        AttentionMatching(4, caches.KeyDiff(5))
    seen = observed(rows=10)
    chosen = caches.KeyDiff(4).keep(seen)
    assert torch.equal(AttentionMatching(4, caches.KeyDiff(4)).keep(seen).indices, chosen.indices)
