"""A model that decodes with a compressed cache computes what one pass of `AfterPrefix` does."""

import io
import itertools
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from fractions import Fraction
from functools import cache, partial
from inspect import signature
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests.hugging_face.models import sharp
from tests.refusals import assert_refused
from value_aware_attention.approximations import Exact, SlidingWindow
from value_aware_attention.caches import (
    AfterPrefix,
    CacheMethod,
    KeptKeys,
    LeaveOneOut,
    Observed,
    ObservedAttention,
    Recent,
    ValueAware,
)
from value_aware_attention.call import Call
from value_aware_attention.decoding import filling
from value_aware_attention.decoding.filling import CompressedCaches
from value_aware_attention.decoding.kept_layer import KeptLayer, Slots
from value_aware_attention.hugging_face import (
    CompressedGeneration,
    attention_layers,
    compressed_cache,
    logits_after,
    replace_attention,
    set_attention,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore:no token was read over:UserWarning"),
]
KINDS = (
    "gemma", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "phi3", "qwen2", "qwen3",
)  # fmt: skip
QUICK = ("gpt2", "llama")
PREFIX, LATER, KEEP = 24, 6, 1 / 3
R = round(KEEP * PREFIX)
METHODS: dict[str, Callable[[int], CacheMethod]] = {
    "scores": ObservedAttention,
    "joint": ValueAware,
    "refitted": partial(ValueAware, refit=True),
}
EVEN: dict[str, Any] = {"observed": "noncausal", "pool": None}
"""As many keys in every head, chosen by some of the queries: `keys` of a layer holds them"""
TOGETHER: dict[str, Any] = {"observed": "causal", "rows": PREFIX, "every": 1, "pool": "model"}
"""One budget for all layers, which choose again after each call"""
IN_LAYERS = TOGETHER | {"every": 2, "pool": "layer"}
BUDGETS: dict[str, dict[str, Any]] = {"even": EVEN, "layer": {"pool": "layer"}, "default": {}}
POOLS = ("layer", "model")
HALF_READ = "a call that was interrupted has left this cache half read; give a new one"
of_every_budget = pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)


class Uneven(Recent):
    """Keeps the latest keys, with a pool more of them in the later heads; no rounding moves it."""

    def losses(self, observed: Observed) -> Tensor:
        return self.scores(observed) + 4 * torch.arange(observed.batch[-1])[:, None]


@cache
def usual_pass(method: Callable[[int], CacheMethod] = LeaveOneOut, padding: int = 4) -> Tensor:
    """Computes `one_pass` of the small llama once for all tests."""
    return one_pass(sharp("llama"), text(padding=padding), method(R))


def stopping(stops: Callable[[Observed], bool]) -> type[ObservedAttention]:
    """Builds a method that is interrupted at the choices that `stops` names."""

    class Stopping(ObservedAttention):
        def scores(self, observed: Observed) -> Tensor:
            if stops(observed):
                raise KeyboardInterrupt
            return super().scores(observed)

    return Stopping


def text(rows: int = 3, padding: int = 4) -> dict[str, Tensor]:
    """Draws texts, of which the first is padded on the left."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(5, 90, (rows, PREFIX + LATER), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def placed(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the positions that `generate` gives."""
    if "position_ids" in inputs or "position_ids" not in signature(model.forward).parameters:
        return inputs
    return inputs | {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)}


def part(inputs: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """Cuts tokens out of texts; their masks have a column of each token up to the last."""
    cut = {name: x[:, first:last] for name, x in inputs.items()}
    if (mask := inputs.get("attention_mask")) is not None:
        cut["attention_mask"] = mask[:, :last] if mask.ndim == 2 else mask[..., first:last, :last]
    return cut


@torch.no_grad()
def one_pass(
    model: PreTrainedModel, inputs: dict[str, Tensor], method: CacheMethod, **options: Any
) -> Tensor:
    """Computes logits after the prefix in one pass of `AfterPrefix` for each number of tokens.

    Options and their defaults are those of `compressed_cache`. Of a text's own tokens the share
    r / PREFIX is kept, and what is always kept. A pass reads all texts, as the cache is filled: in
    another batch a text may round to the other side of a tie.
    """
    options = {"observed": "continued", "pool": "model", "sinks": 2, "recent": 4} | options
    inputs, found = placed(model, inputs), []
    lengths = inputs["attention_mask"][:, :PREFIX].sum(dim=1)
    for tokens in lengths.unique().tolist():
        own = copy(method)
        own.r = max(round(method.r / PREFIX * tokens), options["sinks"] + options["recent"])
        with replace_attention(model, AfterPrefix(own, prefix=PREFIX, **options)):
            logits = model(**inputs, use_cache=False).logits[:, PREFIX:]
        found.append(logits.where((lengths == tokens)[:, None, None], 0.0))
    return torch.stack(found).sum(dim=0)


@torch.no_grad()
def read(
    model: PreTrainedModel, inputs: dict[str, Tensor], cuts: list[int], cache: Any = None
) -> tuple[Tensor, Any]:
    """Reads texts part by part; returns the logits of all parts but the first, and the cache."""
    inputs, found = placed(model, inputs), []
    for first, last in zip([0, *cuts], [*cuts, inputs["input_ids"].shape[1]], strict=True):
        output = model(**part(inputs, first, last), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found[1:], dim=1), cache


def through(
    model: PreTrainedModel, method: Any, inputs: dict[str, Tensor], cuts: list[int], **options: Any
) -> tuple[Tensor, Any, CompressedCaches]:
    """Reads texts part by part with a compressed cache; returns logits, cache and report."""
    with compressed_cache(model, method, **{"keep": KEEP} | options) as report:
        return *read(model, inputs, cuts), report


@torch.no_grad()
def filled(
    model: PreTrainedModel, method: Any, inputs: dict[str, Tensor], **options: Any
) -> tuple[Any, CompressedCaches]:
    """Fills a compressed cache by one call of the model; returns it with the report."""
    with compressed_cache(model, method, **{"keep": KEEP} | options) as report:
        return model(**inputs, use_cache=True).past_key_values, report


def assert_equal(found: Tensor, expected: Tensor, share: float = 1e-4) -> None:
    assert (found - expected).abs().max() <= share * expected.abs().max().clamp_min(1)


def is_even(report: CompressedCaches) -> bool:
    """Tells whether all heads of the first cache keep as many keys."""
    keys = report.caches[0].keys
    return bool((keys == keys[0, 0]).all())


def decoder(kind: str) -> PreTrainedModel:
    """Builds a model of full attention: Mistral's has a sliding window by default."""
    if kind != "mistral":
        return sharp(kind)
    config = sharp(kind).config
    config.sliding_window = None
    torch.manual_seed(0)
    return MistralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return sharp("llama")


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
@pytest.mark.parametrize(
    "kind",
    [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS],
)
def test_decoding_with_a_compressed_cache_is_one_pass_after_the_prefix(
    kind: str, attention: str
) -> None:
    """Token by token, then several at once; the compression itself moves the logits.

    Eager attention rounds otherwise than one pass does, which decides between joint sets that are
    as good: with it keys are chosen by scores.
    """
    model, inputs = decoder(kind), text()
    model.set_attn_implementation(attention)
    methods = METHODS if attention == "sdpa" else dict.fromkeys(METHODS, ObservedAttention)
    for (name, method), budget in zip(methods.items(), BUDGETS.values(), strict=True):
        expected = one_pass(model, inputs, method(R), **budget)
        cuts = [PREFIX, PREFIX + 1, PREFIX + 2, PREFIX + 3]
        found, cache, report = through(model, method, inputs, cuts, **budget)
        assert_equal(found, expected)
        far = (expected - scored(model, inputs)).abs().max()
        assert far > 1e-3 * expected.abs().max(), name
        assert cache.get_seq_length() == PREFIX + LATER
        assert len(report.caches) == 1 and report.caches[0].tokens == PREFIX
        assert model.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_fused_attention_reads_its_prompt_by_sdpa(llama: PreTrainedModel, attention: str) -> None:
    """With heads of different sizes and biases too; the model's own attention is restored."""
    model, inputs = deepcopy(llama), text(padding=20)
    build = METHODS["refitted"]
    expected = usual_pass(build, padding=20)
    model.config._attn_implementation = attention  # set by name: flash attention is not installed
    assert_equal(through(model, build, inputs, [PREFIX, PREFIX + 2])[0], expected)
    assert model.config._attn_implementation == attention


FEW_SLOTS = {"sinks": 1, "recent": 2}
CHOICES = [
    *(
        (LeaveOneOut, 4, {"observed": observed, "rows": rows, "seed": 3, "pool": pool})
        for observed in ("last", "causal", "noncausal", "continued")
        for pool, rows in ((None, 5), ("model", PREFIX // 2))
    ),
    *((build, 20, budget | FEW_SLOTS) for build in METHODS.values() for budget in BUDGETS.values()),
    *(
        (METHODS["refitted"], PREFIX - 3, options | {"sinks": 1, "recent": 1})
        for options in (EVEN | {"rows": 4}, {})
    ),
]


@pytest.mark.parametrize(("build", "padding", "options"), CHOICES)
def test_it_holds_for_every_way_to_observe_every_budget_and_texts_of_few_rows(
    llama: PreTrainedModel, build: Any, padding: int, options: dict[str, Any]
) -> None:
    """With fewer keys than slots, too, and with values of a text's own beside refitted ones."""
    inputs = text(padding=padding)
    found, _, _ = through(llama, build, inputs, [PREFIX, PREFIX + 2], **options)
    assert_equal(found, one_pass(llama, inputs, build(R), **options))


@pytest.mark.parametrize("padding", [pytest.param(0, marks=pytest.mark.slow), 20])
@pytest.mark.parametrize(
    "observed",
    ["noncausal", *(pytest.param(one, marks=pytest.mark.slow) for one in ("last", "causal"))],
)
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pool", [None, "layer", "model"])
def test_a_growing_cache_is_chosen_again_as_in_one_pass(
    pool: str | None, kind: str, observed: str, padding: int
) -> None:
    """Token by token, several at once across a choice, in moved batches, and after a removal.

    Layers that share a budget choose between calls.
    """
    model, inputs = decoder(kind), text(padding=padding)
    model.set_attn_implementation("sdpa")
    options = {"observed": observed, "rows": 12, "every": 2, "seed": 1, "pool": pool}
    expected = one_pass(model, inputs, LeaveOneOut(R), **options)
    exact = one_pass(model, inputs, LeaveOneOut(R), **options | {"every": None})
    assert not torch.allclose(expected, exact, atol=1e-3)
    across = [[0, 3, 4], [0, 2]] if pool != "model" else [[0, 2, 4], [0, 1, 2, 4, 5]]
    for cuts in ([0, 1, 2, 3, 4, 5], *across):
        places = [PREFIX + cut for cut in cuts]
        found, cache, report = through(model, LeaveOneOut, inputs, places, **options)
        assert_equal(found, expected)
        assert cache.get_seq_length() == PREFIX + LATER
        assert {layer.later for layer in cache.layers} == {2}
        kept = sum(layer.counts.sum(dim=1) for layer in cache.layers)
        assert kept.tolist()[1:] == [R * report.caches[0].keys.numel()] * 2
        assert len(report.caches) == 1 and report.caches[0].bytes_of_queries > 0
    with compressed_cache(model, LeaveOneOut, keep=KEEP, **options), torch.no_grad():
        between = [] if pool != "model" else [PREFIX + 2]
        _, cache = read(model, part(inputs, 0, PREFIX + 4), [PREFIX, *between, PREFIX + 3])
        cache.crop(-1)
        assert cache.get_seq_length() == PREFIX + 3
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        cache.batch_repeat_interleave(2)
        rest = {n: x[[2, 2, 0, 0, 1, 1]] for n, x in placed(model, inputs).items()}
        between = [] if pool != "model" else [PREFIX + 4]
        found = [
            model(**part(rest, *cut), past_key_values=cache).logits
            for cut in pairwise([PREFIX + 3, *between, PREFIX + LATER])
        ]
    assert_equal(torch.cat(found, dim=1), expected[[2, 2, 0, 0, 1, 1], 3:])


def test_layers_with_one_budget_read_a_call_over_the_keys_before_it(llama: PreTrainedModel) -> None:
    """A call that crosses choices sees the older keys; the next call finds the choices made."""
    inputs, options = text(), {"observed": "last", "rows": PREFIX, "every": 2}
    found, cache, _ = through(llama, LeaveOneOut, inputs, [PREFIX, PREFIX + 5], **options)
    older = one_pass(llama, inputs, LeaveOneOut(R), **options | {"every": None})
    assert_equal(found[:, :5], older[:, :5])
    assert {(layer.prefix, layer.later) for layer in cache.layers} == {(PREFIX + 4, 2)}
    counts = torch.stack([layer.counts for layer in cache.layers])
    assert (counts.sum(dim=(0, 2))[1:] == R * counts[:, 0].numel()).all()
    assert counts.unique().numel() > 1


def test_a_growing_cache_generates_and_counts_its_time(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by a second whenever it is read, so that a choice takes one."""
    clock = map(float, itertools.count()).__next__
    monkeypatch.setattr(filling, "seconds_now", clock)
    monkeypatch.setattr("value_aware_attention.call._now", clock)
    options = EVEN | {"observed": "last", "every": 2}
    with compressed_cache(llama, Recent, keep=KEEP, **options) as report:
        found = generated(llama, prompt(), do_sample=False, num_beams=2)
        generated(llama, prompt(), do_sample=False)
    assert found.sequences.shape == (3, PREFIX + LATER)
    assert [cache.tokens for cache in report.caches] == [PREFIX] * 2
    choices = len(attention_layers(llama)) * (1 + (LATER - 1) // 2)
    assert [cache.seconds for cache in report.caches] == [choices] * 2


NEW = {"max_new_tokens": LATER, "min_new_tokens": LATER, "pad_token_id": 0, "eos_token_id": None}


def prompt() -> dict[str, Tensor]:
    return part(text(), 0, PREFIX)


def generated(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**inputs, **NEW | {"return_dict_in_generate": True} | options)


def expected_of(model: PreTrainedModel, sequences: Tensor, budget: dict[str, Any]) -> Tensor:
    """Computes the logits of generated tokens, from the second on, in one pass."""
    mask = text()["attention_mask"].repeat_interleave(len(sequences) // 3, dim=0)
    inputs = {"input_ids": sequences, "attention_mask": mask}
    return one_pass(model, inputs, LeaveOneOut(R), **budget)[:, :-1]


@pytest.mark.parametrize(
    ("kind", "options", "budget"),
    [
        ("gpt2", {}, {}),
        ("llama", {}, {}),
        ("llama", {"do_sample": True}, {}),
        *(("llama", {"prefill_chunk_size": 7}, budget) for budget in BUDGETS.values()),
    ],
)
def test_generated_tokens_are_those_of_one_pass(
    kind: str, options: dict[str, object], budget: dict[str, Any]
) -> None:
    model = sharp(kind)
    torch.manual_seed(0)
    with compressed_cache(model, LeaveOneOut, keep=KEEP, **budget) as report:
        found = generated(model, prompt(), **{"do_sample": False, "output_logits": True} | options)
    logits = torch.stack(found.logits[1:], dim=1)
    expected = expected_of(model, found.sequences, budget)
    assert_equal(logits, expected)
    assert len(report.caches) == 1 and is_even(report) == (budget is EVEN)
    if "do_sample" not in options:
        assert torch.equal(expected.argmax(-1), found.sequences[:, PREFIX + 1 :])


@of_every_budget
def test_beams_score_as_one_pass(llama: PreTrainedModel, budget: dict[str, Any]) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    with compressed_cache(llama, LeaveOneOut, keep=KEEP, **budget):
        found = generated(llama, prompt(), **options, output_scores=True)
    expected = expected_of(llama, found.sequences, budget)
    tokens = found.sequences[:, PREFIX + 1 :, None]
    scores = expected.log_softmax(-1).gather(-1, tokens)[..., 0].sum(-1)
    with torch.no_grad():
        first = llama(**placed(llama, prompt())).logits[:, -1].log_softmax(-1)
    first = first.repeat_interleave(2, dim=0).gather(-1, found.sequences[:, PREFIX, None])
    scores = scores + first[:, 0]
    torch.testing.assert_close(found.sequences_scores * LATER, scores, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [
        (EVEN, {}),
        (BUDGETS["layer"], {"prefill_chunk_size": 3}),
        ({}, {"prefill_chunk_size": 3}),
        *(({"pool": pool, "observed": "last", "rows": PREFIX, "every": 5}, {}) for pool in POOLS),
    ],
)
def test_a_second_turn_goes_on_in_the_same_cache(
    llama: PreTrainedModel, budget: dict[str, Any], chunks: dict[str, int]
) -> None:
    cache, inputs = DynamicCache(config=llama.config), prompt()
    with compressed_cache(llama, LeaveOneOut, keep=KEEP, **budget) as report:
        first = llama.generate(**inputs, **NEW, past_key_values=cache, do_sample=False)
        asked = torch.cat([first, first[:, 3:7]], dim=1)
        mask = torch.ones_like(asked)
        mask[0, :4] = 0
        second = llama.generate(
            input_ids=asked, attention_mask=mask, **NEW, past_key_values=cache, do_sample=False,
            **chunks,
        )  # fmt: skip
        other = generated(llama, inputs, do_sample=False)
    whole = {"input_ids": second, "attention_mask": torch.ones_like(second)}
    whole["attention_mask"][0, :4] = 0
    logits = one_pass(llama, whole, LeaveOneOut(R), **budget)[:, :-1]
    later = slice(asked.shape[1] - PREFIX - 1, None)
    assert torch.equal(logits[:, later].argmax(-1), second[:, asked.shape[1] :])
    assert len(report.caches) == 2 and torch.equal(other.sequences, first)


def test_generate_takes_it_as_its_own_way_to_decode(llama: PreTrainedModel) -> None:
    with compressed_cache(llama, LeaveOneOut, keep=KEEP):
        expected = generated(llama, prompt(), do_sample=False).sequences
    custom = CompressedGeneration(LeaveOneOut, keep=KEEP)
    for beams in (1, 2):
        found = generated(llama, prompt(), do_sample=False, custom_generate=custom, num_beams=beams)
        assert beams > 1 or torch.equal(found.sequences, expected)
    assert [cache.tokens for cache in custom.report.caches] == [PREFIX] * 2


def test_memory_follows_the_keys_that_are_kept() -> None:
    """Also where heads keep different numbers."""
    model, tokens = sharp("llama"), 512
    inputs = {"input_ids": torch.randint(5, 90, (2, tokens))}
    for budget in BUDGETS.values():
        cache, report = filled(model, ObservedAttention, inputs, keep=1 / 8, **budget)
        (one,) = report.caches
        held = sum(layer.nbytes for layer in cache.layers)
        plain = 2 * cache.layers[0].keys.element_size() * cache.layers[0].keys.shape[-1]
        heads = one.keys.numel()
        assert one.bytes_before == 2 * tokens * plain * heads and one.bytes_after == held
        assert one.bytes_of_queries == 0
        kept = {tuple(layer.keys.shape[:3]) for layer in cache.layers}
        assert kept == {(2, heads // len(cache.layers), 64 if is_even(report) else 0)}
        assert one.keys.mean().item() == tokens / 8
        kept_in_all = 2 * heads * tokens // 8
        assert kept_in_all <= one.slots <= (1 if is_even(report) else 1.05) * kept_in_all
        assert "512 tokens: 64.0 keys a head" in str(report)
        assert is_even(report) == ("heads keep" not in str(report)) == (budget is EVEN)


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=message)


def test_what_is_not_a_compression_is_refused(llama: PreTrainedModel) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"method": LeaveOneOut(3)}, "it must be a function from a number of keys"),
        ({"method": lambda r: Exact()}, "it must be a function from a number of keys"),
        (
            {"observed": "repeat"},
            "observed is 'repeat'; it reads the prompt again, .* in one pass: last, causal, nonc",
        ),
        ({"observed": "hindsight"}, "observed is 'hindsight'; it must be one of last, causal"),
        (
            {"pool": "checked"},
            "pool is 'checked'; it reads the prompt again, .* in one pass: model, layer or None",
        ),
        ({"pool": "heads"}, "pool is 'heads'; it must be None or one of model, layer"),
        ({"pool": 2}, "pool is 2; it must be None or one of model, layer"),
        ({"rows": 0}, "rows is 0; it must be"),
        ({"every": 0}, "every is 0; it must be"),
        ({"every": 4}, "every is 4 and observed is 'continued'"),
        (EVEN | {"every": 4, "method": METHODS["refitted"]}, "4; ValueAware refits values"),
        ({"bits": 4}, "bits is 4; it must be None or one of 8"),
        (EVEN | {"every": 4, "bits": 8}, "bits is 8 and every is 4; keys that are chosen again"),
        (EVEN | {"every": 4, "mean_slot": True}, "mean_slot is True and every is 4; keys that are"),
        ({"mean_slot": 1}, "mean_slot is 1; it must be True or False"),
        (
            {"mean_slot": True, "method": METHODS["refitted"]},
            "mean_slot is True, and ValueAware refits the kept values",
        ),
    ]
    for options, message in cases:
        given = {"method": LeaveOneOut, "inputs": prompt()} | options
        assert_refused(message, filled, llama, **given)
    assert llama.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["bert", "t5", "gemma2"])
def test_models_without_a_cache_that_can_be_compressed_are_refused(kind: str) -> None:
    assert_refused(".", compressed_cache(sharp(kind), LeaveOneOut, keep=0.5).__enter__)


def test_calls_that_fill_no_cache_are_refused(llama: PreTrainedModel) -> None:
    with torch.no_grad():
        other = llama(**prompt(), use_cache=True).past_key_values
    later = {"input_ids": torch.tensor([[7]] * 3), "past_key_values": other}
    with compressed_cache(llama, LeaveOneOut, keep=KEEP), torch.no_grad():
        for line, call, options in (
            ("use_cache=True", llama, prompt() | {"use_cache": False}),
            ("holds 24 tokens that were not compressed", llama, later),
            (
                "StaticLayer; compressed_cache needs the DynamicLayer",
                partial(generated, llama, prompt()),
                {"cache_implementation": "static"},
            ),
        ):
            assert_refused(line, call, **options)
        found, _ = read(llama, text(), [PREFIX])  # and the next cache is as any
    assert_equal(found, usual_pass())


def test_contexts_are_not_within_one_another(llama: PreTrainedModel) -> None:
    caches = partial(compressed_cache, llama, Recent, keep=0.5)
    approximations = partial(replace_attention, llama, Exact())
    for outer, inner in ((caches, caches), (caches, approximations), (approximations, caches)):
        with outer():
            assert_refused("is replaced already", inner().__enter__)
    with compressed_cache(llama, Recent, keep=0.5), ThreadPoolExecutor(1) as thread:
        inner = compressed_cache(llama, Recent, keep=0.5)
        assert_refused("another thread", thread.submit(inner.__enter__).result)


def test_an_interrupted_generation_restores_the_model(llama: PreTrainedModel) -> None:
    modules = attention_layers(llama)
    hooks = [len(module._forward_pre_hooks) for module in modules]
    with (
        pytest.raises(KeyboardInterrupt),
        compressed_cache(llama, stopping(lambda _: True), keep=0.5),
    ):
        generated(llama, prompt())
    assert llama.config._attn_implementation == "eager"
    assert [len(module._forward_pre_hooks) for module in modules] == hooks
    assert "_prefill" not in vars(llama)


def test_tokens_that_generate_takes_for_padding_are_named(llama: PreTrainedModel) -> None:
    tokens = prompt()["input_ids"]
    tokens[:, 10] = 0
    warned = pytest.warns(UserWarning, match="3 tokens of the prompt equal pad_token_id")
    with compressed_cache(llama, LeaveOneOut, keep=KEEP), warned:
        llama.generate(input_ids=tokens, **NEW)


@of_every_budget
def test_bf16_is_one_pass_to_its_precision(budget: dict[str, Any]) -> None:
    """Eager attention and this library's differ by more on the whole text: softmax in bf16."""
    model = sharp("llama").to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    found, _, report = through(model, Uneven, text(), [PREFIX, PREFIX + 2], **budget)
    expected = one_pass(model, text(), Uneven(R), **budget)
    assert is_even(report) == (budget is EVEN)
    assert (found - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize("budget", [EVEN, {}])
def test_a_prompt_after_an_interrupted_one_is_chosen_anew(
    llama: PreTrainedModel, budget: dict[str, Any]
) -> None:
    """In the same cache, once it was emptied."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    inputs, cache = placed(llama, text()), DynamicCache(config=llama.config)
    with compressed_cache(llama, LeaveOneOut, keep=KEEP, **budget) as report, torch.no_grad():
        stopped = llama.model.layers[2].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llama(**part(inputs, 0, PREFIX - 6), past_key_values=cache)
        stopped.remove()
        cache.reset()
        wrong = part(inputs, 0, 4) | {
            "past_key_values": cache,
            "attention_mask": prompt()["attention_mask"],
        }
        assert_refused("attention_mask has 24 columns; .* so it must have 4", llama, **wrong)
        cache.reset()
        found, _ = read(llama, text(), [PREFIX], cache)
    assert_equal(found, one_pass(llama, text(), LeaveOneOut(R), **budget))
    (one,) = report.caches
    assert one.tokens == PREFIX and one.bytes_after < one.bytes_before / 2


@pytest.mark.parametrize("options", [{}, EVEN, EVEN | {"every": 2}, TOGETHER])
def test_an_emptied_cache_is_as_a_new_one(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    beams = NEW | {"num_beams": 3, "do_sample": False}
    cache = DynamicCache(config=llama.config)
    with compressed_cache(llama, Uneven, keep=0.5, **options), torch.no_grad():
        llama(**prompt(), past_key_values=cache)
    cache.reset()
    found = llama.generate(**prompt(), **beams, past_key_values=cache)
    assert torch.equal(found, llama.generate(**prompt(), **beams))


@pytest.mark.parametrize("options", [{}, EVEN | {"every": 2}, TOGETHER])
def test_a_copy_of_a_cache_is_read_in_its_context_alone(
    llama: PreTrainedModel, options: dict[str, Any]
) -> None:
    inputs = placed(llama, text())
    with compressed_cache(llama, LeaveOneOut, keep=KEEP, **options), torch.no_grad():
        cache = llama(**part(inputs, 0, PREFIX)).past_key_values
        copied = deepcopy(cache)
        found, _ = read(llama, part(text(), 0, PREFIX + 3), [PREFIX], DynamicCache())
        for one in (cache, copied):
            later = part(inputs, PREFIX, PREFIX + 3)
            assert_equal(llama(**later, past_key_values=one).logits, found)
        one = part(inputs, PREFIX, PREFIX + 1) | {"past_key_values": copied}
        assert_refused("of another model", sharp("llama"), **one)
        held = {id(x) for layer in copied.layers for x in vars(layer).values()}
        assert not held & {id(module) for module in llama.modules()}
    with refused("of a compressed_cache or load_compressed that is closed"), torch.no_grad():
        llama(**part(inputs, PREFIX + 3, PREFIX + 4), past_key_values=copied)


def test_masks_of_the_whole_text_are_read(llama: PreTrainedModel) -> None:
    inputs = placed(llama, text())
    whole = inputs["attention_mask"][:, None, None].bool()
    whole = whole & torch.ones(PREFIX + LATER, PREFIX + LATER, dtype=torch.bool).tril()
    hidden = torch.zeros(whole.shape).masked_fill(~whole, torch.finfo(torch.float32).min)
    expected = usual_pass()
    for cuts in ([PREFIX], [PREFIX, PREFIX + 1, PREFIX + 2]):
        masked = inputs | {"attention_mask": hidden}
        assert_equal(through(llama, LeaveOneOut, masked, cuts)[0], expected)


@pytest.mark.parametrize("kind", ["jetmoe", "diffllama", "deepseek_v3"])
def test_layers_that_cache_other_keys_than_they_read_are_refused(kind: str) -> None:
    line = "attends to other keys or values than its cache holds"
    assert_refused(line, through, sharp(kind), Recent, text(), [PREFIX])


def test_windows_without_a_cache_of_windows_are_refused() -> None:
    config = sharp("mistral").config
    config.sliding_window = 8
    model = MistralForCausalLM(config).eval()
    with compressed_cache(model, Recent, keep=KEEP), torch.no_grad():
        line = "attends within a window of 8 and its cache has none"
        assert_refused(line, model, **prompt(), past_key_values=DynamicCache())
        model.generate(**prompt(), **NEW, prefill_chunk_size=7)  # nothing is compressed


def test_other_models_and_threads_do_not_read_in_the_context(llama: PreTrainedModel) -> None:
    other = type(llama)(llama.config).eval()
    with compressed_cache(llama, Recent, keep=KEEP), torch.no_grad():
        assert_refused("another LlamaAttention reads the config", other, **prompt())
        with ThreadPoolExecutor(1) as thread, refused("another thread has opened this compressed"):
            thread.submit(llama, **prompt(), use_cache=True).result()


def test_assisted_decoding_is_refused(llama: PreTrainedModel) -> None:
    one = {name: x[1:2] for name, x in prompt().items()}
    custom = CompressedGeneration(Recent, keep=KEEP)
    for helper in ({"assistant_model": sharp("llama")}, {"prompt_lookup_num_tokens": 2}):
        with refused("assisted decoding reads"), compressed_cache(llama, Recent, keep=KEEP):
            llama.generate(**one, **NEW, do_sample=False, **helper)
    with refused("assisted decoding reads"):  # `generate` gives no function an assistant_model
        llama.generate(
            **one, **NEW, do_sample=False, prompt_lookup_num_tokens=2, custom_generate=custom
        )
    contrastive = one | NEW | {"penalty_alpha": 0.6, "top_k": 4, "custom_generate": custom}
    line = "is code of the hub; CompressedGeneration decodes greedily"
    assert_refused(line, llama.generate, **contrastive)


def test_masks_of_packed_texts_and_trained_approximations_are_refused(
    llama: PreTrainedModel,
) -> None:
    packed = torch.zeros(3, 1, PREFIX, PREFIX)
    hidden = torch.finfo(torch.float32).min
    packed[..., 10:, :10] = hidden
    packed = packed.masked_fill(~torch.ones(PREFIX, PREFIX).tril().bool(), hidden)
    masked = prompt() | {"attention_mask": packed}
    assert_refused("mask is not causal with padding alone", filled, llama, Recent, masked)
    model = sharp("llama")
    set_attention(model, lambda layer: SlidingWindow(4))
    assert_refused("trained with SlidingWindow", filled, model, Recent, prompt())


@of_every_budget
def test_autocast_lowers_no_sum(llama: PreTrainedModel, budget: dict[str, Any]) -> None:
    model = sharp("llama")
    model.set_attn_implementation("sdpa")
    inputs = placed(model, text())
    with compressed_cache(model, Uneven, keep=KEEP, **budget), torch.no_grad():
        cache = model(**part(inputs, 0, PREFIX), use_cache=True).past_key_values
        copied = deepcopy(cache)
        rest = part(inputs, PREFIX, PREFIX + LATER)
        exact = model(**rest, past_key_values=cache).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(**rest, past_key_values=copied).logits
    assert (found - exact).norm() <= 3e-2 * exact.norm()


@torch.no_grad()
def decoded(model: Any, llama: PreTrainedModel, **options: Any) -> Tensor:
    """Computes the logits of a prompt and of three tokens one by one."""
    inputs, cache = placed(llama, text()), DynamicCache(config=llama.config)
    cuts = [0, PREFIX, PREFIX + 1, PREFIX + 2, PREFIX + 3]
    with compressed_cache(llama, keep=KEEP, **options):
        return torch.cat(
            [
                model(**part(inputs, first, last), past_key_values=cache).logits
                for first, last in pairwise(cuts)
            ],
            dim=1,
        )


GROWING = EVEN | {"every": 2, "observed": "last"}


@pytest.mark.slow  # the compiler is imported
@pytest.mark.filterwarnings("ignore")  # of the compiler, about recompilations
@pytest.mark.parametrize(
    ("backend", "part_of_it", "options"),
    [
        ("eager", "model", {}),
        ("eager", "forward", {}),
        ("eager", "forward", GROWING),
        ("inductor", "model", GROWING),
    ],
)
def test_a_compiled_model_reads_the_same_cache(
    backend: str, part_of_it: str, options: dict[str, Any]
) -> None:
    """Hooks and pointers are not traced, by `torch.compile` of the model nor of its forward."""
    model = sharp("llama")
    model.set_attn_implementation("sdpa")
    expected, whole = decoded(model, model, method=ValueAware, **options), model
    if part_of_it == "forward":
        model.forward = torch.compile(model.forward, backend=backend)
    else:
        whole = torch.compile(model, backend=backend)
    assert_equal(decoded(whole, model, method=ValueAware, **options), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("options", [{}, EVEN, EVEN | {"every": 2}, IN_LAYERS])
def test_gradients_reach_the_prompt(options: dict[str, Any]) -> None:
    """They are those of one pass over the keys that are kept."""
    model, inputs = sharp("llama"), text(padding=0)
    with compressed_cache(model, ObservedAttention, keep=KEEP, **options):
        cache = model(**part(inputs, 0, PREFIX), use_cache=True).past_key_values
        output = model(**part(inputs, PREFIX, PREFIX + LATER), past_key_values=cache)
        output.logits.square().sum().backward()
    found = {name: x.grad for name, x in model.named_parameters()}
    model.zero_grad()
    options = {"observed": "continued", "pool": "model"} | options
    after = AfterPrefix(ObservedAttention(R), prefix=PREFIX, **options)
    with replace_attention(model, after):
        model(**inputs, use_cache=False).logits[:, PREFIX:].square().sum().backward()
    for name, x in model.named_parameters():
        assert (found[name] - x.grad).norm() <= 1e-4 * x.grad.norm(), name


def test_copies_and_files_of_what_an_open_context_holds(llama: PreTrainedModel) -> None:
    """A cache is copied and not pickled; a model is copied before or after."""
    with compressed_cache(llama, Recent, keep=KEEP), torch.no_grad():
        cache = llama(**prompt(), use_cache=True).past_key_values
        for save in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
            assert_refused("it cannot be pickled; hugging_face.save_compressed w", save, cache)
        assert deepcopy(cache).get_seq_length() == PREFIX
        for model in (llama, llama.model):
            line = "this model is replaced; copy or save it before the context"
            assert_refused(line, deepcopy, model)
    with replace_attention(llama, Exact()), refused("copy or save it before the context"):
        deepcopy(llama)
    assert not any(name.startswith("value_aware") for name in vars(deepcopy(llama)))


@pytest.mark.parametrize(
    "keep", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Fraction(1, 2)]
)
def test_a_share_is_any_number(llama: PreTrainedModel, keep: Any) -> None:
    _, report = filled(llama, Recent, text(padding=0), keep=keep)
    assert report.caches[0].keys.unique().tolist() == [(PREFIX + LATER) // 2]
    for wrong in (0, 0.0, 1.5, 2.0, -3, True, torch.tensor([0.5, 0.5]), "1/2", None, torch.nan):
        line = "it must be a share above 0 and at most 1, or an integer >= 2"
        assert_refused(line, filled, llama, Recent, prompt(), keep=wrong)


@of_every_budget
def test_an_integer_is_the_number_of_keys_of_a_head_in_every_text(
    llama: PreTrainedModel, budget: dict[str, Any]
) -> None:
    """A short text of a padded batch keeps as many, too, or all of its keys."""
    for r, padding in ((R, 0), (R, 4), (np.int64(22), 4), (torch.tensor(99), 4)):
        cut, inputs = [PREFIX, PREFIX + 2], text(padding=padding)
        logits, _, report = through(llama, Uneven, inputs, cut, keep=r, **budget)
        (one,) = report.caches
        assert f"asked for: Uneven, keep={int(r)}, bits=None, mean_slot=False" in str(one)
        counts = torch.stack([(x >= 0).sum(dim=-1) for x in one.indices]).float()
        shorter = min(int(r), PREFIX - padding)
        expected = [shorter, min(int(r), PREFIX), min(int(r), PREFIX)]
        assert counts.mean(dim=(0, 2)).tolist() == pytest.approx(expected)
        if not padding:
            assert torch.equal(logits, through(llama, Uneven, inputs, cut, keep=KEEP, **budget)[0])
        if r > PREFIX:
            assert_equal(logits, read(llama, inputs, cut)[0])
    for keep in (1, 1.0):
        keys = filled(llama, Uneven, prompt(), keep=keep)[1].caches[0].keys
        assert keys.mean().item() == pytest.approx(PREFIX - 4 / 3)  # of 20, 24 and 24


def test_a_growing_cache_stays_at_a_number_of_keys_once_it_has_them(
    llama: PreTrainedModel,
) -> None:
    """A prompt of 24 tokens grows to 26 keys, and then chooses 26 among 28."""
    options, inputs = EVEN | {"every": 2, "observed": "last"}, text(padding=0)
    cuts = [*range(PREFIX, PREFIX + LATER)]
    logits, cache, _ = through(llama, ObservedAttention, inputs, cuts, keep=26, **options)
    method = AfterPrefix(ObservedAttention(26), prefix=26, **options)
    with replace_attention(llama, method), torch.no_grad():
        expected = llama(**inputs, use_cache=False).logits[:, PREFIX:]
    assert_equal(logits, expected)
    assert {tuple(layer.counts.unique().tolist()) for layer in cache.layers} == {(26,)}
    growing = through(llama, Recent, text(padding=4), cuts, keep=22, **options)[1].layers[0]
    assert growing.counts[:, 0].tolist() == [22, 22, 22]  # from 20, 22 and 22


@of_every_budget
def test_the_report_has_the_positions_of_the_kept_keys(
    llama: PreTrainedModel, budget: dict[str, Any]
) -> None:
    """A text keeps the same positions alone, in a padded batch, and where beams have moved it."""
    inputs = text()
    with torch.no_grad():
        full = llama(**placed(llama, prompt())).past_key_values
    with compressed_cache(llama, LeaveOneOut, keep=KEEP, **budget) as report, torch.no_grad():
        cache = llama(**placed(llama, prompt()), use_cache=True).past_key_values
        for row in range(3):
            tokens = inputs["input_ids"][row : row + 1, (4 if row == 0 else 0) : PREFIX]
            llama(tokens, use_cache=True)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    together, *singles = (cache.indices for cache in report.caches)
    for number, indices in enumerate(together):
        assert torch.equal(cache.layers[number].indices, indices[[2, 0, 1]])
        for row, head in itertools.product(range(3), range(2)):
            places = indices[row, head][indices[row, head] >= 0]
            of_text = singles[row][number][0, head]
            assert places.tolist() == of_text[of_text >= 0].tolist()
            assert places.tolist() == sorted(set(places.tolist()))
            at = (places + (4 if row == 0 else 0)).long()
            expected = full.layers[number].keys[row, head, at]
            layer, text_now = cache.layers[number], [1, 2, 0][row]
            if layer.pages is None:
                key = layer.keys[text_now, head]
                key = key if layer.bias is None else key[layer.bias[text_now, head] == 0]
            else:
                pages = layer.pages.cache == 2 * text_now + head
                key = layer.pages.key[pages].flatten(0, 1)[: len(places)]
            assert torch.equal(key, expected)


def test_a_prompt_that_is_too_short_is_said_with_its_cause(llama: PreTrainedModel) -> None:
    one = {name: x[1:2] for name, x in prompt().items()}
    cause = "leaves 0 of the prompt's 1 tokens; 1 are kept, as 2 sinks and 4 recent keys always are"
    with pytest.warns(UserWarning, match=cause), compressed_cache(llama, Recent, keep=0.25):
        llama.generate(**one, **NEW, guidance_scale=1.5, do_sample=False)
    short = {"input_ids": one["input_ids"][:, :3]}
    cause = "the prompt has 3 tokens; it must have at least 6, with every: 2 sinks and 4 recent"
    assert_refused(cause, filled, llama, Recent, short, keep=1, **EVEN, every=2)


@pytest.mark.parametrize(("method", "budget"), [*zip(METHODS, BUDGETS.values(), strict=True)])
def test_a_prompt_shorter_than_what_is_always_kept_keeps_it_all_with_a_warning(
    llama: PreTrainedModel, method: str, budget: dict[str, Any]
) -> None:
    """Two sinks and four recent keys are six."""
    build = METHODS[method]
    for tokens, keep in ((1, 0.4), (5, 0.7), (PREFIX, 0.2)):
        inputs = part(text(padding=0), 0, tokens + 1)
        cause = f"^keep is {keep}, which leaves {round(keep * tokens)} of the prompt's {tokens} "
        cause += rf"tokens; {min(6, tokens)} are kept, as 2 sinks and 4 recent keys always are$"
        with pytest.warns(UserWarning, match=cause):
            found, _, report = through(llama, build, inputs, [tokens], keep=keep, **budget)
        assert report.caches[0].keys.unique().tolist() == [min(6, tokens)]
        if tokens <= 6:
            assert_equal(found, read(llama, inputs, [tokens])[0])
    least = budget | {"keep": 0.26}  # r is 6
    found, _, report = through(llama, build, text(padding=0), [PREFIX], **least)
    assert report.caches[0].keys.unique().tolist() == [6]
    assert_equal(found, one_pass(llama, text(padding=0), build(6), **budget))


def test_few_observed_queries_of_a_pool_bring_a_warning(llama: PreTrainedModel) -> None:
    """Less than half of the prompt's, where the method goes by them; any other warning fails."""
    whole, pool = text(padding=0), "layer"  # 30 tokens
    for options in ({"rows": 14}, {"rows": 14, "observed": "last"}):
        cause = f"pool is '{pool}' and 14 of the prompt's 30 queries are observed: .* pool=None"
        with pytest.warns(UserWarning, match=cause):
            filled(llama, LeaveOneOut, whole, **options, pool=pool)
    longer = {name: x.repeat(1, 3) for name, x in whole.items()}
    for method, inputs, options in (
        (LeaveOneOut, whole, {"pool": pool, "rows": 15}),
        (LeaveOneOut, whole, {"pool": pool}),
        (LeaveOneOut, whole, {"pool": None, "rows": 5}),
        (Recent, whole, {"pool": pool, "rows": 5}),
        (LeaveOneOut, longer, {"pool": pool}),
    ):
        filled(llama, method, inputs, **options)
    with pytest.warns(UserWarning, match="32 of the prompt's 90 queries"):
        filled(llama, LeaveOneOut, longer, pool=pool, observed="noncausal")


def test_a_short_text_of_a_batch_keeps_what_is_always_kept(llama: PreTrainedModel) -> None:
    inputs = part(placed(llama, text(padding=PREFIX - 5)), 0, PREFIX)
    cache, report = filled(llama, Recent, inputs)
    assert [layer.counts[:, 0].tolist() for layer in cache.layers] == [[5, R, R]] * 4
    assert report.caches[0].keys.mean() == pytest.approx((5 + 2 * R) / 3)
    cache, _ = filled(llama, Recent, inputs, pool="layer", floor=8)
    assert cache.layers[0].counts[:, 0].tolist() == [5, R, R]
    empty = prompt() | {"attention_mask": torch.zeros(3, PREFIX, dtype=torch.long)}
    assert_refused("the prompt has 0 tokens; it must have at least 1", filled, llama, Recent, empty)


def test_kept_keys_in_int8_take_a_byte_a_number_and_have_no_gradients() -> None:
    """Their logits are near those of keys with all bits, and not the same."""
    model, inputs = sharp("llama"), {"input_ids": torch.randint(5, 90, (2, 512))}
    width = model.config.hidden_size // model.config.num_attention_heads
    for pool in POOLS:
        (rounded,), (whole,) = (
            filled(model, ObservedAttention, inputs, pool=pool, bits=bits)[1].caches
            for bits in (8, None)
        )
        saved = 2 * (4 * width - width - 4)  # a key, a value; a scale for each
        assert whole.bytes_after - rounded.bytes_after == saved * whole.slots
    logits, exact = (
        through(model, LeaveOneOut, text(), [PREFIX], bits=bits)[0] for bits in (8, None)
    )
    assert 0 < (logits - exact).abs().max() < 0.05 * exact.abs().max()
    with compressed_cache(model, LeaveOneOut, keep=KEEP, bits=8):
        assert_refused(
            "bits is 8, and rounded keys have no gradients", model, **part(text(), 0, PREFIX)
        )


class MeanSlot(nn.Module):
    """Lets later queries see the kept keys, as many means of the others, later keys."""

    def __init__(self, indices: Tensor, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.indices, self.padding = indices, (inputs["attention_mask"] == 0).sum(dim=1).tolist()

    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        call = Call.of(*tensors, **options)
        output, groups = call.output(), call.query.shape[1] // self.indices.shape[1]
        for text, head in product(*map(range, call.query.shape[:2])):
            kept = [x + self.padding[text] for x in self.indices[text, head // groups] if x >= 0]
            dropped = sorted({*range(self.padding[text], PREFIX)} - {*map(int, kept)})
            key, value = (
                torch.cat([x[text, head, kept], x[text, head, dropped].mean(0, keepdim=True)])
                for x in (call.key, call.value)
            )
            for row in range(PREFIX, call.query.shape[2]):
                later = slice(PREFIX, row + 1)
                seen = torch.cat([key, call.key[text, head, later]])
                scores = call.kernel.log_similarity(call.query[text, head, row, None], seen)[0]
                scores[len(kept)] += math.log(len(dropped))
                values = torch.cat([value, call.value[text, head, later]])
                output[text, head, row] = scores.softmax(dim=-1) @ values
        return output


@torch.no_grad()
@of_every_budget
@pytest.mark.parametrize("kind", QUICK)
def test_a_slot_stands_in_for_the_keys_that_a_head_dropped(
    kind: str, budget: dict[str, Any]
) -> None:
    model, inputs = sharp(kind), text()
    logits, _, report = through(
        model, ObservedAttention, inputs, [PREFIX, PREFIX + 2], mean_slot=True, **budget
    )
    (one,) = report.caches
    assert one.keys.mean() == pytest.approx((round(KEEP * (PREFIX - 4)) + 2 * R) / 3)
    with replace_attention(model, lambda layer: MeanSlot(one.indices[layer], inputs)):
        assert_equal(logits, model(**placed(model, inputs), use_cache=False).logits[:, PREFIX:])
    whole, _, _ = through(model, ObservedAttention, inputs, [PREFIX], mean_slot=True, keep=1.0)
    assert_equal(whole, model(**placed(model, inputs), use_cache=False).logits[:, PREFIX:])


def test_autocast_lowers_no_mean() -> None:
    key, choice = torch.randn(1, 1, 9, 4), KeptKeys(torch.arange(3), torch.zeros(3))
    held = Slots.of(choice, key, key)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = held.with_mean(choice, key, key, None)
    assert_equal(found.key[:, :, -1], key[:, :, 3:].mean(dim=2))


def test_refitted_values_have_no_gradients() -> None:
    model = sharp("llama")
    with compressed_cache(model, METHODS["refitted"], keep=KEEP):
        cache = model(**part(text(), 0, PREFIX), use_cache=True).past_key_values
        output = model(**part(text(), PREFIX, PREFIX + 1), past_key_values=cache).logits
        assert_refused("refitted values have no gradients", output.sum().backward)


def test_what_stops_a_call_is_named(llama: PreTrainedModel) -> None:
    model = sharp("llama")
    with compressed_cache(model, Recent, keep=KEEP), torch.no_grad():
        cache = model(**prompt(), use_cache=True).past_key_values
        assert_refused("positive value", cache.crop, 45)
        assert_refused("25 tokens are to be removed; only the 0 after", cache.crop, -25)
        line = "output_attentions: approximations and compressed caches cannot honour it"
        assert_refused(line, model, **prompt(), use_cache=True, output_attentions=True)
    model.activation_checkpointing_enable()
    model.train()
    cause = r"gradient checkpointing .*: model.eval\(\), or train without it"
    assert_refused(cause, filled, model, Recent, prompt())
    model = sharp("llama")
    model.config._attn_implementation = "paged|eager"
    assert_refused("attention is 'paged|eager'", filled, model, LeaveOneOut, prompt())
    wrapped = torch.nn.Module()
    wrapped.get_base_model = lambda: model
    assert_refused("PreTrainedModel; give its get_base_model()", filled, wrapped, Recent, prompt())
    model = sharp("llama")
    weight = model.model.layers[2].self_attn.v_proj.weight.data
    weight[0, 0] = torch.nan
    assert_refused("value of layer 2 holds NaN", filled, model, Recent, prompt())
    weight.zero_()[0, 0] = 1e38
    cause = "value holds .e.38; sums of 30 such numbers are too large for torch.float32"
    assert_refused(cause, filled, model, LeaveOneOut, text(padding=0))


@pytest.mark.parametrize("budget", [EVEN, {}])
def test_a_cache_of_an_interrupted_choice_is_refused(
    llama: PreTrainedModel, budget: dict[str, Any]
) -> None:
    """Some of its layers are compressed, or none."""
    calls = itertools.count(1)
    method = stopping(lambda _: next(calls) == 3)
    cache, inputs = DynamicCache(config=llama.config), prompt()
    with compressed_cache(llama, method, keep=KEEP, **budget), torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            llama(**inputs, past_key_values=cache)
        line = "tokens that were not compressed; .* and a new one after a call that was int"
        assert_refused(line, llama, inputs["input_ids"][:, :1], past_key_values=cache)
        found = llama(**inputs, past_key_values=DynamicCache(config=llama.config))
    assert found.past_key_values.get_seq_length() == PREFIX


@pytest.mark.parametrize("options", [{}, {"every": 3, "observed": "causal"}])
def test_a_cache_of_an_interrupted_later_call_is_refused(options: dict[str, Any]) -> None:
    """Its first layers have read the call; a copy that was made before it is whole."""
    model = sharp("llama")
    with compressed_cache(model, Recent, keep=KEEP, **options), torch.no_grad():
        cache = model(**prompt(), use_cache=True).past_key_values
        token, whole = prompt()["input_ids"][:, :1], deepcopy(cache)
        stopped = patch.object(model.model.layers[2], "forward", side_effect=KeyboardInterrupt)
        with stopped, pytest.raises(KeyboardInterrupt):
            model(token, past_key_values=cache)
        assert_refused(HALF_READ, model, token, past_key_values=cache)
        assert model(token, past_key_values=whole).logits.isfinite().all()


@pytest.mark.parametrize("pool", [None, "model"])
def test_a_cache_of_an_interrupted_later_choice_is_refused(
    llama: PreTrainedModel, pool: str | None
) -> None:
    """In the last layer, too: then all layers have read the call."""
    calls = itertools.count(1)
    method = stopping(lambda observed: observed.start > PREFIX and next(calls) == 4)
    inputs, token = placed(llama, text()), slice(PREFIX, PREFIX + 1)
    options = {"observed": "causal", "rows": PREFIX, "every": 2, "pool": pool}
    with compressed_cache(llama, method, keep=KEEP, **options), torch.no_grad():
        cache = llama(**part(inputs, 0, PREFIX), use_cache=True).past_key_values
        later = {name: x[:, token] for name, x in inputs.items() if name != "attention_mask"}
        for _ in range(2):
            llama(**later, past_key_values=cache)
        with pytest.raises(KeyboardInterrupt):
            llama(**later, past_key_values=cache)
        assert_refused(HALF_READ, llama, **later, past_key_values=cache)


def test_one_mask_serves_all_texts_of_a_growing_cache(llama: PreTrainedModel) -> None:
    """Of shape (1, 1, N, M), also where texts change places."""
    mask = torch.full((1, 1, PREFIX, PREFIX), torch.finfo(torch.float32).min).triu(1)
    mask[..., :3] = torch.finfo(torch.float32).min
    inputs = prompt() | {"attention_mask": mask}
    with compressed_cache(llama, Recent, keep=KEEP, **EVEN, every=2), torch.no_grad():
        cache = llama(**inputs, use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert all(layer.visible.shape == (3, 1, 1, PREFIX) for layer in cache.layers)


def scored(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Computes the logits of the later tokens in one pass over the whole text."""
    with torch.no_grad():
        return model(**placed(model, inputs)).logits[:, PREFIX:]


@pytest.mark.filterwarnings("default:no token was read over:UserWarning")
def test_a_context_whose_caches_nobody_read_says_that_its_logits_are_exact(
    llama: PreTrainedModel,
) -> None:
    inputs, line = text(padding=0), "no token was read over 1 of {} compressed caches, so all"
    exact = scored(llama, inputs)
    for read_too, count in ((False, 1), (True, 2)):
        with (
            pytest.warns(UserWarning, match=line.format(count)),
            compressed_cache(llama, Recent, keep=KEEP) as report,
        ):
            assert torch.equal(scored(llama, inputs), exact)
            if read_too:
                read(llama, inputs, [PREFIX])
        assert [cache.was_read for cache in report.caches] == [False, True][:count]
        assert str(report).count("no token was read over these keys") == 1
    with (
        pytest.warns(UserWarning, match=line.format(1)),
        compressed_cache(llama, Recent, keep=KEEP),
    ):
        llama.generate(**prompt(), max_new_tokens=1)


@pytest.mark.filterwarnings("error:no token was read over:UserWarning")
@of_every_budget
@pytest.mark.parametrize("padding", [0, 4])
def test_a_prefix_lets_the_rest_of_a_text_read_the_kept_keys(
    llama: PreTrainedModel, budget: dict[str, Any], padding: int
) -> None:
    inputs = text(padding=padding)
    options = {"attention_mask": inputs["attention_mask"]} if padding else {}
    with torch.no_grad():
        whole = logits_after(llama, inputs["input_ids"], PREFIX, **options)
        with compressed_cache(llama, Uneven, keep=KEEP, **budget):
            found = logits_after(llama, inputs["input_ids"], PREFIX, **options)
    assert_equal(whole, scored(llama, inputs))
    assert_equal(found, one_pass(llama, inputs, Uneven(R), **budget))


@pytest.mark.parametrize("prefix", [0, PREFIX + LATER, -1])
def test_a_prefix_leaves_tokens_on_both_sides(llama: PreTrainedModel, prefix: int) -> None:
    line = f"prefix is {prefix}; it must be at least 1 and below the number of tokens, 30"
    assert_refused(line, logits_after, llama, text()["input_ids"], prefix)


@pytest.mark.parametrize("columns", [1, R, R + 1, PREFIX - 1, PREFIX, PREFIX + 2])
def test_a_mask_has_a_column_for_each_token_that_was_seen(
    llama: PreTrainedModel, columns: int
) -> None:
    token = torch.full((3, 1), 7)
    with compressed_cache(llama, Recent, keep=KEEP), torch.no_grad():
        cache = llama(**prompt(), use_cache=True).past_key_values
        mask = torch.ones(3, columns, dtype=torch.long)
        line = f"attention_mask has {columns} columns; the cache has seen 24 tokens, kept or not"
        assert_refused(
            line, llama, token, past_key_values=cache, attention_mask=mask, error=ValueError
        )
        right = torch.ones(3, PREFIX + 1, dtype=torch.long)
        assert_refused(
            "attention_mask is on meta; the tokens are on cpu", llama, token,
            past_key_values=cache, attention_mask=right.to("meta"),
        )  # fmt: skip
        llama(token, past_key_values=cache, attention_mask=right)


def test_a_prompt_that_the_cache_has_seen_is_not_read_again(llama: PreTrainedModel) -> None:
    inputs = {name: x[1:] for name, x in prompt().items()}
    with compressed_cache(llama, Recent, keep=KEEP), torch.no_grad():
        cache = llama(**inputs, use_cache=True).past_key_values
        line = r"seen 24 tokens, kept or not; generate got 24 with an attention_mask of 24 columns"
        assert_refused(line, llama.generate, **inputs, **NEW, past_key_values=cache)
        last = {"input_ids": inputs["input_ids"][:, -1:], "past_key_values": cache}
        mask = torch.ones(2, R + 1, dtype=torch.long)
        line = f"generate got 1 with an attention_mask of {R + 1} columns: .*, 25 columns"
        assert_refused(line, llama.generate, **last, **NEW, attention_mask=mask)


def test_layers_with_windows_stay_as_they_are_and_are_named() -> None:
    model = sharp("cohere2")
    cache, report = filled(model, Uneven, prompt(), pool="model")
    (one,) = report.caches
    windowed = [x for x in cache.layers if isinstance(x, DynamicSlidingWindowLayer)]
    assert one.bytes_of_others == sum(x.keys.nbytes + x.values.nbytes for x in windowed) > 0
    assert one.layers == [n for n, x in enumerate(cache.layers) if isinstance(x, KeptLayer)]
    assert len(one.layers) + len(windowed) == len(cache.layers)
    fewest, most = (f"{x:.0f}" for x in (one.keys.min(), one.keys.max()))
    assert f"heads keep {fewest} to {most} keys" in str(one)
    assert f"{len(one.layers)} layers are compressed; 0.0 MiB in layers with windows" in str(one)
    shares = [round(KEEP * tokens) for tokens in (PREFIX - 4, PREFIX, PREFIX)]
    assert one.keys.mean().item() == pytest.approx(sum(shares) / 3)
    found, _, _ = through(model, LeaveOneOut, text(), [PREFIX, PREFIX + 2], keep=1.0)
    assert_equal(found, read(model, text(), [PREFIX])[0])
