"""Writes tiny models as GGUF files, in the layout of llama.cpp, by tables of its own."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)  # fmt: skip

WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz ", "Ġ", "th"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma": GemmaConfig,
    "gemma2": Gemma2Config, "gemma3": Gemma3TextConfig, "phi3": Phi3Config,
    "starcoder2": Starcoder2Config, "gpt2": GPT2Config,
}  # fmt: skip
KEYS = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("norm_epsilon", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
NAMES = {
    r"(model\.embed_tokens|transformer\.wte)": "token_embd", r"transformer\.wpe": "position_embd",
    r"(model\.norm|transformer\.ln_f)": "output_norm", "lm_head": "output",
    r"self_attn\.([qkv])_proj": r"attn_\1", r"self_attn\.([qk])_norm": r"attn_\1_norm",
    r"(self_attn\.qkv_proj|attn\.c_attn)": "attn_qkv",
    r"(self_attn\.o_proj|attn\.c_proj)": "attn_output", r"mlp\.(gate|up|down)_proj": r"ffn_\1",
    r"(mlp\.gate_up_proj|mlp\.c_fc)": "ffn_up", r"mlp\.c_proj": "ffn_down",
    r"(input_layernorm|ln_1)": "attn_norm", "(pre_feedforward_layernorm|ln_2)": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def drawn(architecture: str, **changed: Any) -> PreTrainedModel:
    """Draws a model with grouped heads, sharp attention and norms and biases of all values."""
    kind, sizes = CONFIGS[architecture], SIZES | {"tie_word_embeddings": True} | changed
    sizes = {"n_inner": 64, "query_pre_attn_scalar": sizes["head_dim"]} | sizes
    known = {*kind.attribute_map, *(() if kind is GPT2Config else ["head_dim"])}
    sizes = {name: sizes[name] for name in sizes if hasattr(kind, name) or name in known}
    config = kind(**sizes, attn_implementation="eager")
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    for weight in model.parameters():
        weight.data = 8 * weight.data if weight.ndim > 1 else torch.randn(weight.shape) / 2
    return model


def llama() -> LlamaForCausalLM:
    """Draws a model with grouped heads, tied embeddings and sharp attention."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    for weight in model.parameters():
        weight.data *= 8 if weight.ndim > 1 else 1
    return model


def write_gguf(
    model: PreTrainedModel, path: Path, *, quantised: bool = False,
    keys: Mapping[str, Any] = {}, tensors: Mapping[str, Any] = {}, without: str = "nothing",
) -> Path:  # fmt: skip
    """Writes the weights as fp32, or those of the layers in 8 bits.

    `keys` and `tensors` are written beside the model's own; those that match `without` are not.
    """
    architecture = next(name for name, kind in CONFIGS.items() if type(model.config) is kind)
    writer = GGUFWriter(str(path), architecture)
    fields = model.config.to_dict()
    values = {
        key: next((fields[name] for name in names if fields.get(name) is not None), None)
        for key, names in KEYS.items()
    }
    rope = getattr(model.config, "rope_parameters", None) or {}
    values["rope.freq_base"] = rope.get("full_attention", rope).get("rope_theta")
    values = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    values |= {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("bos", "eos"), 1)}
    add: dict[type, Any] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    for key, value in ({"general.name": "tiny"} | values | dict(keys)).items():
        if not re.fullmatch(without, key):
            add[type(value)](key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(WORDS)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(WORDS) - 3))
    writer.add_token_merges(["t h"])
    arrays = {}
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            array = _stored(architecture, name, weight, model.config).numpy()
            arrays[_name(architecture, name)] = np.ascontiguousarray(array)
    for name, array in (arrays | dict(tensors)).items():
        if re.fullmatch(without, name):
            continue
        if quantised and re.search(r"(attn|ffn)_[a-z]+\.weight", name) and "norm" not in name:
            packed = quants.quantize(array, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, np.asarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(architecture: str, name: str) -> str:
    module, suffix = name.rsplit(".", 1)
    layer = re.match(r"(model\.layers|transformer\.h)\.(\d+)\.", module)
    part = module[layer.end() :] if layer else module
    after = "post_attention_norm" if architecture in ("gemma2", "gemma3") else "ffn_norm"
    for pattern, its_name in (NAMES | {"post_attention_layernorm": after}).items():
        if found := re.fullmatch(pattern, part):
            part = found.expand(its_name)
            break
    return f"blk.{layer[2]}.{part}.{suffix}" if layer else f"{part}.{suffix}"


def _stored(architecture: str, name: str, weight: Tensor, config: Any) -> Tensor:
    """Returns a weight as llama.cpp stores it."""
    part = re.search(r"\.([qk])_proj\.", name)
    if architecture == "llama" and part:  # it rotates neighbours, transformers the halves
        heads = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
        halves = weight.unflatten(0, (heads, 2, -1))
        return halves.swapaxes(1, 2).flatten(0, 2)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    return weight.T if architecture == "gpt2" and ".h." in name and weight.ndim > 1 else weight
