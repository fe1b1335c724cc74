"""One reading serves every cache: its continuations are those of a pass of `AfterPrefix`."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from tests.hugging_face.models import sharp
from value_aware_attention.caches import (
    AfterPrefix,
    CacheMethod,
    LeaveOneOut,
    ObservedAttention,
    Recent,
    ValueAware,
    VaSE,
)
from value_aware_attention.decoding.reading import SharedReading
from value_aware_attention.hugging_face import compressed_cache, replace_attention

PREFIX, LATER = 24, 6
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
    with pytest.raises(ValueError, match="every layer attends within a window"):
        SharedReading(type(sharp("mistral"))(config).eval(), TOKENS, PREFIX)


@pytest.mark.parametrize("prefix", [0, PREFIX + LATER])
def test_a_prompt_without_a_continuation_is_refused(prefix: int) -> None:
    with pytest.raises(ValueError, match=f"prefix is {prefix}; the texts have 30 tokens"):
        SharedReading(sharp("llama"), TOKENS, prefix)


@torch.no_grad()
def test_free_decoding_over_all_keys_is_greedy() -> None:
    model, tokens = sharp("llama"), TOKENS[:, : PREFIX + 2]
    reading = SharedReading(model, TOKENS, PREFIX)
    choices = reading.choose(AfterPrefix(Recent(PREFIX), prefix=PREFIX))
    decoded, seconds = reading.decoded(choices, PREFIX + 2, 5)
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert decoded.equal(tokens[:, PREFIX + 2 :]) and seconds > 0
