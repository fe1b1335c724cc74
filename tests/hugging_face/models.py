"""Tiny Hugging Face models whose attention is sharp, and what is asked of them."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from docs.architectures import tiny
from value_aware_attention.approximations import Exact

ENCODERS = (
    "albert",
    "bert",
    "distilbert",
    "electra",
    "modernbert",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
)
DECODERS = ("gpt2", "gpt_neox", "llama", "mistral", "modernbert-decoder", "opt", "phi", "qwen2")
PADDINGS = ("none", "right", "left")


class Unmasked(nn.Module):
    """Exact attention that forgets what is hidden: what a lost mask looks like."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        return Exact()(query, key, value, kernel=options["kernel"])


class Recorder(nn.Module):
    """Exact attention that keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        self.calls.append({"query": query, "key": key, "value": value, **options})
        return Exact()(query, key, value, **options)


def batch(padding: str = "right", rows: int = 3, length: int = 12) -> dict[str, Tensor]:
    """Texts of different lengths, padded on one side; none are padded where `padding` is none."""
    tokens = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row in range(1, rows):
        hidden = slice(0, 3 * row) if padding == "left" else slice(length - 3 * row, None)
        mask[row, hidden] = padding == "none"
    return {"input_ids": tokens, "attention_mask": mask}


@torch.no_grad()
def logits(model: PreTrainedModel, inputs: dict[str, Tensor], **options: object) -> Tensor:
    """Logits of the tokens that are not padding."""
    return model(**inputs, **options).logits[inputs["attention_mask"].bool()]


def sharp(kind: str) -> PreTrainedModel:
    """A tiny model of this type, on eager attention."""
    return tiny(kind)
