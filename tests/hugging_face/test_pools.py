"""Heads of a layer or of the whole model share the keys that they keep."""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.caches.methods import METHODS, Spy
from tests.caches.slow import OneCache
from tests.hugging_face.models import batch, logits, sharp
from tests.refusals import assert_refused
from value_aware_attention import attention, caches
from value_aware_attention.caches.budgets import Ranking
from value_aware_attention.call import Layer
from value_aware_attention.decoding.after_prefix import Given
from value_aware_attention.hugging_face import attention_layers, replace_attention
from value_aware_attention.kernels import Kernel

pytestmark = pytest.mark.filterwarnings("ignore")
PREFIX, R, HEADS = 9, 5, {"llama": 2, "gpt2": 4}


class Cuts(Spy):
    """Records the sets that a method cuts from its rankings."""

    def rank(self, seen: caches.Observed) -> Ranking:
        self.seen.append(seen)
        return self.method.rank(seen)

    def share(self, rankings: Sequence[Ranking], total: int, least: int) -> list[Tensor]:
        return self.method.share(rankings, total, least)

    def cut(self, seen: caches.Observed, ranking: Ranking, counts: Tensor) -> caches.KeptKeys:
        self.kept.append(self.method.cut(seen, ranking, counts))
        return self.kept[-1]


@pytest.fixture(params=tuple(HEADS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def after(method: caches.CacheMethod, **options: object) -> caches.AfterPrefix:
    return caches.AfterPrefix(
        method, **{"prefix": PREFIX, "rows": 9, "sinks": 1, "recent": 2} | options
    )


def used(kept: caches.KeptKeys) -> Tensor:
    return (kept.log_weight > -torch.inf).sum(-1)


def kept_by(
    model: PreTrainedModel, inputs: dict[str, Tensor], method: caches.CacheMethod, **options: object
) -> list[caches.KeptKeys]:
    spy = Cuts(method)
    logits(model, inputs, after(spy, **options))
    return spy.kept


class LeastAttention(caches.ObservedAttention):
    """Keeps first keys only where they are protected."""

    def scores(self, observed: caches.Observed) -> Tensor:
        return -super().scores(observed)


class Shown(torch.nn.Module):
    """Attends exactly to pairs (texts, query heads, N, N) that a test changes; keeps its call."""

    pairs: Tensor | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, kernel: Kernel,
        attn_mask: Tensor | None, is_causal: bool,
    ) -> Tensor:  # fmt: skip
        if self.pairs is None:
            causal = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
            self.seen = (causal & attn_mask).expand(*query.shape[:2], -1, -1)
            self.pairs = self.seen.clone()
        self.call = query, key, value, kernel
        return attention(query, key, value, kernel=kernel, attn_mask=self.pairs)


def drop_again(
    shown: list[Shown], pools: dict, text: int, start: int, method: caches.AfterPrefix, heads: int
) -> None:
    """Drops keys of one text before `start`, each time the cheapest of all heads of the layers."""
    orders, always = {}, type(method.method)(method.sinks + method.recent)
    for number, layer in enumerate(shown):
        query, key, value, kernel = (x[text] if isinstance(x, Tensor) else x for x in layer.call)
        group = len(query) // heads
        for head in range(heads):
            rows = slice(head * group, (head + 1) * group)
            one = OneCache(
                query[rows], key[rows][0], value[rows][0], layer.seen[text, rows], kernel
            )
            pool = [x for x in pools.get((layer, text, head), range(start)) if one.available[x]]
            tokens = one.available.nonzero()[:, 0]
            places, before = torch.searchsorted(tokens, torch.tensor(pool)), (tokens < start).sum()
            ranking = always.rank(one.without_padding()[0].observed(method, places, int(before)))
            keys = [pool[place] for place in ranking.keys.tolist()]
            orders[number, head] = list(zip(keys, ranking.loss.tolist(), strict=True))
    while sum(map(len, orders.values())) > method.method.r * len(orders):
        min(orders.values(), key=lambda order: order[-1][1]).pop()
    for (number, head), order in orders.items():
        layer, kept = shown[number], torch.tensor(sorted(key for key, _ in order))
        group = layer.pairs.shape[1] // heads
        left = torch.zeros(start, dtype=torch.bool).scatter(0, kept, value=True)
        rows = slice(head * group, (head + 1) * group)
        layer.pairs[text, rows, start:, :start] = left & layer.seen[text, rows, start:, :start]
        pools[layer, text, head] = [*kept.tolist(), *range(start, start + method.every)]


@pytest.mark.parametrize("pool", ["layer", "model"])
@pytest.mark.parametrize(
    ("build", "observed"), [(caches.ObservedAttention, "last"), (LeastAttention, "causal")]
)
@pytest.mark.parametrize("every", [1, 2])
def test_a_pool_of_a_growing_cache_is_the_loop(
    kind: str, every: int, build: type[caches.CacheMethod], observed: str, pool: str
) -> None:
    """The model reads the text anew after every choice, over what each head has left."""
    model, inputs = sharp(kind), batch("left")
    method = after(build(R), observed=observed, pool=pool, every=every)
    shown, pools = [Shown() for _ in attention_layers(model)], {}
    for start in range(PREFIX, 12, every):
        logits(model, inputs, shown.__getitem__)  # over the choices so far
        for group in [shown] if pool == "model" else [[layer] for layer in shown]:
            for text in range(3):
                drop_again(group, pools, text, start, method, HEADS[kind])
    expected = logits(model, inputs, shown.__getitem__)
    torch.testing.assert_close(logits(model, inputs, method), expected, atol=1e-4, rtol=1e-4)
    once = logits(model, inputs, after(build(R), observed=observed, pool=pool))
    assert not torch.allclose(once, expected, atol=1e-3)


@pytest.mark.parametrize("pool", ["layer", "model"])
@pytest.mark.parametrize("observed", ["last", "continued", "repeat"])
def test_heads_keep_r_keys_on_average(kind: str, observed: str, pool: str) -> None:
    for method in (caches.ValueAware(R), caches.ObservedAttention(R)):
        kept = kept_by(sharp(kind), batch("none"), method, observed=observed, pool=pool)
        counts = torch.stack([used(each).flatten(1) for each in kept])
        assert counts.shape == (4, 3, HEADS[kind]) and (counts >= 3).all()
        if pool == "layer":
            assert (counts.sum(-1) == R * HEADS[kind]).all()
        else:
            assert (counts.sum((0, 2)) == 4 * R * HEADS[kind]).all() and counts.unique().numel() > 1


@pytest.mark.parametrize("observed", ["last", "noncausal", "continued", "repeat"])
def test_a_choice_depends_on_the_prefix_alone(kind: str, observed: str) -> None:
    model, inputs = sharp(kind), batch("none")
    other = {name: x.clone() for name, x in inputs.items()}
    other["input_ids"][:, PREFIX:] = (other["input_ids"][:, PREFIX:] + 1) % 20
    for pool in ("layer", "model"):
        options = {"observed": observed, "pool": pool}
        method = caches.LeaveOneOut(R)
        both = (kept_by(model, texts, method, **options) for texts in (inputs, other))
        for one, two in zip(*both, strict=True):
            assert torch.equal(one.indices, two.indices)
            assert torch.equal(one.log_weight, two.log_weight)


def test_texts_with_fewer_keys_than_r_choose_alone(kind: str) -> None:
    """They keep all their keys; the others share theirs as if these texts were not there."""
    model, inputs = sharp(kind), batch("none")
    inputs["attention_mask"][1, : PREFIX - R + 1] = 0
    texts = [{name: x[row : row + 1] for name, x in inputs.items()} for row in range(3)]
    for pool in ("layer", "model"):
        method = after(caches.ValueAware(R), pool=pool)
        found = logits(model, inputs, method)
        alone = torch.cat([logits(model, text, method) for text in texts])
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)
        differs = (found - logits(model, inputs)).abs().amax(dim=-1) > 1e-3
        long, few = [False] * PREFIX + [True] * 3, [False] * (R - 1 + 3)
        assert differs.tolist() == [*long, *few, *long]


def test_a_layer_may_keep_no_key_at_all(kind: str) -> None:
    model, inputs = sharp(kind), batch("none")
    method = caches.PyramidKV(2)
    options = {"pool": "model", "sinks": 0, "recent": 0}
    counts = [used(kept).sum() for kept in kept_by(model, inputs, method, **options)]
    assert counts[-1] == 0 < counts[0]
    assert logits(model, inputs, after(method, **options)).isfinite().all()


def test_a_refit_keeps_the_budgets_of_its_method(kind: str) -> None:
    def counts(method: caches.CacheMethod) -> list[Tensor]:
        return [used(kept) for kept in kept_by(sharp(kind), batch("none"), method, pool="model")]

    method = caches.CriticalValues(caches.PyramidKV(R))
    expected = counts(caches.PyramidKV(R))
    for same in (method, *(caches.AttentionMatching(R, by) for by in (method, method.method))):
        torch.testing.assert_close(counts(same), expected)


def test_layers_that_share_one_attention_are_not_read_first() -> None:
    method = after(caches.Recent(R), prefix=None, observed="noncausal", pool="model")
    line = r"^\w+ is the attention of several layers, which cannot"
    assert_refused(line, logits, sharp("albert"), batch("none"), method)


def test_continued_queries_are_repeated_ones_in_the_first_layer_of_a_rotary_model() -> None:
    model, inputs, spy = sharp("llama"), batch("none"), Spy(caches.ObservedAttention(R))
    logits(model, inputs, after(spy, observed="continued"))
    continued = spy.seen[0]
    spy.seen.clear()
    logits(model, inputs, after(spy, observed="repeat"))
    ours, repeated = ((seen.output, seen.weights) for seen in (continued, spy.seen[0]))
    torch.testing.assert_close(ours, repeated, rtol=1e-4, atol=1e-5)


def test_what_repeated_queries_see_beside_is_computed_in_fp32() -> None:
    model, inputs = sharp("llama").to(torch.bfloat16), batch("none")
    spy = Spy(caches.ObservedAttention(R))
    logits(model, inputs, after(spy, observed="repeat"))
    assert spy.seen[0].log_mass_beside.dtype == torch.float32


def test_pools_over_a_part_of_the_model_are_refused() -> None:
    model, method = sharp("llama"), after(caches.Recent(R), pool="model")
    for line, replaced, options in (
        ("^pool is 'model' and 1 of 4 layers are replaced; ", method, {"layers": [0]}),
        (r"^heads are \[0\]; with pool all heads share the keys kept$", method, {"heads": [0]}),
        ("^pool is 'model' and layers have methods of their own", lambda _: copy(method), {}),
    ):
        with pytest.raises(ValueError, match=line), replace_attention(model, replaced, **options):
            pass


def test_a_checked_pool_is_the_nearer_of_two_on_the_prefix_read_once_more(kind: str) -> None:
    model, inputs = sharp(kind), batch("none")
    spy = Cuts(caches.ValueAware(R))

    def read(given: dict[str, Tensor], method: object = None) -> Tensor:
        with torch.no_grad(), nullcontext() if method is None else replace_attention(model, method):
            return model(**given, use_cache=False).logits

    found = read(inputs, after(spy, observed="continued", pool="checked"))
    twice = {name: torch.cat([x[:, :PREFIX]] * 2, dim=1) for name, x in inputs.items()}
    exact = read(twice).log_softmax(-1)
    outputs, far = [], []
    for kept in (spy.kept[: len(spy.kept) // 2], spy.kept[len(spy.kept) // 2 :]):
        methods = [after(Given(keys), sinks=0, recent=0) for keys in kept]
        outputs.append(read(inputs, methods.__getitem__))
        kl = (exact.exp() * (exact - read(twice, methods.__getitem__).log_softmax(-1))).sum(-1)
        far.append(kl[:, PREFIX:].sum(-1))
    nearer = (far[0] < far[1])[:, None, None]
    assert not torch.equal(*outputs)
    torch.testing.assert_close(found, outputs[0].where(nearer, outputs[1]))


@pytest.mark.parametrize("pool", [None, "layer", "model", "checked"])
@pytest.mark.parametrize("first", ["sliding_attention", "full_attention"])
def test_layers_with_windows_keep_keys_that_later_queries_see(first: str, pool: str | None) -> None:
    """A window of 5 shows 4 keys of the prefix to the first later query, fewer to the others."""
    other = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}[first]
    config = Qwen2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=99, use_sliding_window=True, sliding_window=5,
        layer_types=[first, other], initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model, inputs = Qwen2ForCausalLM(config).eval(), batch("none")
    for build in (caches.ValueAware, caches.AttentionMatching):
        assert (
            logits(model, inputs, after(build(6), pool=pool, observed="continued")).isfinite().all()
        )
        if pool == "checked":
            continue
        kept = kept_by(model, inputs, build(6), pool=pool, observed="continued")
        by_kind = dict(zip(config.layer_types, kept, strict=True))
        windowed, full = by_kind["sliding_attention"], by_kind["full_attention"]
        assert (used(windowed) <= 4).all() and (used(full).flatten(1).sum(dim=1) >= 12).all()
        assert (windowed.indices[windowed.log_weight > -torch.inf] >= PREFIX - 4).all()


def test_a_checked_pool_needs_a_prefix() -> None:
    options = {"pool": "checked", "prefix": None, "observed": "noncausal"}
    line = "^pool is 'checked'; without a prefix there is none"
    assert_refused(line, after, caches.Recent(R), **options)


@pytest.mark.parametrize("name", ["la_prox", "leave_one_out", "value_aware"])
def test_a_layer_without_values_takes_no_key_from_others(name: str) -> None:
    model, inputs = sharp("llama"), batch("none")
    with torch.no_grad():
        attention_layers(model)[0].v_proj.weight.zero_()
    kept = kept_by(model, inputs, METHODS[name](R), pool="model")
    dead, alive = (used(choice).flatten(1).sum(-1) for choice in kept[:2])
    assert (dead <= alive).all(), (dead, alive)


class NaNLosses(caches.Random):
    def losses(self, observed: caches.Observed) -> Tensor:
        losses = super().losses(observed).clone()
        losses[:, ::2] = torch.nan  # of every other head
        return losses


def test_a_loss_that_is_nan_is_the_lowest() -> None:
    kept = kept_by(sharp("llama"), batch("none"), NaNLosses(R, seed=0), pool="model")
    counts = torch.stack([used(each).flatten(1) for each in kept])
    assert (counts[..., 0] == 3).all() and (counts.sum((0, 2)) == R * counts[:, 0].numel()).all()


@pytest.mark.parametrize("observed", ["last", "continued"])
@pytest.mark.parametrize("name", ["leave_one_out", "value_aware", "la_prox"])
def test_autocast_lowers_no_choice_of_all_layers(name: str, observed: str) -> None:
    generator = torch.Generator().manual_seed(0)
    calls = [
        dict(
            zip(
                ("query", "key", "value"),
                torch.randn(3, 2, 2, 12, 8, generator=generator),
                strict=True,
            )
        )
        | {"is_causal": True, "layer": Layer(number=number)}
        for number in range(2)
    ]
    method = after(METHODS[name](R), observed=observed, pool="model")
    expected = method.choose(calls)
    with torch.autocast("cpu", torch.bfloat16):
        chosen = method.choose(calls)
    for first, second in zip(chosen, expected, strict=True):
        assert torch.equal(first.indices, second.indices)
        assert torch.equal(first.log_weight, second.log_weight)
