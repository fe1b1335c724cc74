"""Costs of dropping and adding are recomputed errors, and searches follow them."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.caches.seen import kinds, observed, one_of
from tests.reference.caches import best_set, plain
from value_aware_attention.attention import masked_softmax
from value_aware_attention.caches import Observed, elimination, joint_set
from value_aware_attention.caches.budgets import first_of
from value_aware_attention.caches.joint_set import LEFT, Rows, exchange, extend

M = 8
SEARCHES = [elimination.eliminate, partial(elimination.eliminate, share=elimination.DROPPED_SHARE)]
quick = settings(deadline=None, max_examples=20)
SETS = st.lists(st.booleans(), min_size=2 * M, max_size=2 * M)


def sets_of(rows: Rows, flags: list[bool]) -> Tensor:
    """Builds a set of keys that are not padding, with the protected ones."""
    return (torch.tensor(flags).view(2, M) | rows.protected) & rows.available


def error(rows: Rows, kept: Tensor) -> Tensor:
    """Recomputes sum_i ||o_i - o~_i||^2 of each cache by a softmax over what is kept."""
    logits = torch.cat(
        [rows.log_weights.masked_fill(~kept[:, None], -torch.inf), rows.log_beside], -1
    )
    weights = masked_softmax(logits, logits > -torch.inf)
    output = weights[..., :-1] @ rows.value + weights[..., -1:] * rows.beside
    output = output.where(weights.sum(-1, keepdim=True) > 0, rows.nothing)
    return (rows.output - output).square().sum((-2, -1))


def kept_by(search, rows: Rows, r: int) -> Tensor:
    """Returns the set of r keys that a search leaves."""
    every = torch.arange(rows.value.shape[-2]).expand(len(rows.available), -1)
    keys, _ = search(rows, every, r)
    return first_of(keys, torch.full((len(keys),), r))


def extended(rows: Rows, r: int) -> Tensor:
    return extend(rows, torch.full((len(rows.available),), r))


def changed(kept: Tensor, key: int) -> Tensor:
    """Returns the sets with this key dropped, or added."""
    other = kept.clone()
    other[:, key] ^= True
    return other


def close(found: Tensor, expected: Tensor, rows: Rows) -> bool:
    """Equal to fourteen digits of the distances that t = a / (m - a) enlarges, up to 1 / LEFT."""
    size = rows.value.square().sum(-1).amax(-1) + rows.nothing.square().sum((-2, -1))
    return bool(((found - expected).abs() <= 1e-13 * size / LEFT[torch.float64] ** 2).all())


@quick
@given(kinds(), SETS)
def test_the_error_of_a_set_is_that_of_attention_to_it(seen: Observed, flags: list[bool]) -> None:
    rows = Rows.of(seen)
    kept = sets_of(rows, flags)
    found = rows.error(kept)
    size = rows.value.square().sum((-2, -1))
    assert ((found - error(rows, kept)).abs() <= 1e-12 * size).all()
    for cache in range(2):
        indices = kept[cache].nonzero()[:, 0][None]
        if len(indices[0]):
            one = one_of(seen, cache)
            by_attention = one.error(plain(one, indices))
            assert ((found[cache] - by_attention).abs() <= 1e-12 * size[cache]).all()


@pytest.mark.parametrize("adds", [False, True], ids=["dropping", "adding"])
@quick
@given(seen=kinds(), flags=SETS)
def test_costs_are_recomputed_errors(seen: Observed, flags: list[bool], adds: bool) -> None:
    rows = Rows.of(seen)
    kept = sets_of(rows, flags)
    fixed = torch.zeros(kept.shape).masked_fill(~kept | rows.protected, torch.inf)
    cost = rows.cost_of_adding(kept) if adds else rows._state(kept).cost() + fixed
    allowed = ~kept & rows.available if adds else kept & ~rows.protected
    before = error(rows, kept)
    assert (cost[~allowed] == torch.inf).all()
    for key in range(M):
        expected = error(rows, changed(kept, key)) - before
        assert close(cost[:, key].where(allowed[:, key], expected), expected, rows)


@quick
@given(kinds(sharpness=1.0, causal=False), st.permutations(range(M)))
def test_running_costs_are_recomputed_after_every_drop(seen: Observed, order: list[int]) -> None:
    rows = Rows.of(seen)
    first = rows.available
    state, _ = rows.start(torch.arange(M).expand(2, -1))
    kept, forced = first.clone(), rows.protected.any(0) | ~first.all(0)
    for dropped in [key for key in order if not forced[key]][:-2]:
        state.drop(torch.full((2, 1), dropped))
        kept[:, dropped] = False
        before, cost = error(rows, kept), state.cost()
        for key in kept.all(0).nonzero()[:, 0].tolist():
            expected = error(rows, changed(kept, key)) - before
            size = rows.value.square().sum((-2, -1))
            assert ((cost[:, key] - expected).abs() <= 1e-9 * size).all()


def test_a_drop_leaves_the_state_that_it_was_taken_from() -> None:
    state, _ = Rows.of(observed(12, sharpness=8.0)).start(torch.arange(12).expand(2, -1))
    before = {name: x.clone() for name, x in vars(state).items() if isinstance(x, Tensor)}
    taken = state.take(torch.arange(6).expand(2, -1))
    taken.drop(torch.zeros(2, 1, dtype=torch.long))
    assert (taken.mass < state.mass).any() and (taken.error != state.error).any()
    assert all(torch.equal(x, vars(state)[name]) for name, x in before.items())


def slowly_eliminated(rows: Rows, r: int) -> Tensor:
    """Drops padding, then each time the key whose loss leaves the least recomputed error."""
    kept = rows.available.clone()
    while (is_above := kept.sum(-1, keepdim=True) > r).any():
        left = [error(rows, kept & ~key) for key in torch.eye(kept.shape[-1]).bool()]
        forced = ~kept | rows.protected
        cheapest = torch.stack(left, dim=-1).masked_fill(forced, torch.inf).argmin(-1, keepdim=True)
        kept = kept & ~torch.zeros_like(kept).scatter(-1, cheapest, is_above)
    return kept


@pytest.mark.parametrize("drops", [2, 64])
@pytest.mark.parametrize("r", [2, 5])
@pytest.mark.parametrize("options", [{}, {"causal": True, "padding": 2}, {"beside": True}])
def test_elimination_drops_the_cheapest_key_each_time(
    options: dict[str, object], r: int, drops: int
) -> None:
    rows = Rows.of(observed(M, protected=2, **options))
    with patch.object(elimination, "DROPS", drops):
        assert torch.equal(kept_by(elimination.eliminate, rows, r), slowly_eliminated(rows, r))


@pytest.mark.parametrize(
    ("options", "least", "digits"),
    [
        ({}, 600, 2),
        ({"causal": True}, 600, 2),
        ({"sharpness": 6.0, "dtype": torch.float32}, 600, 2),
        ({"sharpness": 6.0, "outlier": 1000.0}, 20, 6),  # a key has nearly all of a row's mass
    ],
    ids=str,
)
def test_costs_of_many_drops_sum_to_the_error(
    options: dict[str, object], least: int, digits: int
) -> None:
    """More than `DROPS` keys go before all costs are computed again."""
    rows = Rows.of(observed(900, batch=(2,), rows=8, **options))
    every = torch.arange(900).expand(2, -1)
    keys, costs = elimination.eliminate(rows, every, least, share=0.1)
    assert torch.equal(keys.sort(dim=-1).values, every) and costs.shape == keys.shape
    kept = torch.zeros_like(rows.available).scatter(-1, keys[:, :least], value=True)
    assert costs[:, :least].isinf().all()
    left = rows.error(kept).double()
    torch.testing.assert_close(costs[:, least:].sum(-1), left, rtol=10**-digits, atol=0.0)


@pytest.mark.parametrize("search", SEARCHES)
def test_sharp_attention_in_fp32_is_searched_as_in_fp64(search) -> None:
    """Costs computed in fp32 left up to 300 times as much: t^2 enlarges the rounding."""
    options = {"batch": (4,), "rows": 24, "sharpness": 6.0, "outlier": 100.0, "seed": 3}
    single, double = (
        Rows.of(observed(100, **options, dtype=dtype)) for dtype in (torch.float32, torch.float64)
    )
    for r in (6, 16):
        found, expected = (double.error(kept_by(search, rows, r)) for rows in (single, double))
        assert (found <= 1.5 * expected).all()


@quick
@given(kinds(), st.integers(2, M))
def test_searches_keep_r_keys_with_the_protected_and_padding_last(seen: Observed, r: int) -> None:
    rows = Rows.of(seen)
    for search in SEARCHES:
        kept = kept_by(search, rows, r)
        assert (kept.sum(-1) == r).all() and (kept | ~rows.protected).all()
        assert torch.equal((kept & rows.available).sum(-1), rows.available.sum(-1).clamp_max(r))
    kept = extended(rows, r)
    assert torch.equal(kept.sum(-1), rows.available.sum(-1).clamp_max(r))
    assert (kept | ~rows.protected).all() and (~kept | rows.available).all()


@quick
@given(kinds(), st.integers(2, M), st.sampled_from([torch.float32, torch.float64]))
def test_an_exchange_never_raises_the_error(seen: Observed, r: int, dtype: torch.dtype) -> None:
    rows = Rows.of(seen)
    rows = Rows(**{k: x.to(dtype) if x.is_floating_point() else x for k, x in vars(rows).items()})
    for start in (extended(rows, r), kept_by(elimination.eliminate, rows, r)):
        kept = exchange(rows, start)
        assert (rows.error(kept) <= rows.error(start)).all()
        assert torch.equal(kept.sum(-1), start.sum(-1))
        assert (kept | ~rows.protected).all()


@quick
@given(kinds(), st.integers(2, M - 1))
def test_an_exchange_is_the_best_of_one_key(seen: Observed, r: int) -> None:
    """Also where the key is the last one that a row sees."""
    rows = Rows.of(seen)
    kept = kept_by(elimination.eliminate, rows, r)
    found, size = rows.error(rows.exchanged(kept)), rows.value.square().sum((-2, -1))
    for dropped in range(M):
        for added in range(M):
            other = changed(changed(kept, dropped), added)
            swapped = kept[:, dropped] & ~kept[:, added] & ~rows.protected[:, dropped]
            allowed = swapped & rows.available[:, added]
            assert (found <= rows.error(other) + 1e-9 * size)[allowed].all()


def test_an_exchange_ends_where_none_of_one_key_helps() -> None:
    rows = Rows.of(observed(M))
    kept = exchange(rows, first_of(torch.arange(M).expand(2, -1), torch.full((2,), 3)))
    least = error(rows, kept)
    for dropped in range(M):
        for added in range(M):
            other = changed(changed(kept, dropped), added)
            exchanged = kept[:, dropped] & ~kept[:, added]
            assert (error(rows, other)[exchanged] >= least[exchanged] * (1 - 2e-5)).all()


def test_keys_are_exchanged_for_less_error_alone() -> None:
    """The best of all sets stays, nor are its keys exchanged for copies that are as good."""
    seen = observed(5)
    copied = {"key": -2, "value": -2, "visible": -1, "available": -1}
    copies = {name: torch.cat([getattr(seen, name)] * 3, dim=d) for name, d in copied.items()}
    seen = replace(seen, **copies)
    rows, indices = Rows.of(seen), best_set(seen, 3).indices
    for shift in (0, 5, 10):
        best = torch.zeros_like(rows.available).scatter(-1, (indices + shift) % 15, value=True)
        assert torch.equal(exchange(rows, best), best)


@quick
@given(kinds(), st.integers(2, M - 1))
def test_a_batch_is_its_caches_one_by_one(seen: Observed, r: int) -> None:
    rows = Rows.of(seen)
    with patch.object(joint_set, "IN_CACHE", 1):
        parts = list(rows.split())
    assert len(parts) == 2 and all(len(part.value) == 1 for part in parts)
    for search in [*(partial(kept_by, search) for search in SEARCHES), extended]:
        whole = rows.error(search(rows, r))
        alone = torch.cat([part.error(search(part, r)) for part in parts])
        torch.testing.assert_close(alone, whole, rtol=1e-6, atol=1e-10)
    for cache, part in enumerate(parts):
        own = Rows.of(one_of(seen, cache))
        for name, x in vars(own).items():
            torch.testing.assert_close(x, vars(part)[name])


@pytest.mark.parametrize("elements", [1, 80, 160, 10**6])
def test_cuts_are_of_whole_caches_in_order(elements: int) -> None:
    rows = Rows.of(observed(M, batch=(3, 2)))
    with patch.object(joint_set, "IN_CACHE", elements):
        parts = list(rows.split())
    assert len(parts) == max(1, -(-6 // max(1, elements // (10 * M))))
    for name, x in vars(rows).items():
        assert torch.equal(torch.cat([vars(part)[name] for part in parts]), x)


@pytest.mark.parametrize("sharpness", [4.0, 12.0])
def test_eliminating_drops_the_cheapest_key_where_heads_are_sharp(sharpness: float) -> None:
    rows = Rows.of(observed(keys=40, group=1, rows=32, sharpness=sharpness))
    least = error(rows, slowly_eliminated(rows, 6))
    assert (error(rows, kept_by(elimination.eliminate, rows, 6)) <= 1.001 * least).all()
