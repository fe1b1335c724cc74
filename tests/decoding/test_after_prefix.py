"""AfterPrefix equals its definition in loops; padding, batches and blocks never change it."""

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.caches.methods import KERNELS, METHODS, REFITTING, SEEING, Spy, refuses
from tests.caches.seen import rotary
from tests.caches.slow import OneCache
from tests.refusals import assert_refused
from value_aware_attention import attention, caches
from value_aware_attention.approximations import OptimalValueOblivious, chunked
from value_aware_attention.caches import AfterPrefix, CacheMethod
from value_aware_attention.call import Layer
from value_aware_attention.error import budget
from value_aware_attention.kernels import Elu, Exponential

N, PREFIX, D, V, R = 15, 10, 4, 3, 6
OBSERVED = ("last", "causal", "noncausal", "continued", "hindsight")
CLOSE = {"atol": 2e-5, "rtol": 2e-4}
Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def inputs() -> Inputs:
    return text(2, 2)


def text(*leading: int, seed: int = 0, queries: int = N) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((queries, D), (N, D), (N, V))
    return tuple(torch.randn(*leading, *size, generator=generator) for size in sizes)


def with_slow_best(names: Iterable[str]) -> list[object]:
    """Marks the methods that search at length as slow."""
    return [pytest.param(x, marks=pytest.mark.slow) if "best" in x else x for x in names]


def after(method: CacheMethod, **options: object) -> AfterPrefix:
    return AfterPrefix(method, **{"prefix": PREFIX, "rows": 8, "sinks": 1, "recent": 2} | options)


def left_padding(hidden: int = 3, dimensions: int = 4) -> Tensor:
    """Masks the first tokens of the first text of two, as left padding."""
    mask = torch.ones(2, *(1,) * (dimensions - 2), N, dtype=torch.bool)
    mask[0, ..., :hidden] = False
    return mask


def causal(mask: Tensor | None = None) -> Tensor:
    visible = torch.ones(N, N, dtype=torch.bool).tril()
    return visible if mask is None else visible & mask


def check_loop(
    method: AfterPrefix, kernel: str = "exponential", layer: Layer | None = None
) -> None:
    """Compares with one cache at a time: two texts, of which one is padded, of grouped heads."""
    query, (_, key, value) = text(2, 2, 2)[0], text(2, 2, seed=1)
    mask, options = left_padding(), {"kernel": KERNELS[kernel]}
    found = method(
        query, key[:, :, None], value[:, :, None], attn_mask=mask[:, None], is_causal=True,
        layer=layer, **options,
    )  # fmt: skip
    for text_number in range(2):
        visible = causal(mask[text_number, 0]).expand(2, -1, -1)
        for head in range(2):
            at = text_number, head
            one = OneCache(
                query[at], key[at], value[at], visible, layer=of_head(layer, at), **options
            )
            torch.testing.assert_close(found[at], one.through(method), **CLOSE)


def of_head(layer: Layer | None, at: tuple[int, int]) -> Layer | None:
    """Reduces what is known of a layer to one of its key-value heads."""
    if layer is None:
        return None
    projection = None if layer.projection is None else layer.projection[at[1]]
    repeated = layer.repeated
    if repeated is not None:
        repeated = (repeated[0][at], repeated[1][(*at, 0)], repeated[2][(*at, 0)])
    return Layer(projection, layer.rotary, repeated)


def known_layer() -> Layer:
    """Builds all that an adapter may know of a layer of two groups of two heads."""
    generator = torch.Generator().manual_seed(5)
    again = 7
    sizes = ((2, 2, 2, again, D), (2, 2, 1, again, D), (2, 2, 1, again, V))
    repeated = tuple(torch.randn(size, generator=generator) for size in sizes)
    return Layer(torch.randn(2, 2, V, 5, generator=generator), rotary, repeated)


@pytest.mark.parametrize("name", with_slow_best(SEEING))
@settings(deadline=None, max_examples=6)
@given(
    observed=st.sampled_from([*OBSERVED, "repeat"]),
    kernel=st.sampled_from(list(KERNELS)),
    every=st.sampled_from([None, 1, 2, 4, N]),
    known=st.booleans(),
)
def test_it_is_the_loop(
    name: str, observed: str, kernel: str, every: int | None, known: bool
) -> None:
    """Every method, with any observed queries, any number of choices and any kernel."""
    method = SEEING[name](R)
    if method.refits or observed in ("repeat", "continued"):
        every = None
    if refuses(method, KERNELS[kernel]):
        kernel = "exponential"
    layer = known_layer() if known or observed == "repeat" else None
    check_loop(after(method, observed=observed, every=every), kernel, layer)


@pytest.mark.parametrize("every", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "observed"),
    [(name, "noncausal") for name in METHODS] + [("value_aware", name) for name in OBSERVED[:-1]],
)
def test_no_row_sees_what_comes_after_it(
    inputs: Inputs, name: str, observed: str, every: int | None
) -> None:
    """Neither attention nor a choice of keys looks ahead."""
    if METHODS[name](R).refits or observed == "continued":
        every = None
    method = after(METHODS[name](R), observed=observed, every=every)
    before = method(*inputs, is_causal=True)
    for first in (PREFIX, PREFIX + 1, N - 1):
        changed = tuple(x.clone() for x in inputs)
        for x in changed:
            x[..., first:, :] *= -9.0
        found = method(*changed, is_causal=True)
        assert torch.equal(found[..., :first, :], before[..., :first, :])
        assert not torch.allclose(found[..., first:, :], before[..., first:, :])


@pytest.mark.parametrize("name", METHODS)
def test_it_is_exact_where_nothing_is_dropped(inputs: Inputs, name: str) -> None:
    exact = attention(*inputs, is_causal=True)
    assert torch.equal(after(METHODS[name](R), prefix=N)(*inputs, is_causal=True), exact)
    if name not in REFITTING:
        found = after(METHODS[name](PREFIX))(*inputs, is_causal=True)
        torch.testing.assert_close(found, exact, **CLOSE)


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """Draws a mask of any shape that broadcasts to (2, 2, N, N)."""
    sizes = draw(st.tuples(*(st.sampled_from(sorted({1, size})) for size in (2, 2, N, N))))
    shape = sizes[draw(st.integers(0, 3)) :]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.6, 0.95]))


@settings(deadline=None, max_examples=40)
@given(masks(), st.sampled_from([PREFIX, None]), st.booleans(), st.sampled_from(OBSERVED))
def test_masks_of_every_shape_are_the_loop(
    mask: Tensor, prefix: int | None, is_causal: bool, observed: str
) -> None:
    if prefix is None:
        is_causal, observed = False, "noncausal" if observed == "causal" else observed
    method = after(caches.ObservedAttention(R), prefix=prefix, observed=observed)
    query, _, _ = text(2, 2)
    _, key, value = text(2, seed=1)  # the second dimension shares its keys
    whole = mask.expand(2, 2, N, N)
    found = method(query, key[:, None], value[:, None], attn_mask=mask, is_causal=is_causal)
    visible = whole & causal() if is_causal else whole
    for number in range(2):
        one = OneCache(query[number], key[number], value[number], visible[number])
        one.available = whole[number].any(dim=(0, 1))
        through = one.through if prefix else one.without_prefix
        torch.testing.assert_close(found[number], through(method), **CLOSE)
    assert (found[~visible.any(dim=-1)] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_the_values_of_padding_move_nothing(name: str) -> None:
    """Nor do they cost digits, as a mean over all values would."""
    query, key, value = text(2, 2)
    mask, method = left_padding(), after(METHODS[name](R))
    padding = ~mask[:, :, 0, :, None]
    found, expected = (
        method(query, key, value.masked_fill(padding, x), attn_mask=mask, is_causal=True)
        for x in (1e8, 0.0)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", METHODS)
def test_more_slots_than_keys_leave_some_unused(inputs: Inputs, name: str) -> None:
    mask = left_padding(PREFIX - 2)  # two keys of the first prefix are left
    found = after(METHODS[name](R), observed="causal")(*inputs, attn_mask=mask, is_causal=True)
    exact = attention(*inputs, attn_mask=mask, is_causal=True)
    if name not in REFITTING:
        torch.testing.assert_close(found[0], exact[0], **CLOSE)
    assert found.isfinite().all() and (found[0, :, : PREFIX - 2] == 0).all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("prefix", [PREFIX, None])
def test_rows_that_see_nothing_are_zeros(inputs: Inputs, name: str, prefix: int | None) -> None:
    mask = torch.ones(2, 1, N, N, dtype=torch.bool)
    mask[0] = False
    method = after(METHODS[name](R), prefix=prefix)
    found = method(*inputs, attn_mask=mask, is_causal=prefix is not None)
    assert (found[0] == 0).all() and found[1].isfinite().all() and (found[1] != 0).all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", range(3))
def test_nan_and_infinity_are_refused_also_where_hidden(
    inputs: Inputs, wrong: float, place: int
) -> None:
    inputs[place][0, 0, 0, 0] = wrong
    name = ("query", "key", "value")[place]
    assert_refused(
        f"^{name} holds NaN or infinity; it must be finite$",
        after(caches.KeyNorm(R)),
        *inputs,
        attn_mask=left_padding(),
        is_causal=True,
    )


@pytest.mark.parametrize("name", with_slow_best(METHODS))
def test_every_type_of_numbers(inputs: Inputs, name: str) -> None:
    method = after(METHODS[name](R))
    expected = method(*inputs, is_causal=True)
    for dtype in (torch.float64, torch.float16):
        given_type = tuple(x.to(dtype) for x in inputs)
        found = method(*given_type, is_causal=True)
        assert found.dtype == dtype
        rounded = method(*(x.float() for x in given_type), is_causal=True)
        close = (
            {"atol": 1e-4, "rtol": 1e-3} if dtype == torch.float64 else {"atol": 2e-2, "rtol": 0}
        )
        torch.testing.assert_close(found.float(), rounded, **close)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method(*inputs, is_causal=True), expected)


def test_no_text_and_no_position() -> None:
    assert after(caches.ValueAware(R))(*text(0, 2), is_causal=True).shape == (0, 2, N, V)
    query, key, value = text(2)
    encoder = after(caches.ValueAware(R), prefix=None)
    assert encoder(query[:, :0], key, value).shape == (2, 0, V)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_the_served_rows(inputs: Inputs, name: str) -> None:
    tensors = [x.double().requires_grad_() for x in inputs]
    mask = left_padding()
    after(METHODS[name](R))(*tensors, attn_mask=mask, is_causal=True).square().sum().backward()
    for x in tensors:
        assert x.grad.isfinite().all() and (x.grad[..., PREFIX:, :] != 0).any()
        assert (x.grad[0, :, :3] == 0).all()


def test_gradients_are_those_of_the_mask(inputs: Inputs) -> None:
    spy = Spy(caches.LeaveOneOut(R))
    gradients = []
    for through_mask in (False, True):
        tensors = [x.double().requires_grad_() for x in inputs]
        if through_mask:
            visible = torch.arange(N).expand(2, 2, N) >= PREFIX
            visible = visible.scatter(-1, spy.kept[0].indices, value=True)[..., None, :]
            visible = visible | (torch.arange(N)[:, None] < PREFIX)
            output = attention(*tensors, attn_mask=visible & causal())
        else:
            output = after(spy)(*tensors, is_causal=True)
        output.square().sum().backward()
        gradients.append([x.grad for x in tensors])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", with_slow_best(SEEING))
def test_without_a_prefix_one_set_serves_every_query(name: str) -> None:
    query, (_, key, value) = text(2, 2, queries=7)[0], text(2, seed=1)
    method = after(SEEING[name](R), prefix=None, observed="hindsight")
    mask = left_padding()
    found = method(query, key[:, None], value[:, None], attn_mask=mask)
    for number in range(2):
        visible = mask[number].expand(2, 7, N)
        one = OneCache(query[number], key[number], value[number], visible)
        torch.testing.assert_close(found[number], one.without_prefix(method), **CLOSE)
    assert_refused(
        r"^AfterPrefix does not support is_causal: [^\n]*$", method, *text(2), is_causal=True
    )


def test_queries_share_keys_along_dimensions_of_size_one() -> None:
    """Wherever these are, and whatever the others are called."""
    query, (_, key, value) = text(3, 2, 2)[0], text(3, 2, seed=1)
    method = after(caches.ValueAware(R), observed="hindsight")
    grouped = method(query, key[:, :, None], value[:, :, None], is_causal=True)
    first = method(
        query.movedim(2, 0), key[None], value[None], is_causal=True
    )  # the group before texts and heads
    torch.testing.assert_close(first.movedim(0, 2), grouped, **CLOSE)
    spy = Spy(caches.ValueAware(R))
    after(spy, observed="hindsight")(query, key[0, 0], value[0, 0], is_causal=True)
    assert spy.kept[0].indices.shape == (R,) and spy.seen[0].query.shape[0] == 3 * 2 * 2
    alone = tuple(x.repeat_interleave(2, dim=1) for x in (key, value))
    own = method(query.flatten(1, 2), *alone, is_causal=True).unflatten(1, (2, 2))
    assert not torch.allclose(own, grouped)  # six heads with keys of their own


@pytest.mark.parametrize("observed", OBSERVED)
def test_blocks_of_queries_change_nothing(inputs: Inputs, observed: str) -> None:
    method = after(caches.ObservedAttention(R), observed=observed)
    whole = method(*inputs, attn_mask=left_padding(), is_causal=True)
    with chunked(2 * N):
        cut = method(*inputs, attn_mask=left_padding(), is_causal=True)
    torch.testing.assert_close(cut, whole, **CLOSE)


def test_its_text_tells_settings_apart() -> None:
    published = {"snapkv", "h2o", "kvzip"}  # methods of the list that observe other queries
    built = [
        *(after(METHODS[name](r)) for name in METHODS.keys() - published for r in (R, PREFIX)),
        after(caches.Random(R, seed=1)),
        *(after(caches.KeyNorm(R), **{name: 3}) for name in ("rows", "sinks", "recent", "every")),
        *(after(caches.KeyNorm(R), observed=observed) for observed in OBSERVED[1:]),
        *(after(caches.KeyNorm(R), pool=pool) for pool in ("layer", "model")),
        after(caches.KeyNorm(R), seed=1),
        *(after(caches.KeyNorm(R), prefix=prefix) for prefix in (None, 7)),
    ]
    assert len({str(method) for method in built}) == len(built)


@pytest.mark.parametrize(("every", "choices"), [(None, 1), (2, 3), (5, 1)])
def test_multiply_adds_are_those_of_every_pair_and_choice(every: int | None, choices: int) -> None:
    method = after(caches.ObservedAttention(R), every=every)
    pairs = sum(row + 1 if row < PREFIX else R + row - PREFIX + 1 for row in range(N))
    once = method.method.multiply_adds(8, PREFIX, D, V)
    sizes = {"queries": N, "keys": N, "head_dim": D, "value_dim": V}
    expected = (pairs * (D + V) + choices * once) / N
    assert budget(method, **sizes, is_causal=True) == pytest.approx(expected)
    encoder = after(caches.ObservedAttention(R), prefix=None)
    once = encoder.method.multiply_adds(8, N, D, V)
    assert budget(encoder, **sizes) == pytest.approx(R * (D + V) + once / N)


def wrong(message: str, build: Callable[[], object]) -> object:
    return pytest.param(build, message, id=message[:40])


LAST = {"attn_mask": None, "is_causal": True}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        wrong("r is 11; the prefix has 10 keys to keep", lambda: after(caches.Recent(11))),
        wrong(
            "r is 2; it counts 1 sinks and 2 recent keys, so it must be at least 3",
            lambda: after(caches.Recent(2)),
        ),
        wrong(
            "prefix is 16; the text has 15 positions",
            lambda: after(caches.Recent(R), prefix=16)(*text(2), **LAST),
        ),
        wrong(
            "every is 16; the text has 15 positions",
            lambda: after(caches.Recent(R), every=16)(*text(2), **LAST),
        ),
        wrong("every is 0; it must be an integer >= 1", lambda: after(caches.Recent(R), every=0)),
        wrong(
            "every is 2; ValueAware refits values, so it chooses once",
            lambda: after(caches.ValueAware(R, refit=True), every=2),
        ),
        wrong(
            "every is 2; AttentionMatching refits values, so it chooses once",
            lambda: after(caches.AttentionMatching(R), every=2),
        ),
        wrong(
            "every is 2; pool 'checked' compares one choice: model, layer or None",
            lambda: after(caches.Recent(R), every=2, pool="checked"),
        ),
        wrong(
            "pool is 'head'; it must be None or one of layer, model, checked",
            lambda: after(caches.Recent(R), pool="head"),
        ),
        wrong(
            "heads may keep 6 keys; with pool each must keep 7: floor, or 1 sinks and 2 recent "
            "keys",
            lambda: after(caches.Recent(R), pool="layer", floor=7),
        ),
        wrong(
            "heads are pooled by hugging_face.replace_attention, which knows the layers; bare "
            "tensors have none",
            lambda: after(caches.Recent(R), pool="layer")(*text(2), **LAST),
        ),
        wrong(
            "every is 2; repeated queries are recorded once",
            lambda: after(caches.Recent(R), every=2, observed="repeat"),
        ),
        wrong(
            "every is 2; without a prefix no cache grows",
            lambda: after(caches.Recent(R), every=2, prefix=None),
        ),
        *(
            wrong(
                f"observed is '{observed}'; without a prefix it must be one of last, noncausal, "
                f"hindsight",
                lambda observed=observed: after(caches.Recent(R), observed=observed, prefix=None),
            )
            for observed in ("causal", "repeat")
        ),
        wrong(
            "observed is 'future'; it must be one of last, causal, noncausal, continued, repeat, "
            "hindsight",
            lambda: after(caches.Recent(R), observed="future"),
        ),
        wrong(
            "r is 8; it counts 100 sinks and 4 recent keys, so it must be at least 16",
            lambda: caches.AfterPrefix(caches.Recent(8), prefix=16, sinks=100),
        ),
        wrong(
            "method is of type OptimalValueOblivious; it must be a method of caches, such as "
            "caches.ObservedAttention(8)",
            lambda: after(OptimalValueOblivious(8)),
        ),
        wrong(
            "method is the class Recent; it must be a method of caches, such as "
            "caches.ObservedAttention(8)",
            lambda: after(caches.Recent),
        ),
        wrong("prefix is 0; it must be an integer >= 1", lambda: after(caches.Recent(R), prefix=0)),
        wrong("rows is 0; it must be an integer >= 1", lambda: after(caches.Recent(R), rows=0)),
        wrong("sinks is -1; it must be an integer >= 0", lambda: after(caches.Recent(R), sinks=-1)),
        wrong(
            "AfterPrefix got 3 queries and 15 keys; it needs a whole text, as many of each (a "
            "model must run with use_cache=False)",
            lambda: after(caches.Recent(R))(*text(2, queries=3)),
        ),
        wrong(
            "AfterPrefix got the kernel Elu(); it approximates Exponential",
            lambda: after(caches.ExpectedAttention(R))(*text(2), kernel=Elu(), **LAST),
        ),
        wrong(
            "r is 16; there are 15 keys to keep",
            lambda: after(caches.Recent(16), prefix=None)(*text(2)),
        ),
        wrong(
            "observed is 'repeat': its queries are recorded by hugging_face.replace_attention in a "
            "second pass; bare tensors have none",
            lambda: after(caches.Recent(R), observed="repeat")(*text(2), **LAST),
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        build()
    assert str(raised.value) == message


def test_a_kernel_without_meaning_is_refused_by_all_others_taken() -> None:
    inputs = text(2)
    for build in METHODS.values():
        for kernel in KERNELS.values():
            method = after(build(R))
            if refuses(method.method, kernel):
                assert_refused(
                    r"it approximates Exponential$", method, *inputs, kernel=kernel, is_causal=True
                )
            else:
                assert method(*inputs, kernel=kernel, is_causal=True).isfinite().all()
    assert isinstance(KERNELS["exponential"], Exponential)
