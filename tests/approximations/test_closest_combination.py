"""The solver is held to brute force, to slow versions and to geometry."""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from instances import (
    ENGINES,
    SEARCHES,
    TEMPERATURES,
    VALUES,
    attended,
    draw,
    errors,
    problem,
    spread,
)
from torch import Tensor

from tests.reference import solver as reference_solver
from value_aware_attention import native
from value_aware_attention.approximations import OptimalValueAware, closest_combination
from value_aware_attention.approximations.closest_combination import (
    Problem,
    compiled,
    engine,
    optimal_weights,
    solve,
)
from value_aware_attention.files import checksum

every_engine = pytest.mark.parametrize("engine", ENGINES)
every_search = pytest.mark.parametrize("search", SEARCHES)
every_value = pytest.mark.parametrize("values", VALUES)
seeds = st.integers(0, 2**31)
quick = settings(max_examples=12, deadline=None)


def solved(instance: Problem, r: int, search: str, engine: str) -> Tensor:
    """Checks that a solution lies in C_r and returns its errors (H, N)."""
    indices, weights = solve(instance, r, search, engine)
    keys = instance.value.shape[-2]
    assert indices.shape == weights.shape and indices.shape[-1] <= min(r, keys)
    assert indices.dtype == torch.int64 and (indices >= 0).all() and (indices < keys).all()
    assert weights.dtype == instance.value.dtype and (weights >= 0).all()
    used = weights > 0
    precision = torch.finfo(weights.dtype).eps
    torch.testing.assert_close(
        weights.double().sum(-1), used.any(-1).double(), atol=8 * precision, rtol=0
    )
    distinct = torch.where(used, indices, -1 - torch.arange(indices.shape[-1])).sort(dim=-1).values
    assert (distinct.diff(dim=-1) > 0).all(), "a key is named twice"
    if instance.visible is not None:
        assert instance.visible.gather(-1, indices)[used].all(), "a hidden key is used"
        assert (used.any(-1) == instance.visible.any(-1)).all()
    else:
        assert used.any(-1).all()
    return errors(instance, indices, weights)


def reference_error(instance: Problem, row: int, weights: Tensor) -> Tensor:
    return reference_solver.squared_error(weights, instance.value[0], instance.output[0, row])


def support(instance: Problem, r: int, search: str, engine: str) -> Tensor:
    """Returns the keys (H, N, S) that get a weight, sorted, and -1 in the other places."""
    indices, weights = solve(instance, r, search, engine)
    return torch.where(weights > 0, indices, -1).sort(dim=-1).values


def geometric_mean(ratios: Tensor) -> float:
    return float(ratios.log().mean().exp())


# How good the solutions are


@every_engine
@every_search
@quick
@given(
    seed=seeds,
    keys=st.integers(1, 9),
    width=st.integers(1, 6),
    r=st.integers(1, 4),
    values=st.sampled_from(list(VALUES)),
    weights=st.sampled_from(list(TEMPERATURES)),
)
def test_nothing_beats_brute_force_and_one_key_equals_it(
    engine: str,
    search: str,
    seed: int,
    keys: int,
    width: int,
    r: int,
    values: str,
    weights: str,
) -> None:
    instance = draw(seed, queries=2, keys=keys, width=width, values=values, weights=weights)
    error = solved(instance, r, search, engine)[0]
    tolerance = 1e-12 * spread(instance.value) ** 2 + 1e-24
    for row in range(2):
        best = reference_solver.brute_force(instance.value[0], instance.output[0, row], r)
        optimum = reference_error(instance, row, best)
        assert error[row] >= optimum * (1 - 1e-9) - tolerance
        if r == 1 or r >= min(keys, width + 1):
            assert error[row] <= optimum * (1 + 1e-9) + tolerance


def reference_errors(instance: Problem, answer: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Computes the errors (H, N) of a reference that maps (value, output) to weights."""
    return torch.stack(
        [
            torch.stack(
                [reference_solver.squared_error(answer(value, o), value, o) for o in outputs]
            )
            for value, outputs in zip(instance.value, instance.output, strict=True)
        ]
    )


INSTANCES: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "12 keys": [
        (r, {"seed": r, "heads": 12, "queries": 2, "weights": weights})
        for weights in TEMPERATURES
        for r in (2, 3, 4)
    ],
    "28 keys": [(3, {"seed": 13, "queries": 5, "keys": 28, "width": 16})],
    "256 keys": [(2, {"seed": 0, "heads": 8, "queries": 2, "keys": 256, "width": 64})],
}
"""Sizes r and arguments of `draw`."""
QUALITY = {"fast": 1.7, "default": 1.35, "best": 1.02}
"""Largest geometric mean of error / optimum over instances with few keys."""


@functools.cache
def optima(name: str) -> list[tuple[int, Problem, Tensor]]:
    """Draws the instances with their least errors: of every set, or of 256 keys every pair."""
    drawn = [(r, draw(**arguments)) for r, arguments in INSTANCES[name]]
    if name == "256 keys":
        return [(r, x, reference_errors(x, reference_solver.all_pairs)) for r, x in drawn]
    return [
        (r, x, reference_errors(x, lambda *row, r=r: reference_solver.brute_force(*row, r)))
        for r, x in drawn
    ]


@every_engine
@every_search
@pytest.mark.parametrize("name", INSTANCES)
def test_quality_against_brute_force(engine: str, search: str, name: str) -> None:
    ratios = []
    for r, instance, optimum in optima(name):
        error = solved(instance, r, search, engine)
        generic = optimum > 1e-8 * spread(instance.value)[:, None] ** 2
        ratios.append(error[generic] / optimum[generic])
    ratio = torch.cat(ratios)
    assert len(ratio) > 4 and ratio.min() >= 1 - 1e-9
    assert geometric_mean(ratio) <= (1.1 if name == "256 keys" else QUALITY[search])


@every_engine
@pytest.mark.parametrize("weights", TEMPERATURES)
def test_the_fast_search_takes_the_keys_of_its_slow_version(engine: str, weights: str) -> None:
    instance = draw(3, queries=12, keys=40, weights=weights)
    visible = torch.ones(40, dtype=torch.bool)
    paths = [
        reference_solver.greedy_path(instance.value[0], o, visible, 6) for o in instance.output[0]
    ]
    compared = 0
    for r in (2, 4, 6):
        indices, solution = solve(instance, r, "fast", engine)
        for row, path in enumerate(paths):
            greedy = reference_error(instance, row, path[r - 1])
            top = instance.weights[0, row].topk(r).indices
            weighed = torch.zeros(40, dtype=torch.float64)
            weighed[top] = reference_solver.closest_in_hull(
                instance.value[0, top], instance.output[0, row]
            )
            if reference_error(instance, row, weighed) <= greedy:
                continue  # the keys with the largest weights were better
            compared += 1
            dense = torch.zeros(40, dtype=torch.float64)
            dense = dense.scatter_add(0, indices[0, row], solution[0, row])
            torch.testing.assert_close(dense, path[r - 1], atol=1e-7, rtol=0)
    assert compared >= 6


# Enough keys: the output itself


@every_engine
@every_search
@every_value
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_key_more_than_the_width_reaches_the_output(
    engine: str, search: str, values: str, dtype: torch.dtype
) -> None:
    instance = draw(5, heads=2, queries=12, keys=48, values=values, dtype=dtype)
    error = solved(instance, 9, search, engine).sqrt()
    tolerance = {torch.float64: 1e-9, torch.float32: 5e-6}[dtype]
    assert (error <= tolerance * attended(instance)).all()
    if values == "heavy tails":
        assert (error <= tolerance * instance.output.double().norm(dim=-1)).all()
    if values == "far away":
        assert (error <= 1e-4 * spread(instance.value)[:, None]).all()


@every_engine
@every_search
@pytest.mark.parametrize(
    ("values", "width", "enough", "sizes"),
    [("rank 2", 8, 3, (3, 5, 9)), ("constant", 8, 1, (1, 3, 9)), ("gauss", 4, 5, (5, 12, 20))],
)
def test_no_more_keys_are_used_than_the_rank_of_the_values_needs(
    engine: str, search: str, values: str, width: int, enough: int, sizes: tuple[int, ...]
) -> None:
    """One more than the rank are enough (Carathéodory's theorem), also where all 12 are allowed."""
    instance = draw(7, queries=10, keys=12, width=width, values=values)
    for r in sizes:
        _, weights = solve(instance, r, search, engine)
        assert ((weights > 0).sum(-1) <= enough).all()
        left = solved(instance, r, search, engine).sqrt()
        assert (left <= 1e-9 * spread(instance.value) + 1e-12).all()


# What geometry promises


def moved(instance: Problem, seed: int, size: float) -> Problem:
    """Turns, shifts and scales a problem, and puts its keys in another order."""
    keys, width = instance.value.shape[1:]
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    order = torch.randperm(keys, generator=generator)
    value = size * (instance.value[:, order] @ turn + 5.0)
    return problem(value, instance.weights[..., order])


@every_engine
@every_search
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_hardly_a_choice_is_decided_by_rounding(engine: str, search: str, size: float) -> None:
    """Rounding decides only between sets whose errors agree to the last digit."""
    instance = draw(16, heads=8, queries=8, keys=20, width=10)
    for r, often in ((1, 0), (2, 0.02), (4, 0.05), (8, 0.15)):
        before, after = (solved(x, r, search, engine) for x in (instance, moved(instance, r, size)))
        ratio = after / size**2 / before
        assert ((ratio - 1).abs() > 1e-6).double().mean() <= often
        assert 0.95 <= geometric_mean(ratio) <= 1.05


@every_engine
@pytest.mark.parametrize("width", [1, 3])
def test_the_closest_of_many_close_values_in_fp32(engine: str, width: int) -> None:
    """Distances far smaller than the values must not drown in the difference of two squares."""
    instance = draw(27, heads=4, queries=32, keys=400, width=width, dtype=torch.float32)
    error = solved(instance, 1, "fast", engine).sqrt()
    away = instance.value.double()[:, None] - instance.output.double()[:, :, None]
    closest = away.norm(dim=-1).amin(dim=-1)
    assert (error <= closest + 5e-6 * spread(instance.value)[:, None]).all()


@every_engine
@every_search
@settings(max_examples=6, deadline=None)
@given(
    seed=seeds,
    keys=st.integers(1, 20),
    width=st.integers(1, 7),
    values=st.sampled_from(list(VALUES)),
    weights=st.sampled_from(list(TEMPERATURES)),
)
@example(seed=1, keys=5, width=3, values="gauss", weights="usual")  # exact at r + 1, not at r
def test_more_keys_never_hurt(
    engine: str, search: str, seed: int, keys: int, width: int, values: str, weights: str
) -> None:
    instance = draw(seed, queries=3, keys=keys, width=width, values=values, weights=weights)
    error = torch.stack([solved(instance, r, search, engine) for r in range(1, 10)])
    assert (error.diff(dim=0) <= 1e-9 * error[:-1] + 1e-12 * spread(instance.value) ** 2).all()


@every_engine
def test_more_search_never_hurts(engine: str) -> None:
    for weights in TEMPERATURES:
        instance = draw(17, heads=12, queries=4, keys=40, width=12, weights=weights)
        for r in (2, 4, 7):
            fast, default, best = (solved(instance, r, search, engine) for search in SEARCHES)
            assert (best <= default * (1 + 1e-9)).all()
            if weights != "peaked":  # where the heaviest keys are often best
                assert best.mean() < 0.95 * default.mean() < 0.95 * fast.mean()


@every_search
@every_value
@pytest.mark.parametrize("r", [1, 4])
def test_both_engines_find_the_same(search: str, values: str, r: int) -> None:
    instance = draw(19, heads=2, queries=8, keys=20, values=values)
    supports = [support(instance, r, search, engine) for engine in ENGINES]
    left = [solved(instance, r, search, engine) for engine in ENGINES]
    same = (supports[0] == supports[1]).all(-1)
    scale = spread(instance.value)[:, None] ** 2
    if values in ("gauss", "heavy tails", "far away", "fading directions"):  # no ties
        # Where the best search reaches one set in two ways, rounding says which of them goes on.
        assert same.all() if search != "best" else same.double().mean() >= 0.5
        torch.testing.assert_close(left[0][same], left[1][same], rtol=1e-6, atol=1e-18)
    else:
        assert ((left[0].sqrt() - left[1].sqrt()).abs() <= 0.1 * scale.sqrt()).all()


def test_both_engines_look_closely_at_as_many_keys_of_a_large_set() -> None:
    """At four keys, for a set of 60: fewer than the groups, so that the number matters."""
    instance = draw(20, queries=8, keys=400, width=64, weights="flat")
    supports = [support(instance, 60, "default", engine) for engine in ENGINES]
    assert (supports[0] == supports[1]).all(dim=-1).double().mean() >= 0.75


@every_engine
def test_given_keys_are_weighed_around_a_value_far_away(engine: str) -> None:
    whole = draw(33, queries=12, keys=20)
    value = whole.value.float()
    value[:, 7] *= 1e6
    alpha = whole.weights.index_fill(-1, torch.tensor(7), 1e-9)
    alpha = (alpha / alpha.sum(-1, keepdim=True)).float()
    instance = Problem(value, alpha @ value, alpha, None, torch.ones(1))
    indices = torch.tensor([7, 0, 1, 2, 3, 4]).expand(1, 12, -1)
    error = errors(instance, indices, optimal_weights(instance, indices, engine))
    usual = errors(instance, indices[..., 1:], optimal_weights(instance, indices[..., 1:], engine))
    assert (error <= usual * (1 + 1e-4)).all()


# Weights for keys already chosen


@every_engine
@quick
@given(
    seed=seeds,
    keys=st.integers(4, 12),
    width=st.integers(1, 6),
    values=st.sampled_from(list(VALUES)),
    hidden=st.booleans(),
)
def test_the_best_weights_on_given_keys(
    engine: str, seed: int, keys: int, width: int, values: str, hidden: bool
) -> None:
    """Hidden keys get no weight, and all are hidden from the second query."""
    instance = draw(seed, queries=3, keys=keys, width=width, values=values)
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(1, 3, keys, generator=generator) > 0.4 * hidden
    visible[0, 1] &= not hidden
    alpha = instance.weights * visible
    alpha = alpha / alpha.sum(-1, keepdim=True).clamp_min(1e-30)
    instance = problem(instance.value, alpha, visible)
    indices = torch.stack([torch.randperm(keys, generator=generator)[:4] for _ in range(3)])[None]
    weights = optimal_weights(instance, indices, engine)
    usable = visible.gather(-1, indices)
    assert weights.shape == indices.shape
    assert (weights >= 0).all() and (weights[~usable] == 0).all()
    torch.testing.assert_close(weights.sum(-1), usable.any(-1).double())
    error, tolerance = errors(instance, indices, weights)[0], spread(instance.value) ** 2
    for row in usable[0].any(-1).nonzero()[:, 0]:
        chosen = indices[0, row][usable[0, row]]
        best = reference_solver.closest_in_hull(instance.value[0, chosen], instance.output[0, row])
        expected = torch.zeros(keys, dtype=torch.float64).scatter(0, chosen, best)
        least = reference_error(instance, int(row), expected)
        assert abs(error[row] - least) <= 1e-8 * least + 1e-12 * tolerance + 1e-24


@pytest.mark.slow  # the compiler is imported
def test_a_compiled_caller_finds_the_same_weights() -> None:
    """A traced tensor has no memory that C++ could read."""
    tensors = [
        torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(n)) for n in (0, 1, 2)
    ]
    method = OptimalValueAware(3)
    expected = method(*tensors, is_causal=True)
    compiled = torch.compile(lambda *inputs: method(*inputs, is_causal=True), backend="eager")
    assert torch.equal(compiled(*tensors), expected)
    torch.compiler.reset()


def test_the_compiled_engine_needs_the_cpu() -> None:
    instance = problem(torch.randn(1, 5, 3), torch.full((1, 2, 5), 0.2))
    elsewhere = replace(instance, value=instance.value.to("meta"))
    with pytest.raises(ValueError, match="needs the CPU"):
        solve(elsewhere, 2, "fast", "compiled")


def forget_builds() -> None:
    native.library.cache_clear()
    native.compiler.cache_clear()


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("PATH", "no C++ compiler: compiled code runs in torch instead, slower"),
        ("CXX", "active_set runs in torch: [Errno 2] No such file or directory"),
    ],
)
def test_without_a_compiler_the_search_runs_in_torch_and_says_so(
    variable: str, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, "/nowhere/c++")
    forget_builds()
    try:
        assert compiled.library() is None and engine() == engine() == "torch"
        instance = problem(torch.randn(1, 9, 3), torch.full((1, 2, 9), 1 / 9))
        assert torch.equal(solve(instance, 2, "fast")[0], solve(instance, 2, "fast", "torch")[0])
        with pytest.raises(RuntimeError, match="engine='torch'"):
            solve(instance, 2, "fast", "compiled")
    finally:
        forget_builds()
    (record,) = caplog.records
    assert record.getMessage().startswith(message)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fills a cache by a compiler that only copies the library, and yields the cache's folder."""
    above, compiler = tmp_path / "cache", tmp_path / "c++"
    built = getattr(compiled.library(), "_name", "")
    compiler.write_text(
        f'#!/bin/sh\nfor last; do :; done\n[ "$last" = /dev/null ] && exit\n'
        f'cp {built} "$last"\ndirname "$last" >>{tmp_path}/built\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(above))
    forget_builds()
    assert engine() == "compiled"
    native.library.cache_clear()
    yield above / "value_aware_attention"
    monkeypatch.undo()
    forget_builds()


def built_in(folder: Path) -> list[str]:
    """Lists the folders that the compiler of `cached` was told to write to."""
    return (folder.parents[1] / "built").read_text().split()


@pytest.mark.parametrize(
    "damage", ["none", "zeroed", "cut", "empty", "without sha256", "empty sha256"]
)
def test_a_library_in_the_cache_is_built_once_and_a_damaged_one_again(
    damage: str, cached: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library, written = sorted(cached.iterdir())
    whole = library.read_bytes()
    damaged = {
        "zeroed": whole[:5000] + bytes(3000) + whole[8000:],
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "none": whole,
    }
    assert written.read_text() == f"{checksum(library)}  {library.name}\n"
    if damage in damaged:
        library.unlink()  # another file: this process still has the first one in its memory
        library.write_bytes(damaged[damage])
        library.chmod(0o700)
    elif damage == "without sha256":
        written.unlink()
    else:
        written.write_bytes(b"")
    assert engine() == "compiled" and not caplog.records
    assert library.read_bytes() == whole and written.read_text().startswith(checksum(library))
    places = built_in(cached)
    assert Path(places[0]).parent == cached and len(places) == (1 if damage == "none" else 2)


@pytest.mark.parametrize("place", ["library", "folder", "above"])
@pytest.mark.parametrize("how", ["writable", "foreign"])
def test_nothing_is_loaded_that_others_could_have_written(
    place: str, how: str, cached: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library, _ = sorted(cached.iterdir())
    path = {"library": library, "folder": cached, "above": cached.parent}[place]
    if how == "writable":
        path.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        pytest.skip("only root gives files away")
    assert engine() == "compiled"
    said = [f"others can write to {path} " in record.getMessage() for record in caplog.records]
    assert said == ([] if place == "library" else [True])
    assert len(built_in(cached)) == 2
    assert (Path(built_in(cached)[1]).parent == cached) is (place == "library")


@pytest.mark.parametrize("home", ["/proc", "a file"])
def test_without_a_cache_the_search_is_compiled_for_one_process(
    home: str, cached: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (cached / "file").touch()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(cached / "file") if home == "a file" else home)
    assert engine() == "compiled"
    (record,) = caplog.records
    assert "compiled again in every process; set XDG_CACHE_HOME" in record.getMessage()
    assert not Path(built_in(cached)[1]).exists()


def test_a_compiler_that_fails_is_named_with_what_it_said(
    cached: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in cached.iterdir():
        file.unlink()
    compiler = cached.parents[1] / "c++"
    compiler.write_text(f"{compiler.read_text().splitlines()[0]}\necho no room >&2\nexit 1\n")
    assert engine() == "torch"
    said = "cannot build active_set, which runs in torch: no room"
    assert [record.getMessage() for record in caplog.records] == [f"{compiler} {said}"]


@pytest.mark.parametrize("needed", [20, 10_000])
def test_a_row_that_least_squares_takes_long_for_is_solved_or_left_as_found(
    monkeypatch: pytest.MonkeyPatch, needed: int
) -> None:
    """scipy gives up after three iterations a key where it is given no limit."""
    calls, solve_nnls = [], scipy.optimize.nnls

    def nnls(matrix: np.ndarray, target: np.ndarray, maxiter: int | None = None) -> object:
        calls.append(maxiter)
        if (maxiter or 3 * matrix.shape[1]) < needed * matrix.shape[1]:
            raise RuntimeError("Maximum number of iterations reached.")
        return solve_nnls(matrix, target)

    monkeypatch.setattr(scipy.optimize, "nnls", nnls)
    instance = draw(0, keys=24)
    indices, weights = torch.zeros(1, 4, 9, dtype=torch.int64), torch.zeros(1, 4, 9).double()
    weights[..., 0] = 1  # a key alone, far from the output
    before = weights.clone()
    closest_combination._finish(instance, indices, weights, torch.zeros(1, 4, dtype=torch.bool))
    reached = (weights[..., None] * instance.value[0][indices]).sum(dim=-2)
    error = (reached - instance.output).norm(dim=-1)
    assert len(calls) == 4
    if needed == 20:
        assert error.max() <= 1e-12
    else:
        assert torch.equal(weights, before)
