"""Every cache method keeps valid keys; formulas are held to in test_published.py."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.caches.methods import METHODS, REFITTING, SCALE_FREE, SCORING
from tests.caches.seen import HEAD_DIM, VALUE_DIM, kinds, observed, rotary
from tests.refusals import assert_refused
from value_aware_attention import caches, kernels

quick = settings(deadline=None, max_examples=20)


@pytest.mark.parametrize("rotated", [False, True])
def test_expected_attention_is_the_mean_over_gaussian_queries(rotated: bool) -> None:
    """Each group's mean and covariance, before rotation; then turned as later positions are."""
    horizon, seen = 6, observed(rows=7, padding=2)
    if rotated:
        seen = replace(seen, rotary=rotary, positions=torch.arange(7))
    eye = torch.eye(HEAD_DIM).double()
    turns = [rotary(eye, torch.full((4,), seen.keys + later)) for later in range(horizon)]
    turn = sum(turns) / horizon if rotated else eye

    found = caches.ExpectedAttention(3, horizon=horizon).scores(seen)
    for cache, usable in enumerate(seen.available):
        expected = 0.0
        for query in seen.query[cache]:
            before = rotary(query, -torch.arange(7)) if rotated else query
            mean, covariance = before.mean(0) @ turn, turn.T @ before.T.cov(correction=0) @ turn
            logits = [
                mean @ key / 2 + key @ covariance @ key / 8 if ok else torch.tensor(-torch.inf)
                for key, ok in zip(seen.key[cache], usable, strict=True)
            ]
            expected = expected + torch.stack(logits).softmax(0) / 2
        expected = expected * seen.value[cache].norm(dim=-1)
        torch.testing.assert_close(found[cache, usable], expected[usable])


@pytest.mark.parametrize("keys", [10, 300])  # 300 are projected in two parts
@pytest.mark.parametrize("projected", [False, True])
def test_critical_values_weigh_half_of_the_keys_by_their_projection(
    projected: bool, keys: int
) -> None:
    """First r / 2 by score, then by (score + 1e-4) times the mean ||W_o v||_1 of the group."""
    seen = observed(keys)
    projection = torch.randn(
        2, 2, VALUE_DIM, 6, generator=torch.Generator().manual_seed(1)
    ).double()
    seen = replace(seen, projection=projection) if projected else seen
    base = caches.ObservedAttention(5)
    kept = caches.CriticalValues(base).keep(seen)
    for cache, scores in enumerate(base.scores(seen)):
        chosen = scores.argsort(descending=True)[:2].tolist()
        sizes = []
        for key, value in enumerate(seen.value[cache]):
            norms = [value.abs().sum()]
            if projected:
                norms = [(value @ head).abs().sum() for head in projection[cache]]
            sizes.append(-1.0 if key in chosen else (scores[key] + 1e-4) * sum(norms) / len(norms))
        chosen += torch.tensor(sizes).argsort(descending=True)[:3].tolist()
        assert kept.indices[cache].tolist() == sorted(chosen)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("Press", "a score of your own is a CacheMethod"),
        ("as_press", "a score of your own is a CacheMethod"),
        ("CacheProfile", "pool='model' shares one budget among all heads"),
        ("profile", "pool='model' shares one budget among all heads"),
    ],
)
def test_a_name_that_is_gone_says_what_replaces_it(name: str, instead: str) -> None:
    line = rf"^caches\.{name} was removed in 1\.1: {instead}[^\n]*$"
    assert_refused(line, getattr, caches, name, error=ImportError)
    imported = f"from value_aware_attention.caches import {name}"
    assert_refused(line, exec, imported, error=ImportError)


def test_recent_keys_are_the_last_and_random_ones_the_seeds() -> None:
    seen = observed(20, batch=(3, 2), protected=1)
    assert caches.Recent(3).keep(seen).indices.tolist() == [[[17, 18, 19]] * 2] * 3
    first, again, other = (caches.Random(6, seed).keep(seen).indices for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(x.tolist()) for x in first.flatten(0, 1)}) == 6
    assert (first == 19).any(-1).all()
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    caches.Random(6, 0).keep(seen)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_random_keys_are_uniform() -> None:
    seen = observed(5, batch=(2000,), rows=1)
    counts = caches.Random(2, 0).keep(seen).indices.flatten().bincount()
    assert ((counts / 2000 - 0.4).abs() < 0.05).all()


def test_a_method_without_scores_or_keep_is_named() -> None:
    class Unwritten(caches.CacheMethod):
        pass

    line, keep = "Unwritten has neither scores nor keep", Unwritten(2).keep
    assert_refused(line, keep, observed(5), error=NotImplementedError)


@quick
@given(kinds(), st.integers(2, 8), st.sampled_from(sorted(METHODS)))
def test_what_is_kept_is_ascending_and_holds_the_protected(
    seen: caches.Observed, r: int, name: str
) -> None:
    kept = METHODS[name](r).keep(seen)
    assert kept.indices.shape == kept.log_weight.shape == (2, r)
    assert (kept.indices.diff(dim=-1) > 0).all() and kept.indices.amin() >= 0
    assert kept.indices.amax() < seen.keys
    unused = ~seen.available.take_along_dim(kept.indices, -1)
    assert torch.equal(kept.log_weight == -torch.inf, unused)
    assert torch.equal(r - unused.sum(-1), seen.available.sum(-1).clamp_max(r))
    if seen.protected is not None:
        named = torch.zeros(2, seen.keys, dtype=torch.bool).scatter(-1, kept.indices, value=True)
        assert (named[:, seen.protected] | ~seen.available[:, seen.protected]).all()
    if name not in REFITTING:
        assert kept.value is None and (kept.log_weight[~unused] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_more_keys_than_there_are_and_fewer_than_protected_are_refused(name: str) -> None:
    method = METHODS[name](4)
    named = type(method).__name__
    assert_refused(f"^{named} keeps r = 4 keys; there are 3$", method.keep, observed(3))
    expected = f"^{named} keeps r = 4 keys; 5 are protected, so r must be at least 5$"
    for padding in (0, 6):  # of the first cache, four of whose last five keys are padding
        assert_refused(expected, method.keep, observed(protected=5, padding=padding))


FIRST_POWER = [
    *(
        "random",
        "recent",
        "key_norm",
        "key_diff",
        "observed_attention",
        "pooled_attention",
        "snapkv",
    ),
    *("ada_kv", "defensive_kv", "tova", "r_kv", "h2o", "vase", "pyramid_kv", "cake"),
    *("lava", "drop_kv", "largest_attention", "kvzip", "critical_values", "attention_matching"),
]
"""Methods whose scores have no higher power of the values than the first"""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if "best" in n else n for n in SCALE_FREE]
)
@settings(deadline=None, max_examples=8)
@given(kinds(dtype=torch.float32, outlier=1.0), st.sampled_from([-25, -12, 12, 25]))
def test_no_choice_depends_on_the_scale_of_the_values(
    name: str, seen: caches.Observed, exponent: int
) -> None:
    """A power of two rounds nothing, and fp32 holds the fourth powers of these values."""
    exponent *= 4 if name in FIRST_POWER else 1
    factor, beside = 2.0**exponent, seen.beside
    if beside is not None:
        beside = replace(beside, values=beside.values * factor)
    scaled = replace(seen, value=seen.value * factor, beside=beside)
    once, again = (METHODS[name](3).keep(x).indices for x in (seen, scaled))
    assert torch.equal(once, again)


@pytest.mark.parametrize("name", METHODS)
def test_nested_methods_order_keys_alike_for_every_r(name: str) -> None:
    cache = observed(64, rows=8, protected=2)
    few, many = (METHODS[name](r).rank(cache).keys for r in (8, 32))
    assert torch.equal(few, many) or not METHODS[name](8).is_nested


def test_other_bad_arguments_are_refused() -> None:
    for build, message in (
        (lambda: caches.ObservedAttention(3, pool=2), "pool is 2; it must be odd, to lie around"),
        (
            lambda: caches.ObservedAttention(3, aggregate="sum"),
            "aggregate is 'sum'; it must be",
        ),
        (
            lambda: caches.ValueAware(3, search="slow"),
            "search is 'slow'; it must be one of default",
        ),
        *(
            (lambda r=r: caches.Recent(r), r"r is [^;]*; it must be an integer >= 1")
            for r in (0, -1, 2.0, True)
        ),
        (
            lambda: caches.ExpectedAttention(3).keep(observed(kernel=kernels.Elu())),
            r"ExpectedAttention got the kernel Elu\(\); it supports Exponential$",
        ),
        (lambda: caches.Random(3, seed=-1), "seed is -1; it must be an integer >= 0"),
        (lambda: caches.ExpectedAttention(3, horizon=0), "horizon is 0; it must be an integer"),
        (
            lambda: caches.CriticalValues(caches.ValueAware(3)),
            "method is a ValueAware; it must be one that has scores",
        ),
        (
            lambda: caches.AttentionMatching(3, caches.ValueAware(3, refit=True)),
            "method is a ValueAware that refits; one refit is made",
        ),
        (lambda: caches.CriticalValues(8), "method is 8; it must be a method of caches, such as"),
        (
            lambda: caches.CriticalValues(caches.Recent),
            "method is the class Recent; it must be a method of caches, such as",
        ),
        (lambda: caches.AttentionMatching(8, 8), "method is 8; it must be a method of caches"),
        (lambda: caches.Random(3, seed=2**70), f"seed is {2**70}; it must be an integer >= 0 and"),
        *(
            (
                lambda kernel=kernel: caches.Recent(3).keep(replace(observed(), kernel=kernel)),
                "kernel is .*; it must be a kernel such as kernels",
            )
            for kernel in ("elu", kernels.Elu, None)
        ),
    ):
        assert_refused(f"^{message}[^\n]*$", build)


@pytest.mark.parametrize("name", SCORING)
def test_equal_keys_are_kept_in_order(name: str) -> None:
    """Where scores do not tell keys apart the first ones are kept, whatever the machine."""
    seen = observed(6, sharpness=0.0)
    same = {"key": seen.key[:, :1].expand(-1, 6, -1), "value": seen.value[:, :1].expand(-1, 6, -1)}
    kept = SCORING[name](3).keep(replace(seen, **same))
    if name == "recent":
        assert kept.indices.tolist() == [[3, 4, 5]] * 2
    elif name == "r_kv":  # of copies the last one
        assert (kept.indices[:, -1] == 5).all()
    elif name not in ("snapkv", "pooled_attention", "cake", "drop_kv"):
        # there the ends have fewer neighbours
        assert kept.indices.tolist() == [[0, 1, 2]] * 2


SCORES, DISTANCES = 8 * 16 * 4, 8 * 16 * 3
DROPS = 9 * 8 * sum((left + (left - 1)) / 2 for left in range(5, 17))
"""Of 16 keys to 4, the pairs left before and after each drop in the mean."""
TWO_FITS = 2 * (8 * 4**2 + 4**3 / 3)
COUNTS = {
    **{"random": 0, "recent": 0, "vase": SCORES, "r_kv": SCORES + 16 * 16 * 4},
    **dict.fromkeys(("leave_one_out", "drop_kv", "ob_cache", "andpro"), SCORES + 2 * DISTANCES),
    "expected_attention": (8 + 16) * 4**2,
    "cap_kv": 8 * 4 + 16 * (4 + 2 * 3**2),
    "critical_values": SCORES + 16 * 3**2,
    **dict.fromkeys(
        (name for name in METHODS if name.startswith("value_aware")),
        SCORES + 2 * DISTANCES + DROPS,
    ),
    "attention_matching": SCORES + TWO_FITS,
    "leave_one_out_refitted": SCORES + 2 * DISTANCES + TWO_FITS,
}
"""Of the methods that have `multiply_adds` of their own"""


@pytest.mark.parametrize("name", METHODS)
def test_multiply_adds_are_those_of_a_choice_of_4_of_16_keys(name: str) -> None:
    """Chosen by 8 rows, with 4 numbers in a key and 3 in a value."""
    method = METHODS[name](4)
    count, inherited = method.multiply_adds(8, 16, 4, 3), SCORES if method.observes else 16 * 4
    counts_itself = type(method).multiply_adds is not caches.CacheMethod.multiply_adds
    assert isinstance(count, float)
    assert count == pytest.approx(COUNTS[name] if counts_itself else inherited)
    assert method.multiply_adds(8, 32, 4, 3) >= count
