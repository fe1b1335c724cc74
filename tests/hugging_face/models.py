"""Tiny Hugging Face models whose attention is sharp, with texts to read and their logits."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from docs.architectures import tiny
from value_aware_attention.approximations import Exact
from value_aware_attention.hugging_face import replace_attention

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


class Recorder(nn.Module):
    """Computes exact attention and keeps the arguments of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        self.calls.append({"query": query, "key": key, "value": value, **options})
        return Exact()(query, key, value, **options)


def batch(padding: str = "right", rows: int = 3, length: int = 12) -> dict[str, Tensor]:
    """Draws texts of different lengths, padded on one side; `padding` "none" pads none of them."""
    tokens = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row in range(1, rows):
        hidden = slice(0, 3 * row) if padding == "left" else slice(length - 3 * row, None)
        mask[row, hidden] = padding == "none"
    return {"input_ids": tokens, "attention_mask": mask}


@torch.no_grad()
def logits(
    model: PreTrainedModel, inputs: dict[str, Tensor], method: Any = None, **replaced: Any
) -> Tensor:
    """Computes the logits of all tokens but padding; a method given replaces the attention."""
    whole = nullcontext() if method is None else replace_attention(model, method, **replaced)
    with whole:
        return model(**inputs).logits[inputs["attention_mask"].bool()]


def sharp(kind: str) -> PreTrainedModel:
    """Builds a tiny model of this type, on eager attention."""
    return tiny(kind)
