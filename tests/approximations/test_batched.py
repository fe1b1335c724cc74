"""Shortcuts of the torch search save work and change no result."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from instances import SEARCHES, draw
from methods import Counted
from torch import Tensor

from tests.pretend_device import PretendDevice
from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.approximations.closest_combination import (
    ENGINES,
    Problem,
    batched,
    optimal_weights,
    solve,
    solve_path,
)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bend", [1e-1, 1e-2, 1e-3])
def test_what_is_left_of_a_set_after_a_drop_keeps_its_digits(
    bend: float, dtype: torch.dtype
) -> None:
    """Of three values nearly on a line the first is dropped."""
    value = torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [3.0, 2.0, bend]], dtype=dtype)
    output, squared = torch.zeros(1, 1, 3, dtype=dtype), value.square().sum(-1)[None, None]
    scale = squared.amax(-1, keepdim=True)
    rows = batched._Rows(value[None], output, squared, scale, torch.zeros_like(scale))
    yes, no = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, 1, dtype=torch.bool)
    sets = batched._ActiveSets.of_one(rows, torch.zeros_like(yes, dtype=torch.int64), yes)
    sets.reserve(3)
    for key in torch.tensor([1, 2]).view(2, 1, 1, 1):
        sets.change(rows.values(key), key, key, no, yes)
    sets.change(output, 0 * key, 0 * key, yes, no)
    used = sets.empty[0, 0] == 0
    basis, R_inverse = sets.basis[0, :, :4], sets.basis[0, used, 4:][:, used]
    assert used.tolist() == [False, True, True] and not sets.basis[0, ~used].any()
    assert not sets.basis[0, :, 4:][:, ~used].any() and sets.keys[0, 0, used].tolist() == [1, 2]
    left, basis = torch.cat([value, sets.lift[0].expand(3, 1)], dim=1)[used], basis[used]
    tight = {"rtol": 0, "atol": 20 * torch.finfo(dtype).eps}
    torch.testing.assert_close(left @ basis.T @ basis, left, **tight)
    torch.testing.assert_close(R_inverse @ left, basis, **tight)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_set_begins_with_all_atoms_whose_weights_are_positive(dtype: torch.dtype) -> None:
    """Of three rows, one uses its atoms, one leaves one out, and one has the same atom twice."""
    corner = torch.tensor([[1.0, 0.1, 0.0], [-1.0, 0.1, 0.0], [0.0, 1.0, 0.2]], dtype=dtype)
    atoms = torch.stack([corner - corner.mean(0) / 2, corner, corner[[0, 1, 1]]])
    distance = atoms.square().sum(-1)[:, None]
    scale = distance.amax(-1, keepdim=True)
    rows = batched._Rows(atoms, torch.zeros_like(atoms[:, :1]), distance, scale, 1e-12 * scale)
    yes = torch.ones(3, 1, 1, dtype=torch.bool)
    sets = batched._ActiveSets.of_one(rows, distance.argmin(-1, keepdim=True), yes)
    sets.reserve(3)
    whole = sets.start(atoms, yes.expand(-1, 1, 3))
    assert whole.flatten().tolist() == [True, False, False]
    assert (sets.empty[:, 0] == 0).tolist() == [
        [True] * 3,
        [True, True, False],
        [True, False, False],
    ]
    assert sets.mass[1, 0].tolist() == pytest.approx([0.5, 0.5, 0])
    lifted = torch.cat([atoms, sets.lift.expand(-1, 3, 1)], dim=2)[:2]
    basis, R_inverse = sets.basis[:2, :, :4], sets.basis[:2, :, 4:]
    tight = {"rtol": 0, "atol": 20 * torch.finfo(dtype).eps}
    torch.testing.assert_close(R_inverse @ lifted, basis, **tight)
    torch.testing.assert_close(basis @ basis.mT, torch.diag_embed(1 - sets.empty[:2, 0]), **tight)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_need_fp64_are_solved_at_once(engine: str) -> None:
    """No row of the first head needs it, one of the second, and all of the third."""
    whole = draw(1, heads=3, queries=4, keys=12, dtype=torch.float32)
    value, far = whole.value.clone(), torch.tensor([[0.0] * 4, [0, 0.5, 0.5, 0.5], [1e-9] * 4])
    value[1:, 0] *= 1e4
    weights = torch.cat([far[..., None], (1 - far)[..., None] * whole.weights[..., 1:]], dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    instance = Problem(value, weights @ value, weights, None, torch.ones(3))
    places, calls = torch.arange(4).expand(3, 4, -1), []

    def counted(name: str) -> Any:
        function = getattr(ENGINES[engine], name)

        def call(problem: Problem, *arguments: Any) -> Any:
            calls.append((name, problem.value.dtype, *problem.output.shape[:2]))
            return function(problem, *arguments)

        return patch.object(ENGINES[engine], name, call)

    with counted("search"), counted("weigh"):
        indices, chosen = solve(instance, 3, "default", engine)
        path = solve_path(instance, 3, "fast", engine)
        weighed = optimal_weights(instance, places, engine)
    shapes = (torch.float32, 3, 4), (torch.float64, 2, 4)
    assert calls == [(name, *shape) for name in ("search", "search", "weigh") for shape in shapes]
    for head in range(3):
        alone = Problem(
            *(x[head : head + 1] for x in (value, instance.output, weights)), None, torch.ones(1)
        )
        keys, mass = solve(alone, 3, "default", engine)
        assert keys[0].equal(indices[head])
        torch.testing.assert_close(mass[0], chosen[head], rtol=0, atol=1e-6)
        torch.testing.assert_close(solve_path(alone, 3, "fast", engine)[0], path[head])
        mass = optimal_weights(alone, places[:1], engine)[0]
        torch.testing.assert_close(mass, weighed[head], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("search", "r", "mean", "operations", "waits"),
    [
        ("fast", 4, False, 1_000, 7),
        ("fast", 16, False, 2_550, 12),
        ("fast", 65, False, 9_600, 40),
        ("default", 4, False, 2_950, 10),
        ("default", 16, False, 14_500, 32),
        ("fast", 4, True, 1_150, 7),
        ("default", 4, True, 3_200, 10),
    ],
)
def test_a_search_seldom_waits_for_a_gpu_and_starts_few_operations(
    search: str, r: int, mean: bool, operations: int, waits: int
) -> None:
    """The counts depend on the row with most rounds, and so little on the number of rows."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, 64, generator=generator) for n in (64, 256, 256)]
    with PretendDevice() as device:
        inputs = [x.to("cuda") for x in inputs]
        device.waits.clear()
        with Counted() as counted:
            OptimalValueAware(r, search, mean=mean).select(*inputs)
    assert counted.counts.total() <= operations
    assert sum(device.waits.values()) <= waits, device.waits


def test_the_path_of_all_sizes_starts_few_operations_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, 64, generator=generator) for n in (64, 256, 256)]
    with PretendDevice() as device:
        elsewhere = [x.to("cuda") for x in inputs]
        device.waits.clear()
        with Counted() as counted:
            path = OptimalValueAware(16, "fast").path(*elsewhere)
        assert counted.counts.total() <= 7_300 and sum(device.waits.values()) <= 33
        path = path.cpu()
    torch.testing.assert_close(path, OptimalValueAware(16, "fast", "torch").path(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_one_visible_key_has_it_alone(dtype: torch.dtype) -> None:
    """Its output is the value, so that all distances are 0."""
    value = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    first = torch.tensor([[[True, False, False]]])
    problem = Problem(value, value[:, :1], first.to(dtype), first, torch.ones(1))
    assert optimal_weights(problem, torch.tensor([[[0, 1, 2]]]), "torch").tolist() == [[[1, 0, 0]]]
