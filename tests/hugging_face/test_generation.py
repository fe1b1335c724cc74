"""Generation with a cache equals generation that reads the whole text for every token."""

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.hugging_face.models import DECODERS, batch, sharp
from value_aware_attention.approximations import Exact, OptimalValueOblivious, SlidingWindow
from value_aware_attention.hugging_face import replace_attention

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = {
    "exact": Exact(),
    "one key": OptimalValueOblivious(1),
    "window": SlidingWindow(3),
}
NEW = 4


def generated(model: PreTrainedModel, inputs: dict, **options: object) -> torch.Tensor:
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
