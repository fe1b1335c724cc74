"""Caches of others, and shared readings, are compared with one pass over the keys they keep."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tests.decoding.test_compressed_cache import (
    KEEP,
    LATER,
    PREFIX,
    R,
    part,
    placed,
    text,
)
from tests.hugging_face.models import sharp
from tests.refusals import assert_refused
from value_aware_attention.caches import (
    AfterPrefix,
    CacheMethod,
    KeptKeys,
    LeaveOneOut,
    ObservedAttention,
    Recent,
    ValueAware,
    VaSE,
)
from value_aware_attention.decoding.reading import SharedReading
from value_aware_attention.hugging_face import check_cache, compressed_cache, replace_attention
from value_aware_attention.hugging_face.recording import recording


class Evicting(DynamicLayer):
    """Holds some keys of a prefix, as the caches of other projects do."""

    def __init__(self, layer: DynamicLayer, kept: KeptKeys, fault: str) -> None:
        super().__init__()
        at = kept.indices[..., None]
        self.lazy_initialization(layer.keys, layer.values)
        self.keys = layer.keys.take_along_dim(at, dim=-2)
        self.values = layer.values.take_along_dim(at, dim=-2)
        self.seen, self.fault = layer.keys.shape[-2], fault

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        self.seen += 1
        found = super().update(keys, values)
        if self.fault == "drops a later token" and self.seen == PREFIX + 3:
            self.keys, self.values = self.keys[..., :-1, :], self.values[..., :-1, :]
        return found

    def get_seq_length(self) -> int:
        return self.keys.shape[-2] if self.fault == "shifts positions" else self.seen

    def get_mask_sizes(self, queries: int) -> tuple[int, int]:
        return self.keys.shape[-2] + queries, self.get_seq_length() - self.keys.shape[-2]


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    model = sharp("llama")
    model.set_attn_implementation("sdpa")
    return model


def chosen(model: PreTrainedModel, tokens: Tensor, method: object) -> list[KeptKeys]:
    after = AfterPrefix(method, prefix=PREFIX, observed="continued", rows=128)
    with recording(model, shares_keys=True) as calls, torch.no_grad():
        model(tokens, use_cache=False)
    return after.choose([call.arguments() | {"layer": call.layer} for call in calls])


def evicted(model: PreTrainedModel, kept: list[KeptKeys], fault: str) -> DynamicCache:
    with torch.no_grad():
        cache = model(text()["input_ids"][:, :PREFIX], use_cache=True).past_key_values
    cache.layers = [Evicting(*pair, fault) for pair in zip(cache.layers, kept, strict=True)]
    return cache


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("none", None),
        ("shifts positions", PREFIX),
        ("lacks a bias", PREFIX),
        ("drops a later token", PREFIX + 3),
    ],
)
def test_a_fault_of_another_cache_is_found_where_it_begins(
    llama: PreTrainedModel, fault: str, first: int | None
) -> None:
    tokens = text()["input_ids"]
    kept = chosen(llama, tokens, ObservedAttention(R))
    claimed = kept
    if fault == "lacks a bias":
        weight = [one.log_weight.clone() for one in kept]
        weight[2][1, 0, 0] = torch.tensor(2.0).log()
        claimed = [replace(one, log_weight=w) for one, w in zip(kept, weight, strict=True)]
    found = check_cache(llama, tokens, claimed, evicted(llama, kept, fault), prefix=PREFIX)
    assert found.first == first and found.is_equal == (first is None)
    assert found.differences.shape == (3, LATER)
    if first is None:
        assert str(found).startswith(f"equal over {LATER} tokens: logits differ by ")
        assert found.differences.max() < 1e-5
    elif fault == "lacks a bias":
        assert "departs at position 24, 0 tokens after the prefix, in texts [1]" in str(found)
    elif fault == "drops a later token":
        assert "3 tokens after the prefix, in texts [0, 1, 2]" in str(found)
        assert "; those before by " in str(found)


@pytest.mark.parametrize(("refit", "pool"), [(False, None), (True, "model")])
def test_a_function_is_checked_as_a_cache_is(
    llama: PreTrainedModel, refit: bool, pool: str | None
) -> None:
    """Here this library's own, on texts with padding, in heads of one size and of several."""
    inputs = placed(llama, text())
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    with recording(llama, shares_keys=True) as calls, torch.no_grad():
        llama(tokens, attention_mask=mask, use_cache=False)
    short, long = (
        AfterPrefix(
            ValueAware(r, refit=refit), prefix=PREFIX, observed="continued", pool=pool
        ).choose([call.arguments() | {"layer": call.layer} for call in calls])
        for r in (round(KEEP * (PREFIX - 4)), R)
    )
    padded = torch.tensor([True, False, False])
    kept = [own.where(padded, other) for own, other in zip(short, long, strict=True)]
    context = compressed_cache(llama, partial(ValueAware, refit=refit), keep=KEEP, pool=pool)
    with context, torch.no_grad():
        cache = llama(**part(inputs, 0, PREFIX), use_cache=True).past_key_values

        def read(token: Tensor, at: int) -> Tensor:
            return llama(**part(inputs, at, at + 1), past_key_values=cache).logits

        logits = [read(tokens[:, at : at + 1], at) for at in range(PREFIX, PREFIX + LATER)]
    replay = check_cache(
        llama, tokens, kept, lambda _, at: logits[at - PREFIX], prefix=PREFIX, attention_mask=mask
    )
    assert replay.is_equal
    wrong = check_cache(
        llama, tokens, kept, lambda _, at: logits[at - PREFIX] * torch.nan, prefix=PREFIX
    )
    assert wrong.first == PREFIX


def test_what_cannot_be_checked_is_refused(llama: PreTrainedModel) -> None:
    tokens = text()["input_ids"]
    kept = chosen(llama, tokens, ObservedAttention(R))
    cache = evicted(llama, kept, "none")
    shape = r"the function returned \(3, 99\); it must return logits \(3, 1, 99\)"
    for line, claimed, read, options in (
        (
            r"prefix is 30 and input_ids has the shape \(3, 30\); it must be",
            kept,
            cache,
            {"prefix": 30},
        ),
        ("kept has 1 layers; the model has 4", kept[:1], cache, {}),
        ("texts have padding", kept, cache, {"attention_mask": text()["attention_mask"]}),
        (shape, kept, lambda *_: torch.zeros(3, 99), {}),
    ):
        assert_refused(
            line, check_cache, llama, tokens, claimed, read, **{"prefix": PREFIX} | options
        )
    wide = partial(SimpleNamespace, **vars(kept[1]))
    wrong = [
        (replace(kept[1], indices=kept[1].indices - 30), "has indices -30 to -"),
        (replace(kept[1], indices=kept[1].indices + PREFIX), "they must be 0 to 23"),
        (replace(kept[1], log_weight=kept[1].log_weight * torch.nan), "must be numbers"),
        (replace(kept[1], log_weight=kept[1].log_weight + torch.inf), "below infinity"),
        (wide(value=torch.zeros(3, 2, 1, 8)), "has values .* must be finite and"),
        (wide(value=torch.full((3, 2, R, 8), torch.nan)), "has values .* must be finite and"),
        (wide(indices=kept[1].indices.float()), "torch.float32 indices"),
        (KeptKeys(kept[1].indices[:2], kept[1].log_weight[:2]), r"both must be \(3, 2, slots\)"),
        (KeptKeys(*(x[..., :0] for x in (kept[1].indices, kept[1].log_weight))), "one slot"),
        (kept[1].indices, "must be a caches.KeptKeys"),
    ]
    for one, message in wrong:
        claimed = [kept[0], one, *kept[2:]]
        line = rf"kept\[1\] .*{message}"
        assert_refused(line, check_cache, llama, tokens, claimed, cache, prefix=PREFIX)


def test_a_wrong_cache_of_a_model_with_small_logits_departs() -> None:
    model = sharp("llama")
    with torch.no_grad():
        model.lm_head.weight *= 1e-6
    tokens = text()["input_ids"]
    kept = chosen(model, tokens, ObservedAttention(R))
    assert check_cache(model, tokens, kept, evicted(model, kept, "none"), prefix=PREFIX).is_equal
    fewer = [replace(one, log_weight=one.log_weight.clone()) for one in kept]
    for one in fewer:
        one.log_weight[..., 0] = -torch.inf
    cache = evicted(model, kept, "none")
    assert not check_cache(model, tokens, fewer, cache, prefix=PREFIX).is_equal


def test_heads_of_their_own_and_absolute_positions_are_checked() -> None:
    """Choices are (B, H, R) though a model's heads are not grouped."""
    model = sharp("gpt2")
    inputs = placed(model, text())
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    config = model.config
    at = torch.arange(4, PREFIX).expand(3, config.num_attention_heads, -1)
    kept = [KeptKeys(at, torch.zeros(at.shape))] * config.num_hidden_layers
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits  # only padding and 4 keys are dropped
    found = check_cache(
        model, tokens, kept, lambda _, n: logits[:, n : n + 1], prefix=PREFIX, attention_mask=mask
    )
    assert found.differences[0].max() < 1e-5 < found.differences[1:].max()


TOKENS = torch.randint(3, 40, (2, PREFIX + LATER), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pool", [None, "layer", "model"])
@pytest.mark.parametrize(
    ("kind", "method"), [("gpt2", ObservedAttention), ("qwen2", LeaveOneOut), ("llama", ValueAware)]
)
def test_continuations_equal_one_pass(kind: str, pool: str | None, method: type) -> None:
    model = sharp(kind)
    after = AfterPrefix(method(8), prefix=PREFIX, observed="continued", pool=pool)
    reading = SharedReading(model, TOKENS, PREFIX)
    with torch.no_grad():
        exact = model(input_ids=TOKENS, use_cache=False).logits[:, PREFIX:]
        with replace_attention(model, after):
            expected = model(input_ids=TOKENS, use_cache=False).logits[:, PREFIX:]
    torch.testing.assert_close(reading.logits, exact, rtol=1e-4, atol=1e-4)
    found = reading.continued(reading.choose(after))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [LeaveOneOut, ValueAware, partial(VaSE, seed=0)])
def test_one_ranking_serves_every_number_of_keys(method: Callable[[int], CacheMethod]) -> None:
    reading = SharedReading(sharp("llama"), TOKENS, PREFIX)
    for r, floor in [(16, 0), (8, 7), (8, 0)]:
        after = AfterPrefix(
            method(r), prefix=PREFIX, observed="continued", pool="model", floor=floor
        )
        alone = SharedReading(sharp("llama"), TOKENS, PREFIX).choose(after)
        for shared, expected in zip(reading.choose(after), alone, strict=True):
            assert torch.equal(shared.indices, expected.indices)
            assert torch.equal(shared.log_weight, expected.log_weight)


def test_a_compressed_cache_beside_layers_with_windows_is_the_same() -> None:
    model = sharp_gemma()
    after = AfterPrefix(LeaveOneOut(8), prefix=PREFIX, observed="continued", pool="model")
    reading = SharedReading(model, TOKENS, PREFIX)
    with torch.no_grad(), compressed_cache(model, LeaveOneOut, keep=8 / PREFIX):
        cache = model(input_ids=TOKENS[:, :PREFIX], use_cache=True).past_key_values
        logits = model(input_ids=TOKENS[:, PREFIX:], past_key_values=cache, use_cache=True).logits
    expected = reading.continued(reading.choose(after))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def sharp_gemma() -> PreTrainedModel:
    """Builds a model whose middle layer attends to the whole past, and its others to 6 tokens."""
    config = Gemma3TextConfig(
        vocab_size=40, hidden_size=32, intermediate_size=16, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=6, query_pre_attn_scalar=1,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


def test_layers_with_windows_stay_exact() -> None:
    reading = SharedReading(sharp_gemma(), TOKENS, PREFIX)
    assert [call.layer.number for call in reading.calls] == [1]
    everything = reading.choose(AfterPrefix(Recent(PREFIX), prefix=PREFIX))
    torch.testing.assert_close(reading.continued(everything), reading.logits, rtol=1e-4, atol=1e-4)


def test_a_model_of_windows_alone_is_refused() -> None:
    config = sharp("mistral").config
    config.sliding_window = 6
    model = type(sharp("mistral"))(config).eval()
    assert_refused("every layer attends within a window", SharedReading, model, TOKENS, PREFIX)


@pytest.mark.parametrize("prefix", [0, PREFIX + LATER])
def test_a_prompt_without_a_continuation_is_refused(prefix: int) -> None:
    line = f"prefix is {prefix}; the texts have 30 tokens"
    assert_refused(line, SharedReading, sharp("llama"), TOKENS, prefix)


@torch.no_grad()
def test_free_decoding_over_all_keys_is_greedy() -> None:
    model, tokens = sharp("llama"), TOKENS[:, : PREFIX + 2]
    reading = SharedReading(model, TOKENS, PREFIX)
    choices = reading.choose(AfterPrefix(Recent(PREFIX), prefix=PREFIX))
    decoded, seconds = reading.decoded(choices, PREFIX + 2, 5)
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert decoded.equal(tokens[:, PREFIX + 2 :]) and seconds > 0
