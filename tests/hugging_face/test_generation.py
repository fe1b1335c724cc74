"""Generation with a cache equals generation that reads the whole text for every token."""

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.hugging_face.models import DECODERS, Recorder, batch, logits, sharp
from value_aware_attention.approximations import Exact, OptimalValueOblivious, SlidingWindow
from value_aware_attention.hugging_face import replace_attention

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = {
    "exact": Exact(),
    "one key": OptimalValueOblivious(1),
    "window": SlidingWindow(3),
}
NEW = 5


def generated(model: PreTrainedModel, inputs: dict, **options: object) -> torch.Tensor:
    """Generates tokens greedily and returns their scores."""
    config = GenerationConfig(
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return torch.stack(model.generate(**inputs, generation_config=config, **options).logits)


@pytest.fixture(params=DECODERS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return sharp(request.param)


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_changes_nothing(model: PreTrainedModel, method: str) -> None:
    inputs = batch("left", length=8)
    with replace_attention(model, METHODS[method]):
        whole = generated(model, inputs, use_cache=False)
        cached = generated(model, inputs, use_cache=True)
    torch.testing.assert_close(cached, whole, atol=1e-3, rtol=1e-3)
    if method == "exact":
        torch.testing.assert_close(whole, generated(model, inputs), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_longer_than_the_text_changes_nothing(method: str) -> None:
    model, inputs = sharp("llama"), batch("left", length=8)
    with replace_attention(model, METHODS[method]):
        whole = generated(model, inputs, use_cache=False)
        static = generated(model, inputs, cache_implementation="static")
    torch.testing.assert_close(static, whole, atol=1e-3, rtol=1e-3)


def test_several_queries_after_a_past_stay_causal() -> None:
    model, inputs = sharp("gpt2"), batch("none")
    expected = logits(model, inputs).unflatten(0, (3, 12))[:, 8:]
    tokens, recorder = inputs["input_ids"], Recorder()
    with torch.no_grad(), replace_attention(model, recorder):
        past = model(input_ids=tokens[:, :8], use_cache=True).past_key_values
        found = model(input_ids=tokens[:, 8:], past_key_values=past).logits
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert recorder.calls[-1]["query"].shape[2] == 4 and recorder.calls[-1]["key"].shape[2] == 12
