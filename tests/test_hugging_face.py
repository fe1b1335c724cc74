"""The adapter: exact equals eager, padded or not; lost masks show; everything restores."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2Model,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from value_aware_attention import approximations
from value_aware_attention.hugging_face import attention_layers, replace_attention

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
MODELS = {
    "roberta": lambda: RobertaForMaskedLM(
        RobertaConfig(**SMALL, intermediate_size=32, max_position_embeddings=40)
    ),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL, intermediate_size=32)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=40)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=32)
    ),
}


def sharpened(name: str) -> PreTrainedModel:
    """Random weights make attention uniform and hide a lost mask; larger ones show it."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter, weight in model.named_parameters():
        if weight.ndim > 1 and "head" not in parameter:
            weight.data *= 10
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return sharpened(request.param)


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, 8:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@torch.no_grad()
def logits(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).logits[batch["attention_mask"].bool()]


@pytest.mark.parametrize("padded", [False, True])
def test_exact_equals_eager(model: PreTrainedModel, batch: dict, padded: bool) -> None:
    if not padded:
        batch = {"input_ids": batch["input_ids"], "attention_mask": torch.ones(2, 12).long()}
    expected = logits(model, batch)
    with replace_attention(model, approximations.Exact()):
        torch.testing.assert_close(logits(model, batch), expected, atol=1e-4, rtol=1e-4)
    with replace_attention(model, approximations.OptimalValueOblivious(1)):
        assert (logits(model, batch) - expected).abs().max() > 0.1


def test_a_dropped_mask_would_show(model: PreTrainedModel, batch: dict) -> None:
    class Unmasked(nn.Module):
        def forward(self, query, key, value, *, kernel, attn_mask, is_causal):
            return approximations.Exact()(query, key, value, kernel=kernel)

    expected = logits(model, batch)
    with replace_attention(model, Unmasked()):
        assert (logits(model, batch) - expected).abs().max() > 1e-2


def test_everything_is_restored_after_an_exception_and_contexts_nest(
    model: PreTrainedModel, batch: dict
) -> None:
    from transformers import AttentionInterface

    expected, names = logits(model, batch), set(AttentionInterface._global_mapping)
    one_key = approximations.OptimalValueOblivious(1)
    with pytest.raises(RuntimeError, match="on purpose"), replace_attention(model, one_key):
        outer = logits(model, batch)
        with replace_attention(model, approximations.Exact()):
            torch.testing.assert_close(logits(model, batch), expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(logits(model, batch), outer)
        raise RuntimeError("on purpose")
    assert torch.equal(logits(model, batch), expected)
    assert set(AttentionInterface._global_mapping) == names


def test_layers_and_heads_can_be_chosen(model: PreTrainedModel, batch: dict) -> None:
    expected = logits(model, batch)
    method = approximations.OptimalValueOblivious(1)
    for options in ({"layers": []}, {"heads": []}):
        with replace_attention(model, method, **options):
            torch.testing.assert_close(logits(model, batch), expected, atol=1e-4, rtol=1e-4)
    seen: list[int] = []
    with replace_attention(model, lambda layer: seen.append(layer) or method, layers=[1]):
        assert (logits(model, batch) - expected).abs().max() > 1e-3
    assert seen == [1]
    with (
        pytest.raises(ValueError, match="layers 0 to 1"),
        replace_attention(model, method, layers=[5]),
    ):
        pass


def test_what_cannot_be_honoured_is_refused(batch: dict) -> None:
    deberta = DebertaV2Model(DebertaV2Config(**SMALL, intermediate_size=32))
    with pytest.raises(ValueError, match="DebertaV2Model has no attention"):
        attention_layers(deberta)
    model = sharpened("gpt2").train()
    model.config.attn_pdrop = 0.5
    exact = approximations.Exact()
    with replace_attention(model, exact), pytest.raises(ValueError, match=r"model\.eval"):
        model(**batch)
