"""Every sparse approximation refuses inputs that are not finite, and works in bounded blocks."""

import gc
from collections.abc import Callable
from functools import partial
from weakref import ref

import methods
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import METHODS, LargestTensor

from tests.refusals import assert_refused
from value_aware_attention import approximations, caches
from value_aware_attention.approximations import (
    LSH,
    Approximation,
    Exact,
    Linformer,
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
    SparseApproximation,
    chunked,
)
from value_aware_attention.call import Call, max_elements, max_elements_within
from value_aware_attention.kernels import Elu, Exponential

SPARSE = {n: m for n, m in METHODS.items() if isinstance(m.build(), SparseApproximation)}
HEADS, LENGTH, WIDTH = 4, 256, 8


draw = partial(methods.draw, 0, 1, HEADS, LENGTH, WIDTH, dtype=torch.float32)


@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_a_number_that_is_none_is_refused_where_a_single_pair_shows_it(place: int) -> None:
    """The last key, which the last query alone sees; that query, which sees no other key."""
    tensors, name = draw(), ("query", "key", "value")[place]
    tensors[place][..., -1, :] = torch.nan
    mask = torch.eye(LENGTH, dtype=torch.bool)
    assert_refused(
        f"^{name} holds NaN or infinity; it must be finite$",
        SlidingWindow(LENGTH),
        *tensors,
        attn_mask=mask,
    )


def test_a_row_that_keeps_masked_keys_alone_has_the_error_of_zeros() -> None:
    """Far from the origin, where zeros are far from the mean that values are measured from."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(4, 4, generator=generator) + 3 for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, 1], mask[2] = False, False  # the window of row 1 is a masked key; row 2 sees none
    method = SlidingWindow(1)
    chosen = method.select(query, key, value, attn_mask=mask)
    exact, output = (m(query, key, value, attn_mask=mask) for m in (Exact(), method))
    assert chosen.weights[1].sum() == 0 and chosen.error[2] == 0
    torch.testing.assert_close(chosen.error, (exact - output).square().sum(-1))


def test_what_no_row_sees_is_in_no_error() -> None:
    """Also where all visible keys are kept, and the small error is computed in fp64."""
    query, key, value = draw()
    visible = torch.arange(LENGTH) < 5
    value[..., 5:, :] = torch.nan
    chosen = SlidingWindow(9).select(query, key, value, attn_mask=visible)
    assert chosen.error.isfinite().all() and (chosen.error[..., 0] <= 1e-10).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_tensors_of_a_call_are_freed_with_it(is_causal: bool) -> None:
    """By counting references alone: what waits for the garbage collector fills a GPU."""
    call = Call.of(*draw(), kernel=Exponential(), is_causal=is_causal)
    derived = call.seen.output(), call.centred.weights
    value = ref(call.value)
    gc.disable()
    try:
        del call, derived
        assert value() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_values_are_centred_on_the_mean_of_those_that_the_first_row_sees(
    masked: bool, is_causal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 5, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    value = tensors[2] + 7
    mask = torch.rand(2, 5, 5, generator=generator) < 0.5
    mask[0, :2], mask[1, :, 4] = False, False  # its first rows see nothing; a key nobody sees
    call = Call.of(
        *tensors[:2], value, kernel=Elu(), attn_mask=mask if masked else None, is_causal=is_causal
    )
    visible = mask if masked else torch.ones_like(mask)
    visible = visible.tril() if is_causal else visible
    for head in range(2):
        first = next(row for row in visible[head] if row.any())
        expected = value[head] - value[head, first].mean(dim=0)
        expected[~visible[head].any(dim=0)] = 0
        torch.testing.assert_close(call.centred.value[head], expected)


def test_a_method_shows_its_arguments_but_not_what_is_usual() -> None:
    """Records name a method so, and are found again by it."""
    assert str(OptimalValueAware(9)) == "OptimalValueAware(r=9, search='default')"
    assert "engine='torch'" in str(OptimalValueAware(9, engine="torch"))
    assert "mean=True" in str(OptimalValueAware(9, mean=True))


def test_counts_may_be_numpys_and_show_as_pythons() -> None:
    count, seed = np.int64(4), np.uint8(3)
    for method, text in (
        (approximations.OptimalValueOblivious(count), "OptimalValueOblivious(r=4)"),
        (approximations.RandomKeys(count, seed), "RandomKeys(r=4, seed=3)"),
        (approximations.NormWeightedKeys(count, np.int64(2)), "NormWeightedKeys(r=4, norm=2)"),
        (approximations.NormWeightedKeys(4, 1.0), "NormWeightedKeys(r=4, norm=1)"),
        (approximations.Nystrom(count, count), "Nystrom(landmarks=4, iterations=4)"),
        (
            approximations.BigBird(count, count, np.array([3, 0]), seed),
            "BigBird(window=4, random=4, global_positions=(0, 3), seed=3)",
        ),
    ):
        assert str(method) == text
        assert method(*draw()).isfinite().all()
    with chunked(np.int64(5)):
        assert max_elements() == 5


X = torch.ones(4, 2)
COUNT = "it must be an integer >= 1"
REFUSED: dict[Callable[[], object], str] = {
    lambda: SlidingWindow(0): rf"r is 0; {COUNT}",
    lambda: approximations.DilatedWindow(3, 0): r"dilation is 0",
    lambda: approximations.NormWeightedKeys(4, norm=3): r"norm is 3; it must be one of 1, 2$",
    lambda: approximations.NormWeightedKeys(4, norm=True): r"norm is True; it must be one of",
    lambda: approximations.Strided(0): r"stride is 0",
    lambda: approximations.Fixed(0, 1): r"stride is 0",
    lambda: approximations.Fixed(4, 0): r"summary is 0",
    lambda: approximations.Fixed(4, 5): r"summary is 5; it must be at most the stride, 4",
    lambda: approximations.Longformer(0): r"window is 0",
    lambda: approximations.Longformer(3, 0): r"dilation is 0",
    lambda: approximations.Longformer(3, 1, (0, -1)): r"global position is -1; it must be an integ",
    lambda: approximations.BigBird(0, 1, (), 0): r"window is 0",
    lambda: approximations.BigBird(1, 0, (), 0): r"random is 0",
    lambda: approximations.BigBird(1, 1, (1.5,), 0): r"global_positions is \(1\.5,\)",
    lambda: LSH(5, 1, 0): r"must be even",
    lambda: Linformer(0, 0): COUNT,
    lambda: Linformer(8, 0, length=7): r"it must be an integer >= 8",
    lambda: approximations.Nystrom(0): COUNT,
    lambda: approximations.Nystrom(2, iterations=0): COUNT,
    lambda: approximations.Nystrom(True): COUNT,
    lambda: approximations.RandomFourierFeatures(0, 0): COUNT,
    lambda: approximations.OrthogonalRandomFeatures(4, 0, scaling="none"): r"performer, paper",
    **{lambda r=r: OptimalValueAware(r): rf"r is .*{COUNT}" for r in (0, -1, 1.5, True, "3", None)},
    **{
        lambda r=r: OptimalValueOblivious(r): r"^r is .*; it must be an integer >= 1$"
        for r in (True, np.True_, 4.0, np.float64(4), "4", np.array([4, 4]))
    },
    lambda: OptimalValueAware(3, mean="yes"): r"mean is 'yes'; it must be True or False",
    lambda: approximations.MeanValueSlot(4, "true"): r"mass is 'true'.*one of mean_key, exact$",
    **{
        lambda build=build: build((3, 4))(X, X, X): "global position is 4; 4 keys allow 0 to 3"
        for build in (
            lambda places: approximations.Longformer(3, 1, places),
            lambda places: approximations.BigBird(3, 1, places, 0),
        )
    },
    lambda: LSH(2, 1, 0)(X, X[:3], X[:3]): "4 queries and 3 keys",
    lambda: Linformer(9, 0)(X, X, X): "rank is 9; it must be at most the 4 keys",
    lambda: approximations.Nystrom(9)(X, X, X): "landmarks is 9; it must be at most the 4 keys",
    **{lambda n=n: chunked(n).__enter__(): "elements is" for n in (0, -1, 1.5)},
    lambda: OptimalValueAware(1, search="slow"): r"search is 'slow'.*fast, default, best",
    lambda: OptimalValueAware(1, engine="fortran"): r"engine is 'fortran'.*compiled.*torch",
}


@pytest.mark.parametrize(("build", "message"), REFUSED.items())
def test_bad_arguments_are_named_with_what_is_allowed(
    build: Callable[[], object], message: str
) -> None:
    assert_refused(message, build)


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: approximations.RandomKeys(4, seed),
        lambda seed: approximations.SampledKeys(4, seed),
        lambda seed: approximations.BigBird(3, 2, (), seed),
        lambda seed: approximations.LSH(4, 1, seed),
        lambda seed: approximations.Linformer(4, seed),
        lambda seed: approximations.OrthogonalRandomFeatures(4, seed),
        lambda seed: approximations.RandomFourierFeatures(4, seed),
        lambda seed: caches.Random(4, seed),
    ],
)
def test_seeds_are_those_that_torch_takes(build: Callable[[object], object]) -> None:
    build(2**64 - 1)
    for wrong in (2**64, 2**70, -1, 0.0, "0", True):
        assert_refused(r"^seed is .*; it must be an integer >= 0 and below", build, wrong)


@pytest.mark.parametrize("method", [SlidingWindow(9), Linformer(6, 0), LSH(8, 2, 0)], ids=str)
def test_vmap_and_compiled_graphs_are_not_checked(method: Approximation) -> None:
    """They cannot branch on numbers; methods that must do so have no vmap."""
    tensors, options = draw(), {"kernel": Elu()}
    expected = method(*tensors, **options)
    by_head = partial(method, **options)
    for _ in range(2):
        by_head = torch.vmap(by_head, randomness="same")
    torch.testing.assert_close(by_head(*tensors), expected)
    with torch.no_grad():
        compiled = torch.compile(method.check_finite, backend="eager", fullgraph=True)
        compiled(Call.of(*tensors, kernel=Elu()))
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        torch.vmap(OptimalValueOblivious(4))(*tensors)


@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_finite_numbers_whose_sum_overflows_are_taken(place: int) -> None:
    tensors = draw()
    tensors[place] = torch.full_like(tensors[place], 3e38)
    tensors[(place + 1) % 2] *= 0  # scores stay finite
    assert tensors[place].sum().isinf()
    output = OptimalValueOblivious(4)(*tensors)
    assert output.isfinite().all()
    if place == 2:
        torch.testing.assert_close(output, tensors[2])


@settings(max_examples=40)
@given(
    numbers=st.integers(1, 4000), queries=st.integers(0, 40), keys=st.integers(1, 40),
    needed=st.integers(0, 100),
)  # fmt: skip
def test_blocks_hold_what_is_allowed_or_one_query(
    numbers: int, queries: int, keys: int, needed: int
) -> None:
    tensors = torch.zeros(2, 3, queries, 5), torch.zeros(2, 3, keys, 5), torch.zeros(2, 3, keys, 4)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    call = Call.of(*tensors, kernel=Exponential(), attn_mask=mask)
    with chunked(numbers):
        blocks = list(call.blocks(needed))
    rows = [block.query.shape[-2] for block in blocks]
    assert torch.cat([block.rows for block in blocks]).tolist() == list(range(queries))
    assert all(n <= 1 or 6 * n * max(keys, needed) <= numbers for n in rows)
    assert all(block.visible is not None for block in blocks)
    assert [b.visible.shape[-2] for b in blocks if b.visible is not None] == rows


def test_the_allowance_ends_with_its_context() -> None:
    before = max_elements()
    with pytest.raises(KeyError), chunked(100):
        with chunked(7):
            assert max_elements() == 7
        assert max_elements() == 100
        raise KeyError
    assert max_elements() == before == max_elements_within(1) == 2**24
    assert max_elements_within(0.25) == 2**22 and max_elements_within(1e-12) == 1


@pytest.mark.parametrize(
    ("method", "rows", "kibibytes"),
    [
        *((method.build(), 12, 160) for method in SPARSE.values()),
        (OptimalValueOblivious(LENGTH), 4, 80),  # with r = M the indices alone would be 2 MiB
    ],
    ids=[*SPARSE, "every key"],
)
def test_nothing_as_large_as_all_weights_is_held(
    method: Approximation, rows: int, kibibytes: int
) -> None:
    """12 rows of 256 keys in 4 heads are 48 KiB of fp32; all weights would be 1 MiB."""
    with chunked(rows * HEADS * LENGTH), LargestTensor() as largest, torch.no_grad():
        method(*draw())
    assert 0 < largest.size <= kibibytes * 1024  # patterns take 64 queries, whatever is allowed
