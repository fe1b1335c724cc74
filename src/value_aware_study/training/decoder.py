"""The small decoder that learns in-context tasks, and how sharply its trained heads attend."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from value_aware_attention.measurement.masking import IGNORED


def build_decoder(
    *,
    vocabulary_size: int,
    length: int,
    layers: int,
    width: int,
    heads: int,
    key_value_heads: int,
    feedforward: int,
    initializer_range: float,
) -> LlamaForCausalLM:
    """Builds a Llama with random weights: rotary positions, grouped queries.

    `initializer_range` is the standard deviation of the weights. At Llama's 0.02 a query first
    weighs all keys of a small model alike. Embeddings and output weights are two matrices: with one
    for both, tokens that the first rows of a curriculum lack are all pushed the same way, and some
    of them stay alike for good.
    Raises ValueError unless the query heads divide evenly over the width and the key-value heads.
    """
    if width % (2 * heads) or heads % key_value_heads:
        raise ValueError(
            f"width {width} must be a multiple of 2 heads = {2 * heads}, and heads = {heads} one "
            f"of key_value_heads = {key_value_heads}"
        )
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        max_position_embeddings=length,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=feedforward,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,  # every token is the task's
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def sharpest_weights(
    model: LlamaForCausalLM, batch: dict[str, Tensor], prefix: int
) -> list[list[float]]:
    """Measures each layer's heads: a query's largest attention weight, 1 = one key, 1/n = n alike.

    The mean over the queries from `prefix` on whose answer is scored.
    """
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that returns its weights
    try:
        inputs = batch["input_ids"].to(model.device)
        layers = model(inputs, use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(attention)
    scored = (batch["labels"] != IGNORED).to(model.device)
    scored[:, :prefix] = False
    means = [layer.amax(-1).mT[scored].mean(0) for layer in layers]
    return [[round(weight, 4) for weight in heads.tolist()] for heads in means]
