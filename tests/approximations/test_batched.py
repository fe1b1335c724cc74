"""Shortcuts of the torch search save work and change no result."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import SEARCHES, draw
from torch import Tensor

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
        parents.append((sets.keys.where(sets.mass > 0, -1), keys))
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


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), keys=st.integers(1, 6), width=st.integers(1, 4))
def test_a_row_is_separated_where_no_weights_on_its_keys_are_as_good(
    seed: int, keys: int, width: int
) -> None:
    """Never where some are as good; always, at half the error, where all keys lie in one place."""
    instance = draw(seed, queries=1, keys=keys + 1, width=width)
    value, output = instance.value[0, :keys], 3 * instance.output[0, 0]
    share = torch.arange(keys + 1.0, dtype=value.dtype)[1:]
    best = reference_solver.closest_in_hull(value, output)
    least = reference_solver.squared_error(best, value, output)
    hidden = torch.cat([value - output, torch.zeros(1, width, dtype=value.dtype)])

    def separated(atoms: Tensor, share: Tensor, enough: Tensor) -> bool:
        return bool(batched._separated(atoms[None], share[None], enough[None]))

    with_zero = torch.cat([share, share.new_zeros(1)])
    assert not separated(hidden, with_zero, 1.01 * least + 1e-9)
    together = value[:1].expand(keys, -1) - output
    error = together[0].square().sum()
    assert separated(together, share, 0.5 * error) or error == 0


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
    some = batched._Rows(next(batched._parts(instance, count)))
    lanes = BEAM if search == "best" else 1
    first = some.nearest().repeat_interleave(lanes)
    some.widen(lanes)
    capacity = min(r + 1, width + 1, keys)
    sets = batched._ActiveSets.of_one(some.atoms(first), first, some.scale, some.zero, capacity)
    large = sets.Q, sets.Q_transposed, sets.R_inverse, *[some.distance] * 4
    held, allowed = sum(x.nbytes for x in large), BYTES_PER_ELEMENT // 4 * 2**15
    assert allowed / 3 < held <= allowed * (1 if count > 1 else lanes)


def test_no_more_rows_are_searched_at_once_than_the_cache_of_a_cpu_has_room_for() -> None:
    instance = draw(0, queries=1, keys=40, width=8)
    elsewhere = replace(instance, value=instance.value.to("meta"))
    with chunked(2**26):
        assert batched._rows_at_once(instance, 4, "fast") == batched.ROWS_AT_ONCE
        assert batched._rows_at_once(elsewhere, 4, "fast") > batched.ROWS_AT_ONCE


def test_rows_are_extended_where_that_may_help_alone() -> None:
    """A row at its optimum is not extended, nor one whose lower bound exceeds its best error."""
    optimal, open_ = [[2.0, 0.5], [1.0, 0.0]], [[2.0, 1.0], [2.0, -1.0]]
    atoms = torch.tensor([optimal, open_, open_])
    enough = torch.tensor([torch.inf, 1.5, torch.inf])
    extended, insert = torch.zeros(3, dtype=torch.int64), batched._ActiveSets.insert

    def counted(sets: object, atom: Tensor, key: Tensor, live: Tensor) -> object:
        extended.add_(live)
        return insert(sets, atom, key, live)

    with patch.object(batched._ActiveSets, "insert", counted):
        usable, zero = torch.ones(3, 2, dtype=torch.bool), torch.full((3,), 1e-12)
        sets, better = batched._solve_on(atoms, usable, 5 * torch.ones(3), zero, enough)
    assert extended.tolist() == [0, 0, 1] and better.tolist() == [True, False, True]
    torch.testing.assert_close(sets.error, torch.tensor([1.0, 5.0, 4.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bend", [1e-1, 1e-2, 1e-3])
def test_what_is_left_of_a_set_after_a_drop_keeps_its_digits(
    bend: float, dtype: torch.dtype
) -> None:
    """Of three values nearly on a line the first is dropped."""
    value = torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [3.0, 2.0, bend]], dtype=dtype)
    scale, zero = value.square().sum(-1).amax()[None], torch.zeros(1, dtype=dtype)
    sets = batched._ActiveSets.of_one(value[:1], torch.tensor([0]), scale, zero, 3)
    for key in (1, 2):
        sets.insert(value[key][None], torch.tensor([key]), torch.tensor([True]))
    sets.drop(torch.tensor([0]), torch.tensor([0]))
    size, keys, basis, R_inverse = sets.size[0], sets.keys[0], sets.Q[0], sets.R_inverse[0]
    assert size == 2 and sorted(keys[:size].tolist()) == [1, 2]
    left = torch.cat([value, sets.lift.expand(3, 1)], dim=1)[keys[:size]]
    tight = {"rtol": 0, "atol": 20 * torch.finfo(dtype).eps}
    torch.testing.assert_close(left @ basis[:size].T @ basis[:size], left, **tight)
    torch.testing.assert_close(R_inverse[:size, :size] @ left, basis[:size], **tight)


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
