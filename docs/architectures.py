"""Tries `replace_attention` on every text architecture of the installed transformers.

python -m docs.architectures    # prints the table of docs/hugging-face.md
"""

import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from inspect import signature
from math import nan
from typing import Any, NamedTuple

import torch
import transformers
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from value_aware_attention.approximations import Exact, OptimalValueOblivious
from value_aware_attention.hugging_face.adapter import replace_attention
from value_aware_attention.hugging_face.layers import INTERFACE

MAPPINGS = (
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
"""transformers' lists of models: an architecture is tried as the first that names it."""

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,  # hybrid models attend in every fourth
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "q_lora_rank": 8,  # latent attention
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,  # mixtures of experts
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
"""Values of a tiny config, each used where the architecture has it; the rest are defaults."""

TINY_TOO: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 99, "laurel_rank": 4},
    "gemma4_text": {"vocab_size_per_layer_input": 99},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "neomme": {"head_dim": 16},
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further values that some architectures need to become tiny"""

LARGEST = 10_000_000
"""Most parameters of a model that is tried"""

NOT_TRIED = {
    "cohere_compass_text": "its default config names no rotary parameters for its layers",
    "dots3_note_text": "its default config does not become small",
    "qwen4_exp_text": "its default config names no budget for its sparse layers",
    "zamba": "its weights cannot be tied in a few layers",
    "zamba2": "its layers follow a list of 54",
}
"""Architectures whose config does not become tiny, with the reason"""

NO_INTERFACE = "does not call transformers' attention interface"


class Result(NamedTuple):
    """Holds how far one architecture through the adapter is from eager attention."""

    error: float = nan
    """Largest difference to eager attention with `Exact`, relative to the largest output."""
    one_key: float = nan
    """The difference with one key per query, which shows that the test can fail"""
    unmasked: float = nan
    """The difference with `Exact` and no mask, which shows that the masks matter"""
    refused: str | None = None
    """The line that refuses the model; the numbers are then NaN."""

    @property
    def equal(self) -> bool:
        """Tells whether it equals eager attention, by a test that would have shown a difference."""
        return self.refused is None and self.error < 1e-3 < 1e-2 < min(self.one_key, self.unmasked)


@cache
def architectures() -> dict[str, str]:
    """Maps the model type to the class of every text architecture, by transformers' own lists.

    Models of several parts (images, sound) have a config for each part and are left out.
    """
    named = {kind: name for mapping in reversed(MAPPINGS) for kind, name in mapping.items()}
    return {
        kind: name if isinstance(name, str) else name[0]
        for kind, name in sorted(named.items())
        if not CONFIG_MAPPING[kind].sub_configs
    }


def tiny(kind: str, seed: int = 0) -> PreTrainedModel:
    """Builds a model of this type with ten thousand weights, large enough to be far from uniform.

    With transformers' random weights attention is nearly uniform, and a lost mask moves little.
    Raises ValueError where its config does not allow one.
    """
    config, build = _tiny_config(kind), getattr(transformers, architectures()[kind])
    with torch.device("meta"):
        size = sum(weight.numel() for weight in build(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(std=0.3)
    model.set_attn_implementation("eager")
    return model


def try_architecture(kind: str) -> Result:
    """Runs a tiny model of this type by eager attention and through the adapter, on padded text."""
    if not calls_interface(kind):
        return Result(refused=NO_INTERFACE)
    with quiet():
        model = tiny(kind)
        batch, visible = _batch(model.config)
        eager = _outputs(model, batch, visible, None)
        methods = Exact(), OptimalValueOblivious(1), _Unmasked()
        try:
            through = [_outputs(model, batch, visible, method) for method in methods]
        except ValueError as reason:
            line = str(reason).removeprefix(f"{type(model).__name__} ").partition(":")[0]
            return Result(refused=line)
    scale = eager.abs().max()
    error, one_key, unmasked = (float((found - eager).abs().max() / scale) for found in through)
    return Result(error, one_key, unmasked)


def calls_interface(kind: str) -> bool:
    """Tells whether this type's modelling code calls transformers' attention interface at all."""
    return hasattr(sys.modules[getattr(transformers, architectures()[kind]).__module__], INTERFACE)


def markdown() -> str:
    """Returns the table in Markdown: each outcome with its architectures."""
    rows: dict[str, list[str]] = defaultdict(list)
    for kind in architectures():
        if kind in NOT_TRIED:
            rows[f"not tried: {NOT_TRIED[kind]}"].append(kind)
            continue
        result = try_architecture(kind)
        if not (result.equal or result.refused):
            raise AssertionError(f"{kind} is neither equal to eager nor refused: {result}")
        rows[f"refused: {result.refused}" if result.refused else "equal to eager"].append(kind)
    lines = ["| | architectures |", "| --- | --- |"]
    lines += [f"| {what} | {', '.join(kinds)} |" for what, kinds in sorted(rows.items())]
    return "\n".join(lines)


class _Unmasked(nn.Module):
    """Computes exact attention that ignores the mask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return Exact()(query, key, value, kernel=options["kernel"])


def _tiny_config(kind: str) -> PreTrainedConfig:
    config = CONFIG_MAPPING[kind]
    known = {*signature(config.__init__).parameters, *config.attribute_map}
    values = {name: value for name, value in TINY.items() if name in known}
    if "kv_lora_rank" in known:  # latent attention has as many key heads as query heads
        values["num_key_value_heads"] = TINY["num_attention_heads"]
    return config(**values | TINY_TOO.get(kind, {}))


def _batch(config: PreTrainedConfig) -> tuple[dict[str, Tensor], Bool[Tensor, "batch N"]]:
    """Makes two texts of 12 and 8 tokens, padded at the end; a decoder with an encoder reads 7."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 90, (2, 12), generator=generator)
    visible = torch.arange(12) < torch.tensor([[12], [8]])
    batch: dict[str, Any] = {"input_ids": tokens, "attention_mask": visible.long()}
    batch["use_cache"] = False
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens[:, :7]
        visible = visible.new_ones(2, 7)
    return batch, visible


@torch.no_grad()
def _outputs(
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    visible: Bool[Tensor, "batch N"],
    method: nn.Module | None,
) -> Float[Tensor, "visible numbers"]:
    """Computes the logits of the visible tokens; None = with eager attention."""
    with replace_attention(model, method) if method else nullcontext():
        return model(**batch).logits[visible]


@contextmanager
def quiet() -> Iterator[None]:
    """Silences advice on kernels and settings that a tiny model has no use for."""
    logger = transformers.logging.get_logger("transformers")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


if __name__ == "__main__":
    print(markdown())
