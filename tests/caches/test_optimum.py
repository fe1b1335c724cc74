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
from tests.reference.caches import best_set, plain
from tests.refusals import assert_refused
from value_aware_attention.caches import (
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


@pytest.mark.slow
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
    torch.testing.assert_close(found.error, seen.error(plain(seen, found.indices)))
    assert (found.error <= least * (1 + 1e-8) + slack).all()
    assert (found.lower_bound <= least + slack).all()
    kept = torch.zeros_like(rows.available).scatter(-1, found.indices, value=True)
    assert (kept | ~rows.protected).all()


@pytest.mark.parametrize(
    ("kernel", "options"),
    list(zip(KERNELS, [{"sharpness": 6.0}, {}, {"causal": True, "protected": 2}], strict=True)),
)
@pytest.mark.parametrize(("keys", "r"), [(13, 3), (9, 5)])
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
    node = torch.tensor([optimum.FIXED_IN, optimum.FIXED_OUT, 0.3, 0.9])[
        torch.tensor(marks[:M])
    ].double()
    node = node.where(usable, optimum.FIXED_OUT).masked_fill(rows.protected[0], optimum.FIXED_IN)
    masks = subsets(rows, r)
    masks = masks[((masks | (node != optimum.FIXED_IN)) & (~masks | (node >= 0))).all(-1)]
    if not len(masks):
        return
    errors = torch.cat([rows.error(mask[None]) for mask in masks])
    problem, slack = optimum._Problem.of(rows, r), float(tolerance(rows))
    bound, _ = problem.bounded(node[None], torch.inf, 4)
    assert float(bound) <= float(errors.min()) * (1 + 1e-9) + slack
    limit = float(errors.median())
    _, fixed = problem.bounded(node[None], limit, 4)
    below = masks[errors < limit * (1 - 1e-9) - slack]
    assert (below | (fixed != optimum.FIXED_IN)).all() and (
        ~below | (fixed != optimum.FIXED_OUT)
    ).all()


def subsets(rows: Rows, r: int) -> Tensor:
    """Lists the sets of r keys that a cache may keep."""
    sets = torch.tensor(list(combinations(range(M), r)))
    masks = torch.zeros(len(sets), M, dtype=torch.bool).scatter(-1, sets, value=True)
    return masks[((masks | ~rows.protected) & (~masks | rows.available)).all(-1)]


@settings(deadline=None, max_examples=15)
@given(kinds(keys=M, rows=4, batch=(1,)), st.integers(2, M))
def test_the_search_alone_finds_the_optimum(seen: Observed, r: int) -> None:
    """From the worst of all sets; most often the optimum is where the search starts."""
    rows, r = Rows.of(seen), min(r, int(seen.available.sum()))
    masks = subsets(rows, r)
    errors, slack = torch.cat([rows.error(mask[None]) for mask in masks]), float(tolerance(rows))
    kept, error, lower, proved = optimum._search(rows, masks[errors.argmax()][None], 60.0)
    assert proved and error <= errors.min() * (1 + 1e-8) + slack
    assert lower <= errors.min() * (1 + 1e-12) and torch.equal(rows.error(kept[None])[0], error)


def test_with_no_time_the_bound_is_still_below_every_set() -> None:
    seen = observed(32, batch=(2,), rows=16)
    found = optimal_set(seen, 16, seconds=1e-9)
    assert not found.proved.any() and (found.lower_bound <= found.error).all()
    for method in (ValueAware(16, search="best"), ObservedAttention(16), KeyDiff(16)):
        assert (found.error <= seen.error(method.keep(seen)) * (1 + 1e-9)).all()


def test_a_stopped_search_has_a_bound_between_none_and_the_optimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = observed(16, batch=(1,), rows=16, seed=1)
    clock = iter(range(10))
    monkeypatch.setattr(optimum, "monotonic", lambda: next(clock))
    monkeypatch.setattr(optimum, "NODES", 1)
    found = optimal_set(seen, 4, seconds=4.5)
    least = seen.error(best_set(seen, 4))
    assert not found.proved.any() and (found.lower_bound > 0).all()
    assert (found.lower_bound <= least).all()


def test_copies_of_keys_are_no_better_than_each_other() -> None:
    """Ties are not searched: three copies of each key have as many best sets."""
    seen = observed(5, batch=(1,))
    copied = {"key": -2, "value": -2, "visible": -1, "available": -1}
    copies = {name: torch.cat([getattr(seen, name)] * 3, dim=d) for name, d in copied.items()}
    seen = replace(seen, **copies)
    found = optimal_set(seen, 4)
    assert found.proved.all()
    torch.testing.assert_close(found.error, seen.error(best_set(seen, 4)), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("kernel", "beside"), list(zip(KERNELS, (True, False, True), strict=True)))
@pytest.mark.parametrize("r", [5, 10])
def test_errors_are_those_of_fp64_whatever_the_precision_of_the_inputs(
    r: int, kernel: str, beside: bool
) -> None:
    """Far from the origin, where outputs of fp32 have four digits; all ten keys leave nothing."""
    seen = observed(10, kernel=KERNELS[kernel], dtype=torch.float32, beside=beside)
    seen = replace(seen, value=seen.value + 1e3)
    raised = {name: getattr(seen, name).double() for name in ("query", "key", "value")}
    if seen.beside is not None:
        raised["beside"] = seen.beside.rearranged(Tensor.double)
    found, exact = optimal_set(seen, r), replace(seen, **raised)
    assert found.proved.all() and (found.lower_bound <= found.error).all()
    least = exact.error(plain(seen, found.indices))
    torch.testing.assert_close(found.error, least, rtol=1e-9, atol=1e-12)
    assert r < 10 or (found.error <= 1e-12).all()


def test_a_cache_alone_and_a_projection_in_fp32_are_taken() -> None:
    """The projection orders keys of a start of the search, and never changes the optimum."""
    seen = observed(10, batch=(2, 1), dtype=torch.float32)
    found = optimal_set(seen, 4)
    heads = seen.query.shape[-3]
    projection = torch.randn(heads, seen.value.shape[-1], 6, generator=torch.Generator())
    for text in range(2):
        best = optimal_set(replace(seen.cache((text, 0)), projection=projection), 4)
        assert torch.equal(best.indices, found.indices[text, 0])
        torch.testing.assert_close(best.error, found.error[text, 0])


def test_more_keys_than_it_takes_and_bad_sizes_are_refused() -> None:
    assert_refused(
        r"optimal_set got 129 keys; it takes at most 128$", optimal_set, observed(129), 5
    )
    assert_refused(
        r"optimal_set got 130 keys; it takes at most 128$", optimal_set, observed(130), 129
    )
    assert_refused(r"keeps r = 9 keys; there are 8$", optimal_set, observed(), 9)
    assert_refused(
        r"2 are protected, so r must be at least 2$", optimal_set, observed(protected=2), 1
    )
    assert_refused(r"^r is 0; it must be an integer >= 1$", optimal_set, observed(), 0)
    for seconds in (0, -1.5, float("nan")):
        assert_refused(
            rf"^seconds is {seconds}; it must be a number above",
            optimal_set,
            observed(),
            3,
            seconds=seconds,
        )
