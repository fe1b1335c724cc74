"""Makes tiny models, a tokenizer and a text for the tests of the probe."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from value_aware_attention import kernels
from value_aware_attention.models import CausalLanguageModel, build_roberta

SPECIALS = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
WORDS = [f"w{number}" for number in range(45)]
VOCABULARY = len(SPECIALS) + len(WORDS)
LENGTH = 16
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HIDDEN = {**SMALL, "intermediate_size": 16, "vocab_size": VOCABULARY}


def words(count: int) -> str:
    return " ".join(random.Random(0).choices(WORDS, k=count))


def tokenizer(*, closes: bool = True) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words; `closes` puts `<s>` and `</s>` around a text."""
    vocabulary = {word: i for i, word in enumerate([*SPECIALS.values(), *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if closes:
        ends = [("<s>", 0), ("</s>", 2)]
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=ends
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIALS)


def sharpened(model: nn.Module) -> nn.Module:
    """Enlarges random weights, so that attention is not uniform and methods differ."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "head" not in name:
            weight.data *= 10
    return model.eval()


def roberta() -> nn.Module:
    config = RobertaConfig(**HIDDEN, max_position_embeddings=LENGTH + 2)
    return sharpened(RobertaForMaskedLM(config))


def gpt2() -> nn.Module:
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=32)
    return sharpened(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    """Makes a Llama whose four query heads share two key/value heads."""
    config = LlamaConfig(**HIDDEN | {"num_attention_heads": 4, "num_key_value_heads": 2})
    return sharpened(LlamaForCausalLM(config))


def bert() -> nn.Module:
    return sharpened(BertModel(BertConfig(**HIDDEN, max_position_embeddings=LENGTH)))


def our_causal() -> nn.Module:
    return CausalLanguageModel(
        vocabulary_size=VOCABULARY, layers=2, width=16, heads=2, feedforward=16,
        kernel=kernels.Elu(), dropout=0.0,
    ).eval()  # fmt: skip


def our_masked() -> nn.Module:
    return build_roberta(
        vocabulary_size=VOCABULARY, layers=2, width=16, heads=2, feedforward=16, length=LENGTH,
        block=8, dropout=0.0,
    ).eval()  # fmt: skip


MODELS = {
    "roberta": roberta,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "our_causal": our_causal,
    "our_masked": our_masked,
}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()
