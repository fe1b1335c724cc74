"""Branch and bound finds the best of all sets, and its bounds are below every completion."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.caches.methods import KERNELS
from tests.caches.seen import kinds, observed
from tests.reference.caches import best_set
from value_aware_attention.caches import (
    CacheMethod,
    KeyDiff,
    Observed,
    ObservedAttention,
    ValueAware,
    optimal_set,
    optimum,
)
from value_aware_attention.caches.joint_set import Rows

M = 8


def tolerance(rows: Rows) -> Tensor:
    """Bounds the rounding of errors: the last digits of squared distances."""
    away = rows.value[:, None] - rows.output[..., None, :]
    return 1e-13 * away.square().sum(-1).amax(-1).sum(-1)


@settings(deadline=None, max_examples=15)
@given(kinds(keys=M, rows=4), st.integers(2, M), st.sampled_from(list(KERNELS)))
def test_a_proved_set_leaves_what_the_best_of_all_sets_does(
    seen: Observed, r: int, kernel: str
) -> None:
    seen = replace(seen, kernel=KERNELS[kernel])
    found, rows = optimal_set(seen, r), Rows.of(seen)
    least, slack = seen.error(best_set(seen, r)), tolerance(rows)
    assert found.proved.all()
    assert torch.equal(found.indices, found.indices.sort(-1).values)
    torch.testing.assert_close(found.error, seen.error(CacheMethod.kept(seen, found.indices)))
    assert (found.error <= least * (1 + 1e-8) + slack).all()
    assert (found.lower_bound <= least + slack).all()
    kept = torch.zeros_like(rows.available).scatter(-1, found.indices, value=True)
    assert (kept | ~rows.protected).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"sharpness": 6.0}, {"causal": True, "protected": 2}])
@pytest.mark.parametrize(("keys", "r"), [(16, 3), (11, 5)])
def test_it_is_the_optimum_of_more_keys(
    keys: int, r: int, options: dict[str, object], kernel: str
) -> None:
    seen = observed(keys, batch=(1,), kernel=KERNELS[kernel], **options)
    found = optimal_set(seen, r)
    assert found.proved.all()
    least = seen.error(best_set(seen, r))
    torch.testing.assert_close(found.error, least, rtol=1e-8, atol=float(tolerance(Rows.of(seen))))


@settings(deadline=None, max_examples=30)
@given(kinds(keys=M, batch=(1,)), st.integers(2, M), st.lists(st.integers(0, 3), min_size=M))
def test_a_nodes_bound_is_below_each_of_its_completions(
    seen: Observed, r: int, marks: list[int]
) -> None:
    """Nor is a key fixed that a set below the limit needs otherwise."""
    rows = Rows.of(seen)
    usable = rows.available[0] & ~rows.protected[0]
    r = min(r, int(rows.available.sum()))
    node = torch.tensor([optimum.KEPT, optimum.DROPPED, 0.3, 0.9])[torch.tensor(marks[:M])].double()
    node = node.where(usable, optimum.DROPPED).masked_fill(rows.protected[0], optimum.KEPT)
    sets = [s for s in combinations(range(M), r) if completes(s, node)]
    if not sets:
        return
    masks = torch.zeros(len(sets), M, dtype=torch.bool).scatter(-1, torch.tensor(sets), value=True)
    errors = torch.cat([rows.error(mask[None]) for mask in masks])
    problem, slack = optimum._Problem.of(rows, r), float(tolerance(rows))
    bound, _ = problem.bounded(node[None], torch.inf, 4)
    assert float(bound) <= float(errors.min()) * (1 + 1e-9) + slack
    limit = float(errors.median())
    _, fixed = problem.bounded(node[None], limit, 4)
    below = masks[errors < limit * (1 - 1e-9) - slack]
    assert (below | (fixed != optimum.KEPT)).all() and (~below | (fixed != optimum.DROPPED)).all()


def completes(chosen: tuple[int, ...], node: Tensor) -> bool:
    """Tells whether a set has the kept keys of a node and none of the dropped ones."""
    kept = torch.zeros(len(node), dtype=torch.bool)
    kept[list(chosen)] = True
    return bool((kept | (node != optimum.KEPT)).all() and (~kept | (node >= 0)).all())


def test_with_no_time_the_bound_is_still_below_every_set() -> None:
    seen = observed(32, batch=(2,), rows=16)
    found = optimal_set(seen, 16, seconds=0.3)
    assert not found.proved.any() and (found.lower_bound <= found.error).all()
    for method in (ValueAware(16, search="best"), ObservedAttention(16), KeyDiff(16)):
        assert (found.error <= seen.error(method.keep(seen)) * (1 + 1e-9)).all()


def test_copies_of_keys_are_no_better_than_each_other() -> None:
    """Ties are not searched: three copies of each key have as many best sets."""
    seen = observed(5, batch=(1,))
    copied = {"key": -2, "value": -2, "visible": -1, "available": -1}
    copies = {name: torch.cat([getattr(seen, name)] * 3, dim=d) for name, d in copied.items()}
    seen = replace(seen, **copies)
    found = optimal_set(seen, 4)
    assert found.proved.all()
    torch.testing.assert_close(found.error, seen.error(best_set(seen, 4)), rtol=1e-8, atol=1e-12)


def test_more_keys_than_it_takes_and_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optimal_set got 129 keys; it takes at most 128$"):
        optimal_set(observed(129), 5)
    with pytest.raises(ValueError, match=r"keeps r = 9 keys; there are 8$"):
        optimal_set(observed(), 9)
    with pytest.raises(ValueError, match=r"2 are protected, so r must be at least 2$"):
        optimal_set(observed(protected=2), 1)
    with pytest.raises(ValueError, match=r"^r is 0; it must be an integer >= 1$"):
        optimal_set(observed(), 0)
    with pytest.raises(ValueError, match=r"^seconds is 0; it must be a number above 0$"):
        optimal_set(observed(), 3, seconds=0)
