"""Fixed patterns keep the pairs of references, compose as sets, and give masked attention."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference import approximations as reference
from tests.refusals import assert_refused
from value_aware_attention import attention
from value_aware_attention.approximations import (
    BigBird,
    DilatedWindow,
    Fixed,
    Longformer,
    RandomKeys,
    SlidingWindow,
    Strided,
    block_sparse,
    patterns,
)
from value_aware_attention.approximations.fixed_pattern import FixedPattern, SparseFixedPattern
from value_aware_attention.call import Call
from value_aware_attention.error import budget
from value_aware_attention.kernels import Elu, Exponential, Kernel

LONG = 4096


def draw(seed: int, queries: int, keys: int, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, length, width) for length in (queries, keys, keys)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def drawn_keys(r: int, seed: int, keys: int, causal: bool) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(keys, r, generator=generator, dtype=torch.float64).tolist()
    return [reference.random_keys(u, i + 1 if causal else keys) for i, u in enumerate(uniform)]


def expected_keys(method: FixedPattern, position: int, keys: int) -> list[int]:
    """Lists the keys of one query without a causal mask, by the reference of its method."""
    match method:
        case SlidingWindow(r=r, sinks=sinks):
            near = reference.sliding_window(position, keys, r - sinks)
            return sorted({*near, *range(sinks)})
        case DilatedWindow(r=r, dilation=dilation):
            return reference.dilated_window(position, keys, r, dilation)
        case RandomKeys(r=r, seed=seed):
            return drawn_keys(r, seed, keys, False)[position]
        case Strided(stride=stride):
            return reference.strided(position, keys, stride)
        case Fixed(stride=stride, summary=summary):
            return reference.fixed(position, keys, stride, summary)
        case Longformer(window=window, dilation=dilation, global_positions=everywhere):
            return reference.longformer(position, keys, window, dilation, everywhere)
        case BigBird(window=window, random=random, global_positions=everywhere, seed=seed):
            drawn = drawn_keys(random, seed, keys, False)[position]
            return reference.big_bird(position, keys, window, everywhere, drawn)
    raise AssertionError(method)


def expected_past(method: FixedPattern, position: int, keys: int) -> list[int]:
    """Lists the keys of one query under a causal mask: windows and draws of its past, or j <= i."""
    match method:
        case SlidingWindow(r=r, sinks=sinks):
            past = range(position + 1)
            return [key for key in past if key < sinks or key > position - (r - sinks)]
        case DilatedWindow(r=r, dilation=dilation):
            return [key for key in range(position % dilation, position + 1, dilation)][-r:]
        case RandomKeys(r=r, seed=seed):
            return drawn_keys(r, seed, keys, True)[position]
        case Longformer(window=window, dilation=dilation, global_positions=everywhere):
            near = expected_past(DilatedWindow(window, dilation), position, keys)
            return [j for j in range(position + 1) if j in near or {j, position} & {*everywhere}]
        case BigBird(window=window, random=random, global_positions=everywhere, seed=seed):
            near = expected_past(Longformer(window, 1, everywhere), position, keys)
            return sorted({*near, *drawn_keys(random, seed, keys, True)[position]})
    return [key for key in expected_keys(method, position, keys) if key <= position]


def expected_mask(method: FixedPattern, queries: int, keys: int, *, is_causal: bool) -> Tensor:
    mask = torch.zeros(keys, keys, dtype=torch.bool)
    for position in range(keys):
        mask[position, (expected_past if is_causal else expected_keys)(method, position, keys)] = 1
    return mask[keys - queries :]


SMALL = st.integers(1, 20)
METHODS = st.one_of(
    st.builds(SlidingWindow, st.integers(1, 90)),
    st.builds(lambda near, sinks: SlidingWindow(near + sinks, sinks), SMALL, st.integers(1, 6)),
    st.builds(DilatedWindow, st.integers(1, 12), st.integers(1, 9)),
    st.builds(RandomKeys, st.integers(1, 40), st.integers(0, 9)),
    st.builds(Strided, st.integers(1, 20)),
    st.integers(1, 20).flatmap(lambda s: st.builds(Fixed, st.just(s), st.integers(1, s))),
    st.builds(
        Longformer,
        st.integers(1, 12),
        st.integers(1, 5),
        st.sampled_from([(), (0,), (29, 4), (1, 2, 3)]),
    ),
    st.builds(
        BigBird,
        st.integers(1, 9),
        st.integers(1, 9),
        st.sampled_from([(), (0,), (29, 4)]),
        st.integers(0, 9),
    ),
)


@settings(max_examples=60, deadline=None)
@given(method=METHODS, keys=st.integers(30, 150), causal=st.booleans(), data=st.data())
def test_the_pairs_are_those_of_the_reference(
    method: FixedPattern, keys: int, causal: bool, data: st.DataObject
) -> None:
    queries = keys if causal else data.draw(st.integers(1, keys))
    pattern = method.pattern(keys, is_causal=causal)
    expected = expected_mask(method, queries, keys, is_causal=causal)
    assert torch.equal(pattern.mask(queries, keys), expected)
    assert block_sparse.pairs(pattern, queries, keys) == expected.sum()


EXAMPLES = {
    "sliding window": SlidingWindow(5),
    "sliding window of all": SlidingWindow(200),
    "dilated window": DilatedWindow(4, 7),
    "random keys": RandomKeys(3, 1),  # gathered
    "many random keys": RandomKeys(40, 1),  # read with all the others
    "strided": Strided(9),
    "fixed": Fixed(10, 2),
    "longformer": Longformer(7, 2, (0, 80)),
    "big bird": BigBird(4, 3, (1, 90), 2),
    "big bird with many random keys": BigBird(4, 30, (1, 90), 2),
}
MASKS: dict[str, Callable[[int], Tensor | None]] = {
    "no mask": lambda keys: None,
    "padding": lambda keys: torch.arange(keys) < torch.tensor([keys, keys // 3]).view(2, 1, 1, 1),
    "one column": lambda keys: torch.tensor([True, False]).view(2, 1, 1, 1),
    "any": lambda keys: torch.rand(2, 1, keys, keys, generator=generated()) < 0.3,
}


def generated() -> torch.Generator:
    return torch.Generator().manual_seed(5)


of_every_example = pytest.mark.parametrize("method", EXAMPLES.values(), ids=EXAMPLES)


def dense(method: FixedPattern, tensors: list[Tensor], mask: Tensor | None, **options: Any) -> Any:
    """Computes exact attention under the mask of the reference."""
    queries, keys = tensors[0].shape[-2], tensors[1].shape[-2]
    pattern = expected_mask(method, queries, keys, is_causal=options.pop("is_causal", False))
    return attention(*tensors, attn_mask=pattern if mask is None else pattern & mask, **options)


@of_every_example
@pytest.mark.parametrize(
    ("kernel", "mask"), [(Elu(), "any"), *((Exponential(), name) for name in MASKS)], ids=str
)  # fused, and not
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_the_dense_mask(
    method: FixedPattern, kernel: Kernel, mask: str, causal: bool
) -> None:
    tensors, visible = draw(0, 100, 100), MASKS[mask](100)
    options = {"kernel": kernel, "is_causal": causal}
    output = method(*tensors, attn_mask=visible, **options)
    torch.testing.assert_close(output, dense(method, tensors, visible, **options))


@of_every_example
def test_queries_without_a_position_are_refused(method: FixedPattern) -> None:
    expected = (
        f"^{type(method).__name__} got 101 queries and 100 keys; queries are the last [^\n]*$"
    )
    for call in (method, *filter(None, [getattr(method, "select", None)])):
        assert_refused(expected, call, *draw(1, 101, 100))
    if not isinstance(method, RandomKeys):  # of which nothing is counted but r
        assert_refused(expected, budget, method, queries=101, keys=100, head_dim=8, value_dim=8)


@of_every_example
@pytest.mark.parametrize("kernel", [Exponential(), Elu()], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_dense_mask(
    method: FixedPattern, kernel: Kernel, causal: bool
) -> None:
    """Also where a query sees nothing: half of the batch hides all but a third of the keys."""
    visible, grads = MASKS["padding"](100), []
    for function in (method, lambda *x, attn_mask, **o: dense(method, list(x), attn_mask, **o)):
        leaves = [x.requires_grad_() for x in draw(2, 100, 100)]
        output = function(*leaves, kernel=kernel, attn_mask=visible, is_causal=causal)
        output.mul(torch.linspace(-1, 1, 8)).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, expected in zip(*grads, strict=True):
        assert ours.isfinite().all()
        # exact attention's own gradient is NaN in rows without visible keys, where ours is 0
        torch.testing.assert_close(ours, expected.nan_to_num(0.0))


PATTERNS = st.recursive(
    st.one_of(
        st.builds(patterns.window, st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)),
        st.builds(patterns.shifted_window, st.integers(1, 20), st.integers(1, 3), st.just(80)),
        st.builds(patterns.stripes, st.integers(1, 12)),
        st.builds(patterns.same_block, st.integers(1, 30)),
        st.builds(patterns.summaries, st.just(8), st.integers(1, 8)),
        st.builds(patterns.global_positions, st.sampled_from([(), (3,), (0, 79)])),
        st.builds(patterns.random_keys, st.integers(1, 9), st.integers(0, 3), st.just(80)),
        st.just(patterns.past()),
    ),
    lambda two: st.builds(lambda a, b, either: a | b if either else a & b, two, two, st.booleans()),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(a=PATTERNS, b=PATTERNS, queries=st.integers(1, 80))
def test_patterns_compose_as_sets_of_pairs(
    a: patterns.Pattern, b: patterns.Pattern, queries: int
) -> None:
    masks = a.mask(queries, 80), b.mask(queries, 80)
    for pattern, expected in ((a | b, masks[0] | masks[1]), (a & b, masks[0] & masks[1])):
        assert torch.equal(pattern.mask(queries, 80), expected)
        assert block_sparse.pairs(pattern, queries, 80) == expected.sum()


@settings(max_examples=40, deadline=None)
@given(pattern=st.builds(lambda a, b: a | b, PATTERNS, PATTERNS), queries=st.integers(1, 80))
def test_pieces_are_disjoint_and_what_they_say(pattern: patterns.Pattern, queries: int) -> None:
    position = torch.arange(80)
    masks = torch.stack(
        [piece.sees(position[:, None], position).expand(80, 80) for piece in pattern.pieces]
    )
    assert masks.sum(dim=0).max() <= 1
    for piece, pairs in zip(pattern.pieces, masks, strict=True):
        query, key = pairs.nonzero().unbind(-1)
        assert ((query - key) % piece.period == 0).all()
        if piece.queries is not None:
            assert set(query.tolist()) <= {*piece.queries}
        if piece.listed is not None:
            assert (piece.listed[query] == key[:, None]).any(dim=-1).all()
    tensors = draw(queries, queries, 80)
    output = block_sparse.block_sparse_attention(Call.of(*tensors, kernel=Exponential()), pattern)
    expected = attention(*tensors, attn_mask=pattern.mask(queries, 80))
    torch.testing.assert_close(output, expected)


@dataclass(frozen=True)
class Counting:
    """Computes the exponential kernel and counts the pairs it is asked for."""

    counts: list[int] = field(default_factory=list)

    def log_similarity(self, query: Tensor, key: Tensor) -> Tensor:
        scores = Exponential().log_similarity(query, key)
        self.counts.append(scores.numel())
        return scores


def work(method: FixedPattern, **options: Any) -> list[int]:
    """Counts the pairs that each block of one head scores at L = 4096."""
    kernel = Counting()
    x = torch.zeros(LONG, 1)
    method(x, x, x, kernel=kernel, **options)
    return kernel.counts


@pytest.mark.parametrize(
    ("method", "share"),
    [
        (SlidingWindow(256), 0.08),
        (DilatedWindow(256, 4), 0.08),
        (RandomKeys(64, 0), 0.016),
        (Strided(64), 0.065),
        (Fixed(64, 4), 0.08),
        (Longformer(256, 1, (0, LONG - 1)), 0.085),
        (BigBird(64, 8, (0,), 0), 0.04),
    ],
    ids=lambda x: type(x).__name__,
)
def test_pairs_outside_the_pattern_are_not_scored(method: FixedPattern, share: float) -> None:
    """Blocks of 64 queries score few more pairs than the pattern keeps, and never many at once."""
    pairs = budget(method, queries=LONG, keys=LONG, head_dim=1, value_dim=1) / 2 * LONG
    for causal in (False, True):
        scored = work(method, is_causal=causal)
        assert sum(scored) <= share * LONG**2
        assert max(scored) <= 64 * LONG
        assert causal or sum(scored) >= pairs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["sliding window", "dilated window", "random keys"])
def test_the_keys_named_are_those_attended(name: str, causal: bool) -> None:
    method, tensors = EXAMPLES[name], draw(4, 100, 100)
    assert isinstance(method, SparseFixedPattern)
    chosen = method.select(*tensors, is_causal=causal)
    assert chosen.indices.shape[-1] <= method.r
    weights = chosen.dense(100)
    mask = expected_mask(method, 100, 100, is_causal=causal)
    assert torch.equal(weights > 0, mask.expand_as(weights))
    output = method(*tensors, is_causal=causal)
    torch.testing.assert_close(weights @ tensors[2], output)
    exact = attention(*tensors, is_causal=causal)
    torch.testing.assert_close(chosen.error, (output - exact).square().sum(-1))
    single = method.select(*(x.float() for x in tensors), is_causal=causal)
    torch.testing.assert_close(single.error.double(), chosen.error, rtol=1e-4, atol=1e-9)
