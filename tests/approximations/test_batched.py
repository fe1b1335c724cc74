"""Shortcuts of the torch search save work and change no result."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import SEARCHES, draw
from methods import Counted
from torch import Tensor
from torch.nn.functional import pad

from tests.reference import solver as reference_solver
from value_aware_attention.approximations.closest_combination import batched
from value_aware_attention.approximations.closest_combination.problem import BEAM, unresolved
from value_aware_attention.call import BYTES_PER_ELEMENT, chunked


def test_children_have_one_name_exactly_where_they_are_the_same_set() -> None:
    """{a} + b and {b} + a are one set, which the beam extends once."""
    parents: list[tuple[Tensor, Tensor]] = []
    names: list[Tensor] = []
    errors, survivors = batched._child_errors, batched._survivors

    def seen_errors(rows: object, sets: object, slope: Tensor, keys: Tensor) -> Tensor:
        parents.append((sets.keys.where(sets.mass > 0, -1)[:, 0], keys[:, 0]))
        return errors(rows, sets, slope, keys)

    def seen_survivors(error: Tensor, support: Tensor, width: int) -> tuple[Tensor, Tensor]:
        names.append(support)
        return survivors(error, support, width)

    with (
        patch.object(batched, "_child_errors", seen_errors),
        patch.object(batched, "_survivors", seen_survivors),
    ):
        batched.search(draw(0, queries=1, keys=16, width=6), 4, "best", 1)
    repeated = 0
    for (parent, keys), name in zip(parents, names, strict=True):
        sets = [
            frozenset([*mine, key]) - {-1}
            for mine, some in zip(parent.tolist(), keys.tolist(), strict=True)
            for key in some
            if key not in mine
        ]
        new = (keys[..., None] != parent[:, None]).all(-1).flatten()
        named = dict(zip(name.flatten()[new].tolist(), sets, strict=True))
        assert len(named) == len(set(sets)) == len(set(named.values()))
        repeated += len(sets) - len(named)
    assert repeated > 0


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("keys", "width", "r"), [(40, 8, 4), (40, 8, 30), (9, 40, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_many_rows_are_searched_at_once_as_the_allowance_holds(
    search: str, keys: int, width: int, r: int, dtype: torch.dtype
) -> None:
    instance = draw(0, queries=2000, keys=keys, width=width, dtype=dtype)
    with chunked(1):
        assert batched._rows_at_once(instance, r, search) == 1
    with chunked(2**15):
        count = batched._rows_at_once(instance, r, search)
    some = batched._Rows.of(next(batched._parts(instance, count)))
    lanes = BEAM if search == "best" else 1
    first = some.nearest().repeat_interleave(lanes, dim=0)
    some.widen(lanes)
    sets = batched._ActiveSets.of_one(some, first, first == first)
    sets.reserve(min(r + 1, width + 1, keys) + 1)
    large = *[sets.basis] * 2, *[some.distance] * 4
    held, allowed = sum(x.nbytes for x in large), BYTES_PER_ELEMENT // 4 * 2**15
    assert allowed / 3 < held <= allowed * (1 if count > 1 else lanes)


def test_no_more_rows_are_searched_at_once_than_the_cache_of_a_cpu_has_room_for() -> None:
    instance = draw(0, queries=1, keys=40, width=8)
    elsewhere = replace(instance, value=instance.value.to("meta"))
    with chunked(2**26):
        assert batched._rows_at_once(instance, 4, "fast") == batched.ROWS_AT_ONCE
        assert batched._rows_at_once(elsewhere, 4, "fast") > batched.ROWS_AT_ONCE


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), keys=st.integers(2, 20), width=st.integers(1, 12))
def test_a_row_is_given_up_only_where_no_weights_are_good_enough(
    seed: int, keys: int, width: int
) -> None:
    """One row can be better than asked for, another cannot, and the third is never given up.

    Nothing separates a row where some weights are as good; always where all keys lie in one place.
    """
    instance = draw(seed, queries=1, keys=keys, width=width)
    value, output = instance.value[0], 2 * instance.output[0, 0]
    best = reference_solver.closest_in_hull(value, output)
    least = reference_solver.squared_error(best, value, output)
    atoms, ones = (value - output).expand(3, -1, -1), output.new_ones(3, 1, 1)
    scale, zero = atoms.square().sum(-1).amax(-1)[:, None, None], 1e-12 * ones
    enough = (least * torch.tensor([1.01, 0.5, torch.inf])).nan_to_num(0.0, torch.inf) + 1e-6
    usable = torch.ones(3, keys, dtype=torch.bool)
    solved = batched._solve_on(atoms, usable, scale, zero, enough[:, None, None])
    error = solved.error[:, 0]
    torch.testing.assert_close(error[[0, 2]], least.expand(2), rtol=1e-8, atol=1e-11)
    assert error[1] >= least * (1 - 1e-8) - 1e-11
    share = torch.arange(1.0, keys + 1, dtype=value.dtype)[None]
    hidden = torch.cat([atoms[:1], torch.zeros(1, 1, width)], dim=1), pad(share, (0, 1))
    assert not batched._separated(*hidden, (1.01 * least + 1e-9)[None])
    together, distance = atoms[:1, :1].expand(1, keys, -1), atoms[:1, 0].square().sum(-1)
    assert batched._separated(together, share, 0.5 * distance) or distance == 0


def test_rows_go_to_fp64_where_most_values_lie_close_next_to_what_is_far() -> None:
    far, wide = torch.tensor([1.0]), 1e-6
    output = torch.zeros(1, 4)
    for close, undone in ((0.9, True), (1.1, False)):
        distance = torch.tensor([[close * wide, close * wide, close * wide, 1.0, torch.inf]])
        assert bool(unresolved(distance, far, output)) is undone
        half = torch.tensor([[close * wide, close * wide, 1.0, 1.0, torch.inf]])
        assert not unresolved(half, far, output)
        near_the_edge = torch.full((1, 4), close * wide * 4)
        assert bool(unresolved(near_the_edge, 1e-3 * far, torch.ones(1, 4))) is undone
    assert not unresolved(1e-7 * torch.ones(1, 4).double(), far.double(), output.double())


@pytest.mark.parametrize(
    ("search", "r", "operations", "waits"),
    [
        ("fast", 4, 1_800, 6),
        ("fast", 16, 5_000, 12),
        ("fast", 65, 12_000, 28),
        ("default", 4, 5_500, 9),
        ("default", 16, 19_000, 24),
    ],
)
def test_a_gpu_would_seldom_wait_for_the_host(
    search: str, r: int, operations: int, waits: int
) -> None:
    """The counts depend on the row with most rounds, and so little on the number of rows."""
    instance = draw(0, heads=2, queries=64, keys=256, width=64, dtype=torch.float32)
    with Counted() as counted:
        batched.search(instance, r, search, 1)
    reads = ("aten._local_scalar_dense", "aten.nonzero", "masked indexing")
    assert counted.counts.total() <= operations
    assert sum(counted.counts[name] for name in reads) <= waits
