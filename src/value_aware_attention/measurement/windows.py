"""The end metric that fits a trained model, and its task on windows of a text."""

from contextlib import suppress

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from value_aware_attention.hugging_face import attention_layers
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.masking import mask_tokens
from value_aware_attention.measurement.tasks import Task, Text
from value_aware_attention.measurement.text_windows import TextWindows
from value_aware_attention.models.checkpoints import auto_class

__all__ = ["metric_of", "positions", "vocabulary_size", "windows_task"]

MASKED_FRACTION = 0.15


def windows_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: TextWindows,
    *,
    seed: int = 0,
    kernel: Kernel | None = None,
) -> Task:
    """Measures a model on windows of text, each a part of its own, by `metric_of` the model.

    Of a masked language model 15% of the ordinary tokens of each window are hidden; which ones
    depends on `seed` and the window's place in the text alone. A causal one is scored on every
    token of a window after its first, an encoder on every position. `kernel` None is the model's
    own. Raises ValueError for a masked language model whose tokenizer has no mask token.
    """
    metric, rows = metric_of(model), windows.tokens.split(1)
    if metric == "perplexity":
        texts = [Text.of_tokens(row) for row in rows]
    elif metric == "cosine":
        texts = [Text(row, row) for row in rows]
    else:
        if tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token; a masked language model needs one")
        size = min(len(tokenizer), vocabulary_size(model))
        pairs = zip(rows, windows.places, strict=True)
        texts = [Text(*_masked(row, place, tokenizer, size, seed)) for row, place in pairs]
    return Task(model, texts, metric, kernel=kernel)


def _masked(
    tokens: Tensor, place: int, tokenizer: PreTrainedTokenizerBase, size: int, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    own_seed = torch.randint(2**62, (place + 1,), generator=generator)[place]
    inputs, labels = mask_tokens(
        tokens[0],
        generator=torch.Generator().manual_seed(int(own_seed)),
        mask_token=tokenizer.mask_token_id,
        special_tokens=tokenizer.all_special_ids,
        vocabulary_size=size,
        fraction=MASKED_FRACTION,
    )
    return inputs[None], labels[None]


def metric_of(model: PreTrainedModel) -> str:
    """Finds the end metric of a model by the head of its class, as transformers lists them.

    "error" of a masked language model, "perplexity" of a causal one, else "cosine". Raises
    ValueError for an encoder with a decoder, and for a model whose attention cannot be replaced.
    """
    attention_layers(model)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder; give a masked or a causal "
            f"language model, or an encoder alone"
        )
    metrics = {AutoModelForMaskedLM: "error", AutoModelForCausalLM: "perplexity"}
    return metrics.get(auto_class(model.config, type(model).__name__), "cosine")


def vocabulary_size(model: PreTrainedModel) -> int:
    """Counts the tokens that a model knows. Raises ValueError for one that reads no text alone."""
    with suppress(NotImplementedError):  # as of a model of images
        size = getattr(model.get_input_embeddings(), "num_embeddings", None)
        if isinstance(size, int) and model.main_input_name == "input_ids":
            return size
    raise ValueError(
        f"{type(model).__name__} reads no text, or not text alone; give a language model or an "
        f"encoder of text"
    )


def positions(model: PreTrainedModel) -> int | None:
    """Finds the longest sequence that a model can read, special tokens included; None = unknown."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if limit is not None and padding is not None and hasattr(module, "position_embeddings"):
            return limit - padding - 1  # RoBERTa and its kin count from padding_idx + 1
    return limit
