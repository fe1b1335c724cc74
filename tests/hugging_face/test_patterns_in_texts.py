"""In a causal model a pattern keeps the keys of one pass over each text alone, in every call."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tests.approximations.test_patterns import expected_past
from tests.refusals import assert_refused
from value_aware_attention.approximations import (
    BigBird,
    DilatedWindow,
    Fixed,
    Longformer,
    RandomKeys,
    SlidingWindow,
    Strided,
)
from value_aware_attention.approximations.fixed_pattern import FixedPattern
from value_aware_attention.hugging_face import replace_attention

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, WINDOW = 24, 9
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
LLAMA = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}
SHARP: dict[str, Any] = {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None}
METHODS = {
    "window": SlidingWindow(5),
    "window and sinks": SlidingWindow(6, 2),
    "dilated": DilatedWindow(3, 3),
    "random": RandomKeys(4, 1),
    "strided": Strided(5),
    "fixed": Fixed(5, 2),
    "longformer": Longformer(4, 2, (0,)),
    "big bird": BigBird(3, 2, (0,), 1),
}


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**LLAMA, **SHARP, sliding_window=WINDOW))


def gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **LLAMA, **SHARP, head_dim=8, sliding_window=WINDOW, layer_types=layers
    )
    return Gemma3ForCausalLM(config)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(**SIZES, **SHARP, n_embd=32, n_positions=64))


@pytest.fixture(params=(mistral, gemma3, gpt2), ids=lambda build: build.__name__)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return request.param().eval()


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> FixedPattern:
    return METHODS[request.param]


@pytest.fixture
def alone(model: PreTrainedModel, method: FixedPattern) -> Iterator[Callable[[Tensor], Tensor]]:
    """Reads a text alone in one pass: a softmax in fp64 over listed keys that the model shows."""

    def reference(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **x: Any):
        queries = query.shape[2]
        keys, values = (
            x.repeat_interleave(query.shape[1] // x.shape[1], dim=1).double() for x in (key, value)
        )
        listed = torch.zeros(queries, queries, dtype=torch.bool)
        for place in range(queries):
            listed[place, [j for j in expected_past(method, place, queries) if j <= place]] = True
        scores = query.double() @ keys.mT * (x.get("scaling") or query.shape[-1] ** -0.5)
        weights = scores.masked_fill(~(listed & (mask == 0)), -torch.inf).softmax(-1)
        return (weights.nan_to_num(0.0) @ values).float().transpose(1, 2).contiguous(), None

    def read(text: Tensor) -> Tensor:
        model.set_attn_implementation("reference")
        return model(text[None], use_cache=False).logits[0]

    AttentionInterface.register("reference", reference)
    AttentionMaskInterface.register("reference", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    with torch.no_grad():
        yield read
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("reference")


def texts(rows: int = 2) -> Tensor:
    return torch.randint(5, 99, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


CUTS = {
    "one pass": [LENGTH],
    "a second turn": [14, 10],
    "parts": [3, 9, 1, 1, 10],
    "one at a time": [1] * LENGTH,
}
PASTS = {
    "of the model": lambda config: DynamicCache(config=config),  # drops what windows hide
    "growing": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=LENGTH + 5),
}


@pytest.mark.parametrize("cut", CUTS)
def test_calls_are_one_pass(
    model: PreTrainedModel, method: FixedPattern, alone: Any, cut: str
) -> None:
    """Every cut is tried with every cache, and every method with every cut."""
    tokens, outputs = texts(), []
    past = list(PASTS.values())[(list(METHODS.values()).index(method) + len(CUTS[cut])) % 3]
    cache = past(model.config)
    with replace_attention(model, method):
        for part in tokens.split(CUTS[cut], dim=1):
            outputs.append(model(part, past_key_values=cache).logits)
    for row, text in zip(torch.cat(outputs, dim=1), tokens, strict=True):
        torch.testing.assert_close(row, alone(text), **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_text_is_as_alone(
    model: PreTrainedModel, method: FixedPattern, alone: Any, side: str
) -> None:
    tokens, mask, outputs = texts(), torch.ones(2, LENGTH, dtype=torch.long), []
    mask[1, slice(0, 10) if side == "left" else slice(-10, None)] = 0
    places, past, end = (mask.cumsum(dim=-1) - 1).clamp_min(0), DynamicCache(), 0
    with replace_attention(model, method):
        for part in (18, 5, 1):  # padding on the right begins in the first call
            here, end = slice(end, end + part), end + part
            options = {"attention_mask": mask[:, :end], "position_ids": places[:, here]}
            outputs.append(model(tokens[:, here], past_key_values=past, **options).logits)
    output = torch.cat(outputs, dim=1)
    for row in range(2):
        is_token = mask[row].bool()
        torch.testing.assert_close(output[row, is_token], alone(tokens[row, is_token]), **CLOSE)


@pytest.mark.parametrize("kind", ["positions", "mask"])
def test_packed_texts_are_as_alone(
    model: PreTrainedModel, method: FixedPattern, alone: Any, kind: str
) -> None:
    """By positions that start again, or by a mask of blocks, in which no window of a layer is."""
    lengths, tokens = [11, 4, 9], texts(1)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    options = {}
    if kind == "mask":
        if hasattr(model.config, "sliding_window"):
            model.config.sliding_window = LENGTH
        text = (places == 0).cumsum(dim=-1)
        options["attention_mask"] = (text[:, None, :, None] == text[:, None, None]).tril()
    with replace_attention(model, method):
        output = model(tokens, position_ids=places, use_cache=False, **options).logits
    parts = zip(output[0].split(lengths), tokens[0].split(lengths), strict=True)
    for got, text in parts:
        torch.testing.assert_close(got, alone(text), **CLOSE)


def test_generation_in_chunks_is_one_pass(
    model: PreTrainedModel, method: FixedPattern, alone: Any
) -> None:
    tokens, mask = texts(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :10] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    with replace_attention(model, method):
        generated = model.generate(
            tokens,
            attention_mask=mask,
            prefill_chunk_size=5,
            return_dict_in_generate=True,
            **options,
        )
    for row in range(2):
        text = generated.sequences[row, 10 * row : -1]
        logits = torch.stack(generated.logits, dim=1)[row]
        torch.testing.assert_close(logits, alone(text)[-4:], **CLOSE)


def test_masks_that_do_not_tell_positions_are_refused() -> None:
    model, tokens = gpt2().eval(), texts(1)
    holes = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    holes[..., 10] = False
    cache = DynamicCache()
    with torch.no_grad(), replace_attention(model, SlidingWindow(4, 2)):
        line = "the attention mask does not tell .* by which SlidingWindow chooses keys"
        assert_refused(line, model, tokens, attention_mask=holes)
        model(tokens, past_key_values=cache)
        part = torch.ones(1, 1, 1, LENGTH + 1, dtype=torch.bool)
        part[..., :3] = False
        assert_refused(line, model, tokens[:, :1], past_key_values=cache, attention_mask=part)
