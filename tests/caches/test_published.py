"""Cache methods have the scores and budgets of their formulas, computed slowly in fp64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.caches.seen import rotary
from value_aware_attention import caches
from value_aware_attention.caches.budgets import Ranking, proportional_counts
from value_aware_attention.kernels import Exponential
from value_aware_study.cache_cards import cache_cards

quick = settings(deadline=None, max_examples=15)

PREFIX, R = 48, 16


def published(name: str) -> caches.AfterPrefix:
    """Builds the setting of a card; windows of 32 keys, more than R, are replaced."""
    card = cache_cards()[name]
    options = dict(card.after)
    if options.get("recent", 0) == 32 or name == "kvzip":
        options |= {"sinks": options.get("sinks") or 2, "recent": 4}
    return card.after_prefix(options, R, PREFIX)


def test_a_refinement_by_values_observes_what_its_method_does() -> None:
    methods = caches.KeyNorm(4), caches.ObservedAttention(4)
    assert [caches.CriticalValues(method).observes for method in methods] == [False, True]


@pytest.mark.parametrize(
    ("name", "pool", "rows", "sinks", "recent"),
    [
        ("snapkv", None, 32, 2, 4),
        ("tova", None, 1, 0, 0),
        ("h2o", None, PREFIX, 0, R // 2),
        ("kvzip", "model", PREFIX, 4, 4),
        ("ada_kv", "layer", 32, 2, 4),
        ("defensive_kv", "model", 32, 2, 4),
        ("cake", "model", 32, 2, 4),
        ("lava", "model", 32, 2, 4),
        ("pyramid_kv", "model", 8, 0, 8),
        ("ob_cache", None, 32, 2, 4),
        ("vase", None, 64, 0, 4),
        ("r_kv", None, 8, 0, 8),
        ("drop_kv", None, 8, 0, 8),
        ("cap_kv", None, PREFIX, 4, 0),
        ("andpro", "layer", 32, 4, 4),
        ("la_prox", "model", 32, 2, 4),
    ],
)
def test_cards_protect_as_published_where_16_keys_allow_it(
    name: str, pool: str | None, rows: int, sinks: int, recent: int
) -> None:
    """As docs/cache-methods.md says; windows of 32 and 64 keys would be all of r, or more."""
    after = published(name)
    assert (after.pool, after.rows, after.sinks, after.recent) == (pool, rows, sinks, recent)


@pytest.mark.parametrize(
    ("name", "observed", "method"),
    [
        ("snapkv", "last", caches.ObservedAttention(R, pool=7, pooling="max")),
        ("tova", "last", caches.ObservedAttention(R, by_layer=True)),
        ("h2o", "causal", caches.ObservedAttention(R)),
        ("kvzip", "repeat", caches.ObservedAttention(R, aggregate="max")),
    ],
)
def test_cards_of_attention_weights_observe_and_pool_as_published(
    name: str, observed: str, method: caches.CacheMethod
) -> None:
    after = published(name)
    assert (after.observed, str(after.method)) == (observed, str(method))


M, W, WIDTH, DIM = 15, 4, 5, 8


def cache(
    seed: int = 0, *, heads: int = 3, padding: int = 0, sinks: int = 1, recent: int = 3,
    projected: bool = False,
) -> caches.Observed:  # fmt: skip
    """Draws a layer of grouped heads for two texts, whose last W queries attend causally.

    The first `padding` keys of the first text are padding; of the others the first `sinks` and the
    last `recent` are protected.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    available = torch.ones(2, heads, M, dtype=torch.bool)
    available[0, :, :padding] = False
    first = torch.tensor([padding, 0])[:, None, None] + torch.arange(sinks)
    last = torch.arange(M - recent, M).expand(2, 1, -1)
    causal = torch.arange(M) <= torch.arange(M - W, M)[:, None]
    return caches.Observed(
        query=2 * normal(2, heads, 2, W, DIM),
        key=normal(2, heads, M, DIM),
        value=normal(2, heads, M, WIDTH) * available[..., None],
        kernel=Exponential(),
        visible=causal & available[:, :, None, None],
        protected=torch.cat([first, last], dim=-1).expand(2, heads, -1),
        projection=normal(heads, 2, WIDTH, 6) if projected else None,
        available=available,
    )


CACHES = st.builds(
    cache,
    st.integers(0, 2**20),
    heads=st.integers(1, 3),
    padding=st.sampled_from([0, 2]),
    sinks=st.integers(0, 2),
    recent=st.integers(0, 4),
    projected=st.booleans(),
)


class Slow:
    """One key-value head of a layer in numpy, and what every formula needs of it."""

    def __init__(self, seen: caches.Observed, text: int, head: int) -> None:
        self.query, self.key, self.value = (
            x[text, head].numpy() for x in (seen.query, seen.key, seen.value)
        )
        self.visible = seen.visible[text, head].expand(2, W, M).numpy()
        usable, forced = seen.available[text, head].tolist(), seen.protected[text, head].tolist()
        self.usable = [j for j in range(M) if usable[j]]
        self.free = [j for j in self.usable if j not in forced]
        self.projections = [np.eye(WIDTH)] * 2
        if seen.projection is not None:
            self.projections = [x.numpy() for x in seen.projection[head]]
        self.rows = [(g, i) for g in range(2) for i in range(W)]
        self.z = np.full((2, W, M), -np.inf)
        for g, i in self.rows:
            for j in range(M):
                if self.visible[g, i, j]:
                    self.z[g, i, j] = self.query[g, i] @ self.key[j] / math.sqrt(DIM)
        self.alpha = np.stack([[softmax(row) for row in of] for of in self.z])
        self.output = self.alpha @ self.value

    def only_free(self, x: np.ndarray) -> np.ndarray:
        """Returns numbers of the keys with 0 for those that are padding or protected."""
        return np.array([x[j] if j in self.free else 0.0 for j in range(M)])

    def norm(self, j: int) -> float:
        """Averages ||v_j W_h||_1 over the group."""
        return sum(np.abs(self.value[j] @ one).sum() for one in self.projections) / 2


def layer_of(seen: caches.Observed, text: int) -> list[Slow]:
    return [Slow(seen, text, head) for head in range(seen.batch[1])]


def softmax(row: np.ndarray) -> np.ndarray:
    mass = np.array([math.exp(x) for x in row])
    return mass / mass.sum() if mass.any() else mass


def near(x: np.ndarray, size: int, reduce: Callable[[list[float]], float]) -> np.ndarray:
    """Reduces each number with its neighbours; beyond the ends are zeros."""
    half = size // 2
    padded = [0.0] * half + x.tolist() + [0.0] * half
    return np.array([reduce(padded[j : j + size]) for j in range(len(x))])


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def slow_attention(head: Slow) -> np.ndarray:
    return head.alpha.mean(axis=(0, 1))


def slow_key_diff(head: Slow) -> np.ndarray:
    unit = [key / np.linalg.norm(key) for key in head.key]
    direction = sum(unit[j] for j in head.usable)
    return np.array([-(key @ direction) / np.linalg.norm(direction) for key in unit])


def slow_snapkv(head: Slow) -> np.ndarray:
    return near(head.only_free(slow_attention(head)), 7, max)


def slow_drop_kv(head: Slow) -> np.ndarray:
    """sum (alpha / (1 - alpha))^2 ||v - o||^2; windows are not zeroed before the pool."""
    losses = np.zeros(M)
    for j in head.usable:
        for row in head.rows:
            odds = head.alpha[row][j] / (1 - head.alpha[row][j])
            losses[j] += odds**2 * ((head.value[j] - head.output[row]) ** 2).sum()
    return near(losses, 11, mean)


def slow_r_kv(head: Slow) -> np.ndarray:
    importance = np.zeros(M)
    for i in range(W):
        largest = [max(head.z[g, i, j] for g in range(2)) for j in range(M)]
        one = softmax(np.array([x if j in head.free else -np.inf for j, x in enumerate(largest)]))
        importance += one / W
    unit = [key / np.linalg.norm(key) for key in head.key]
    means = np.full(M, -np.inf)
    cosines = np.zeros((M, M))
    for a in head.usable:
        for b in head.usable:
            cosines[a, b] = unit[a] @ unit[b] if a != b else 0.0
        copies = [b for b in head.usable if cosines[a, b] > 0.5]
        if copies:
            cosines[a, copies[-1]] = 0.0
    for b in head.usable:
        means[b] = sum(cosines[a, b] for a in head.usable) / len(head.usable)
    return 0.1 * near(importance, 7, max) - 0.9 * softmax(means)


def slow_cap_kv(head: Slow) -> np.ndarray:
    scores = np.zeros(M)
    for g in range(2):
        query = head.query[g].mean(axis=0)
        lengths = [np.linalg.norm(query) * np.linalg.norm(head.key[j]) for j in range(M)]
        cosine = [query @ head.key[j] / lengths[j] for j in range(M)]
        weight = {
            j: math.exp(5 * (cosine[j] - max(cosine[k] for k in head.free))) for j in head.free
        }
        whole = np.eye(WIDTH)
        for j in head.free:
            whole = whole + (weight[j] + 1e-6) * np.outer(head.value[j], head.value[j])
        inverse = np.linalg.inv(whole)
        for j in head.free:
            scores[j] += weight[j] * head.value[j] @ inverse @ head.value[j] / 2
    return scores


def slow_ob_cache(head: Slow, part: str) -> np.ndarray:
    scores = np.zeros(M)
    for row in head.rows:
        for j in head.usable:
            alpha, z = head.alpha[row][j], head.z[row][j] if head.visible[row][j] else 0.0
            value, apart = head.value[j], head.value[j] - head.output[row]
            lost = {"value": value, "key": z * apart, "joint": value + z * apart}[part]
            scores[j] += alpha**2 * (lost**2).sum()
    return scores


def slow_andpro(head: Slow) -> np.ndarray:
    """Blocks are of the text's own keys; weights of protected neighbours count."""
    scores = np.zeros(M)
    for row in head.rows:
        weight = head.only_free(near(head.alpha[row], 7, max))
        anchor = sum(weight[j] * head.value[j] for j in range(M))
        for first in range(head.usable[0], M, 4):
            block = range(first, min(first + 4, M))
            scores[block] += sum(weight[j] * head.value[j] for j in block) @ anchor
    return scores


def slow_la_prox(head: Slow) -> np.ndarray:
    scores = np.zeros(M)
    for of, projection in zip(head.alpha, head.projections, strict=True):
        for j in head.free:
            scores[j] += np.linalg.norm(of[:, j]) * np.linalg.norm(head.value[j] @ projection)
    return scores


def slow_cake(head: Slow) -> np.ndarray:
    each = [head.alpha[g].mean(axis=0) + 200 * head.alpha[g].var(axis=0, ddof=1) for g in range(2)]
    return mean([near(head.only_free(one), 5, mean) for one in each])


def slow_lava(head: Slow) -> np.ndarray:
    each = [near(head.only_free(head.alpha[g].mean(axis=0)), 7, max) for g in range(2)]
    return np.maximum(*each) * max(np.abs(head.value[j]).sum() for j in head.usable)


ALONE: dict[str, tuple[caches.CacheMethod, Callable[[Slow], np.ndarray]]] = {
    "observed_attention": (caches.ObservedAttention(8), slow_attention),
    "pooled_attention": (
        caches.ObservedAttention(8, pool=3),
        lambda head: near(head.only_free(slow_attention(head)), 3, mean),
    ),
    "largest_attention": (
        caches.ObservedAttention(8, aggregate="max"),
        lambda head: head.alpha.max(axis=(0, 1)),
    ),
    "key_norm": (caches.KeyNorm(8), lambda head: -np.linalg.norm(head.key, axis=1)),
    "key_diff": (caches.KeyDiff(8), slow_key_diff),
    "ada_kv": (caches.AdaKV(8, pool=7, pooling="max"), slow_snapkv),
    "pyramid_kv": (caches.PyramidKV(8, pool=7, pooling="max"), slow_snapkv),
    "drop_kv": (caches.LeaveOneOut(8, pool=11), slow_drop_kv),
    "r_kv": (caches.RKV(8), slow_r_kv),
    "cap_kv": (caches.CapKV(8), slow_cap_kv),
    **{
        f"ob_cache, {part}": (caches.OBCache(8, part=part), partial(slow_ob_cache, part=part))
        for part in ("value", "key", "joint")
    },
    "andpro": (caches.AnDPro(8), slow_andpro),
    "la_prox": (caches.LaProx(8), slow_la_prox),
    "cake": (caches.Cake(8), slow_cake),
    "lava": (caches.Lava(8), slow_lava),
}


@pytest.mark.parametrize("name", ALONE)
@quick
@given(CACHES)
def test_scores_of_a_head_are_their_formula(name: str, seen: caches.Observed) -> None:
    """Of the keys that are to be chosen from; the others' are never looked at."""
    method, slow = ALONE[name]
    found = method.scores(seen).double().numpy()
    for text, head in np.ndindex(*seen.batch):
        one = Slow(seen, text, head)
        np.testing.assert_allclose(
            found[text, head][one.free], slow(one)[one.free], rtol=1e-6, atol=1e-9
        )


@quick
@given(st.integers(0, 999), st.integers(1, 5))
def test_andpro_keeps_the_largest_blocks_of_a_layer(seed: int, blocks: int) -> None:
    """Beside the first block and the window; a last block that is cut keeps its first keys."""
    seen, method, total = cache(seed, sinks=4, recent=3), caches.AnDPro(8), 3 * 7 + 4 * blocks + 3
    ranking = method.rank(seen)
    (counts,) = method.share([ranking], total, 7)
    kept = method.cut(seen, ranking, counts)
    for text in range(2):
        scores = [slow_andpro(head) for head in layer_of(seen, text)]
        order = sorted(
            ((head, first) for head in range(3) for first in (4, 8)),
            key=lambda place: -scores[place[0]][place[1]],
        )
        expected = {(head, j) for head in range(3) for j in (0, 1, 2, 3, 12, 13, 14)}
        expected |= {(head, first + j) for head, first in order[:blocks] for j in range(4)}
        expected |= {(order[blocks][0], order[blocks][1] + j) for j in range(3)}
        heads, slots = np.nonzero((kept.log_weight[text] == 0).numpy())
        indices = kept.indices[text].numpy()[heads, slots]
        assert set(zip(heads.tolist(), indices.tolist(), strict=True)) == expected


def test_cap_kv_turns_its_mean_query_to_the_positions_to_come() -> None:
    seen = cache()
    seen = replace(
        seen, query=seen.query[..., :4], key=seen.key[..., :4], rotary=rotary,
        positions=torch.arange(M - W, M),
    )  # fmt: skip
    before = rotary(seen.query, -seen.positions).mean(dim=-2, keepdim=True)
    later = [rotary(before, torch.tensor([M + shift])) for shift in range(3)]
    turned = replace(
        seen, query=sum(later) / 3, rotary=None, positions=None, visible=seen.visible[..., -1:, :]
    )
    expected = caches.CapKV(8).scores(turned)
    torch.testing.assert_close(caches.CapKV(8, horizon=3).scores(seen), expected)


def slow_defensive_kv(heads: list[Slow], r: int) -> list[np.ndarray]:
    layer = []
    for head in heads:
        worst = np.zeros(M)
        for row in head.rows:
            alone = head.only_free(head.alpha[row])
            smooth = head.only_free(near(alone, 5, mean))
            if smooth.any():
                worst = np.maximum(worst, smooth * alone.sum() / smooth.sum())
        least = mean([worst[j] for j in head.free])
        scores = np.zeros(M)
        for j in head.free:
            part = head.norm(j) / sum(other.norm(j) for other in heads)
            scores[j] = max(worst[j], least) * part
        layer.append(scores)
    late = [sum(head.alpha[row][j] for j in head.free[-W:]) for head in heads for row in head.rows]
    top = max(scores.max() for scores in layer)
    for head, scores in zip(heads, layer, strict=True):
        most = r - (len(head.usable) - len(head.free))
        scores[sure_keys(head, 0.9 - mean(late))[:most]] = top
    return layer


def sure_keys(head: Slow, share: float) -> list[int]:
    """Returns the heaviest keys before the one with which they hold a share of the mean weight."""
    mass = head.only_free(head.alpha.mean(axis=(0, 1)))
    held, sure = 0.0, []
    for j in sorted(head.free, key=lambda j: -mass[j]):
        held += mass[j] / mass.sum()
        if held >= share:
            break
        sure.append(j)
    return sure


@quick
@given(CACHES, st.integers(7, 12))
def test_defensive_kv_is_its_formula(seen: caches.Observed, r: int) -> None:
    found = caches.DefensiveKV(r).scores(seen).numpy()
    for text in range(2):
        heads = layer_of(seen, text)
        for head, expected in enumerate(slow_defensive_kv(heads, r)):
            free = heads[head].free
            np.testing.assert_allclose(found[text, head][free], expected[free], rtol=1e-9)


@quick
@given(CACHES)
def test_vase_keeps_first_the_values_of_the_largest_range(seen: caches.Observed) -> None:
    order = caches.VaSE(12, seed=0).rank(seen).keys
    for text, head in np.ndindex(*seen.batch):
        one = Slow(seen, text, head)
        ranges = {j: one.value[j].max() - one.value[j].min() for j in one.free}
        ranges |= {j: math.inf for j in one.usable[:4] if j in one.free}
        first = sorted(one.free, key=lambda j: -ranges[j])[:3]
        forced = len(one.usable) - len(one.free)
        assert order[text, head, forced : forced + 3].tolist() == first


def test_vase_draws_the_others_in_proportion_to_their_weight() -> None:
    """Without replacement: three caches of ten thousand, of which none draws a key twice."""
    seen = cache(heads=1, sinks=1, recent=1)
    one = Slow(seen, 1, 0)
    candidates = [softmax(np.where(np.isin(range(M), one.free), row, -np.inf))
                  for of in one.z for row in of]  # fmt: skip
    weight = one.only_free(near(np.mean(candidates, axis=0), 5, mean))
    many = {
        name: getattr(seen, name)[1:].expand(10_000, *getattr(seen, name).shape[1:])
        for name in ("query", "key", "value", "visible", "protected", "available")
    }
    kept = caches.VaSE(3, seed=0).keep(replace(seen, **many)).indices.flatten(0, 1)
    assert (kept[:, 0] == 0).all() and (kept[:, 2] == M - 1).all()
    shares = np.bincount(kept[:, 1].numpy(), minlength=M) / 10_000
    np.testing.assert_allclose(shares, weight / weight.sum(), atol=0.015)


def test_draws_differ_between_the_choices_of_a_growing_cache() -> None:
    """Random Attention and VaSE draw anew at each choice, from one seed."""
    seen = cache(heads=1)
    for method in (caches.Random(8, seed=0), caches.VaSE(8, seed=0)):
        first, again, later = (
            method.keep(replace(seen, start=start)).indices for start in (None, M, M + 2)
        )
        assert torch.equal(first, again) and not torch.equal(first, later)


def orders_of(seed: int, layers: int, heads: int, keys: int, *, forced: int = 0) -> list[Ranking]:
    """Draws the losses of two texts; the first `forced` keys of each order are protected."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.rand(layers, 2, heads, keys, generator=generator).double().sort(descending=True)[0]
    loss[..., :forced] = torch.inf
    needs = torch.rand(layers, 2, generator=generator).double()
    every = torch.arange(keys).expand(2, heads, keys)
    return [Ranking(every, one, need) for one, need in zip(loss, needs, strict=True)]


def rounded(wanted: Sequence[Fraction]) -> list[int]:
    """Rounds numbers whose sum is whole by largest remainders, the first one among equals."""
    counts = [math.floor(x) for x in wanted]
    by_rest = sorted(range(len(wanted)), key=lambda x: (counts[x] - wanted[x], x))
    for x in by_rest[: int(sum(wanted)) - sum(counts)]:
        counts[x] += 1
    return counts


def shared(shares: Sequence[Fraction], total: int, least: int, most: int) -> list[Fraction]:
    """Gives each its share of what is above `least`; what one cannot take goes to the others."""
    wanted = [Fraction(least)] * len(shares)
    while (left := total - sum(wanted)) > 0:
        free = [x for x, count in enumerate(wanted) if count < most]
        for x in free:
            part = left * shares[x] / sum(shares[y] for y in free)
            wanted[x] = min(wanted[x] + part, Fraction(most))
    return wanted


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(0, 4), st.integers(5, 30),
    st.floats(0, 1),
)  # fmt: skip
def test_proportional_counts_are_exact_with_floors_and_caps(
    shares: list[int], least: int, most: int, full: float
) -> None:
    total = round(len(shares) * (least + full * (most - least)))
    (found,) = proportional_counts(torch.tensor([shares]).double(), total, least, most).tolist()
    assert sum(found) == total and all(least <= count <= most for count in found)
    wanted = shared(list(map(Fraction, shares)), total, least, most)
    assert all(abs(count - x) < 1 + 1e-6 for count, x in zip(found, wanted, strict=True))
    rest = sorted(x % 1 for x in wanted)
    if all(abs(a - b) > Fraction(1, 10**6) for a, b in pairwise(rest)):
        assert found == rounded(wanted)


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
@pytest.mark.parametrize(("r", "least", "keys"), [(16, 8, 128), (32, 8, 128), (90, 8, 128)])
def test_pyramid_kv_falls_in_equal_steps(layers: int, r: int, least: int, keys: int) -> None:
    orders = orders_of(0, layers, 3, keys, forced=least)
    found = caches.PyramidKV(r).share(orders, r * 3 * layers, least)
    assert sum(int(count[0].sum()) for count in found) == 3 * r * layers
    beside = r - least
    low = Fraction(beside, 20)
    high = 2 * beside - low
    if high >= keys - least:
        high = Fraction(keys - least)
        low = 2 * beside - high
    for number, count in enumerate(found):
        step = (high - low) / max(1, layers - 1)
        wanted = high - number * step + least if layers > 1 else r
        assert (abs(count - float(wanted)) <= 1).all() and (count == count[0, 0]).all()


@quick
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 3), st.integers(2, 11))
def test_cake_shares_keys_by_what_layers_prefer(seed: int, layers: int, heads: int, r: int) -> None:
    orders = orders_of(seed, layers, heads, 12, forced=2)
    found = caches.Cake(r).share(orders, r * heads * layers, 2)
    for text in range(2):
        shares = [Fraction(float(order.preference[text])) for order in orders]
        wanted = rounded(shared(shares, r * layers, 2, 12))
        assert [count[text].tolist() for count in found] == [[x] * heads for x in wanted]


def slow_heads(losses: torch.Tensor, total: int) -> list[int]:
    """AdaKV's rule: 0.8 of the head's part of the largest scores of all, 0.2 of the mean."""
    heads, keys = losses.shape
    flat = losses.flatten().tolist()
    best = sorted(range(heads * keys), key=lambda x: (-flat[x], x))[:total]
    own = [sum(x // keys == head for x in best) for head in range(heads)]
    return rounded([Fraction(4, 5) * count + Fraction(total, 5 * heads) for count in own])


@quick
@given(st.integers(0, 999), st.integers(1, 3), st.integers(1, 4), st.integers(3, 11))
def test_ada_kv_and_lava_share_a_layers_keys_among_its_heads(
    seed: int, layers: int, heads: int, r: int
) -> None:
    orders = orders_of(seed, layers, heads, 12, forced=2)
    found = caches.AdaKV(r).share(orders, r * heads * layers, 2)
    by_layer = caches.Cake(r).share(orders, r * heads * layers, 2)
    of_lava = caches.Lava(r).share(orders, r * heads * layers, 2)
    for text in range(2):
        for number, order in enumerate(orders):
            assert found[number][text].tolist() == slow_heads(order.loss[text], r * heads)
            total = int(by_layer[number][text].sum())
            assert of_lava[number][text].tolist() == slow_heads(order.loss[text], total)


@quick
@given(CACHES)
def test_cake_and_lava_measure_how_much_a_layer_needs(seen: caches.Observed) -> None:
    cake, lava = (method(8).rank(seen).preference for method in (caches.Cake, caches.Lava))
    for text in range(2):
        heads = layer_of(seen, text)
        weights = [[head.only_free(head.alpha[row]) for row in head.rows] for head in heads]
        entropy = -sum(x * math.log(x) for head in weights for row in head for x in row if x > 0)
        spread = sum(
            np.stack([head.only_free(row) for row in head.alpha[g]]).var(axis=0, ddof=1).sum()
            for head in heads for g in range(2)
        )  # fmt: skip
        assert float(cake[text]) == pytest.approx(entropy * spread)
        scores = np.concatenate([slow_lava(head) for head in heads])
        shares = [x / scores.sum() for x in scores if x > 0]
        assert float(lava[text]) == pytest.approx(-sum(x * math.log(x) for x in shares))
