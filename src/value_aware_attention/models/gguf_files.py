"""Reads causal language models from GGUF files, the format of llama.cpp.

Every tensor of a file and every key of its architecture is used, or the file is refused by the name
of what is not. Keys that change nothing of what a model computes are left out.
"""

import re
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    dequantize,
    get_tensor_name_map,
)
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from value_aware_attention.files import reading

Packed = tuple[int, np.ndarray]  # the number of a tensor's type, and its bytes

# Keys with the settings of transformers that they give.
SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
RMS = SIZES | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
HEADS = {"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"}
WINDOW = HEADS | {"attention.sliding_window": "sliding_window"}
CAPS = WINDOW | {f"{at}_logit_softcapping": f"{at}_logit_softcapping" for at in ("attn", "final")}

# Architectures that are read: the type in transformers, keys that a file must have and may have.
ARCHITECTURES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "llama": ("llama", RMS, HEADS), "qwen2": ("qwen2", RMS, HEADS), "qwen3": ("qwen3", RMS, HEADS),
    "gemma": ("gemma", RMS, HEADS), "gemma2": ("gemma2", RMS, CAPS),
    "gemma3": ("gemma3_text", RMS, CAPS), "phi3": ("phi3", RMS, WINDOW),
    "starcoder2": (
        "starcoder2", SIZES | {"attention.layer_norm_epsilon": "norm_epsilon"}, WINDOW
    ),
    "gpt2": ("gpt2", SIZES | {
        "feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"
    }, {}),
}  # fmt: skip

# Where a file does not tell: Gemma's window, and every which layer has none. No file tells the
# scale of queries: the width over the heads in the size of this many layers, else the head's own.
LOCAL = {"gemma2": (4096, 2, 46), "gemma3": (None, 6, 62)}

# Numbers of scaled rotations, with what llama.cpp takes where a key is missing; tensors of factors.
SCALING = {
    "factor": 0.0, "attn_factor": 1.0, "original_context_length": 0, "yarn_log_multiplier": 0.0,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
}  # fmt: skip
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

# Keys that change nothing, the vocabulary's size since tensors have it, and values of keys.
HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
NEUTRAL = {
    "attention.causal": True, "attention.sliding_window": 0, "expert_count": 0,
    "expert_used_count": 0,
}  # fmt: skip

# Settings that give a bias to all of these modules.
BIASES = {
    "attention_bias": {"attn_q", "attn_k", "attn_v", "attn_output"},
    "mlp_bias": {"ffn_gate", "ffn_up", "ffn_down"},
    "use_bias": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"},
}


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Packed]]:
    """Reads the keys of a file with their values, and its tensors as they are packed.

    Raises ValueError for a damaged file, and for a part of a model with the names of all parts.
    """
    with reading(file, "fetch it again"):
        content = GGUFReader(file)
        values = {name: field.contents() for name, field in content.fields.items()}
        packed = {str(x.name): (int(x.tensor_type), np.asarray(x.data)) for x in content.tensors}
    if (count := values.get("split.count", 1)) > 1:
        parts = {re.sub(r"\d+(?=-of-)", f"{part:05}", file.name) for part in range(1, count + 1)}
        raise ValueError(
            f"{file} is one of {count} parts: join {', '.join(sorted(parts))} with "
            f"llama-gguf-split --merge, and give the whole"
        )
    return values, packed


def load_gguf(file: Path, dtype: torch.dtype) -> Any:
    """Loads the model of a file in `dtype`, with transformers' report of its weights.

    Raises ValueError for an architecture that is not read, for keys and tensors that the model has
    no place for, and what `read_gguf` does.
    """
    values, packed = read_gguf(file)
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"the architecture {architecture} is not read from GGUF files, only "
            f"{', '.join(ARCHITECTURES)}: give a folder with its safetensors"
        )
    config = _config(architecture, values, packed)
    build: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    with torch.device("meta"):
        places = {names.get_name(p, (".weight", ".bias")): p for p in build(config).state_dict()}
    if other := [name for name in packed if name not in places]:
        raise ValueError(f"a model of {architecture} has no place for {', '.join(other[:3])}")
    processor = TENSOR_PROCESSORS | {"gemma": TENSOR_PROCESSORS["gemma2"]}
    process = processor.get(architecture, TensorProcessor)(config.to_dict()).process
    weights = {
        places[name]: torch.tensor(
            process(_array(*packed[name]), name, parsed_parameters={"tensors": {}}).weights,
            dtype=dtype,
        )
        for name in packed
    }
    caps = getattr(config, "attn_logit_softcapping", None)  # which sdpa of older releases left out
    return build.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True,
        ignore_mismatched_sizes=True, attn_implementation="eager" if caps else None,
    )  # fmt: skip


def _array(kind: int, data: np.ndarray) -> np.ndarray:
    return np.array(dequantize(data, GGMLQuantizationType(kind)), np.float32)


def _config(
    architecture: str, values: dict[str, Any], packed: dict[str, Packed]
) -> PreTrainedConfig:
    """Builds the config that keys and tensors describe; ValueError for keys that are left over.

    Tensors that are part of the config are taken out of `packed`.
    """
    (kind, needed, optional), start = ARCHITECTURES[architecture], f"{architecture}."
    keys = {key.removeprefix(start): values[key] for key in values if key.startswith(start)}
    if lacking := needed.keys() - keys:
        raise ValueError(f"it has no {start}{min(lacking)}")
    names = needed | optional
    settings: dict[str, Any] = {names[key]: keys.pop(key) or None for key in names if key in keys}
    heads = settings["num_attention_heads"]
    head_dim = settings.get("head_dim", settings["hidden_size"] // heads)
    if optional:
        settings = {"num_key_value_heads": heads, "head_dim": head_dim} | settings
        settings["rope_parameters"] = _rope(architecture, keys, packed, settings)
    if architecture in LOCAL:
        settings |= _local(architecture, keys, settings)
    sizes = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    neutral = NEUTRAL | dict.fromkeys(sizes, head_dim) | {"attention.head_count_kv": heads}
    left = sorted(key for key in keys.keys() - HARMLESS if neutral.get(key) != keys[key])
    if left:
        listed = ", ".join(f"{start}{key} = {keys[key]}" for key in left[:3])
        raise ValueError(f"{listed} may change what the model computes, and is not read")
    biased = {name.split(".")[-2] for name in packed if name.endswith(".bias")}
    if kind in (
        "llama",
        "qwen2",
    ):  # alike but for biases: of all four projections or none, of three
        kind = "qwen2" if "attn_q" in biased and "attn_output" not in biased else "llama"
    build: Any = CONFIG_MAPPING[kind]
    settings |= {name: bool(biased & BIASES[name]) for name in BIASES if hasattr(build, name)}
    for name, token in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        settings[f"{name}_token_id"] = values.get(f"tokenizer.ggml.{token}_token_id")
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[build]
    config: PreTrainedConfig = build(
        **settings, architectures=[model.__name__],
        tie_word_embeddings="output.weight" not in packed,
        vocab_size=len(packed.get("token_embd.weight", (0, [0]))[1]),
    )  # fmt: skip
    return config


def _local(architecture: str, keys: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the windows, the rotations and the scale of queries of Gemma's layers."""
    window, period, largest = LOCAL[architecture]
    window, layers = settings.get("sliding_window", window), settings["num_hidden_layers"]
    period = keys.pop("attention.sliding_window_pattern", period)
    local = period if isinstance(period, list) else [i % period < period - 1 for i in range(layers)]
    rope = settings["rope_parameters"]
    if architecture == "gemma3":
        near = {"rope_type": "default", "rope_theta": keys.pop("rope.freq_base_swa", 10000.0)}
        rope = {"full_attention": rope, "sliding_attention": near}
    width = settings["hidden_size"] // settings["num_attention_heads"]
    return {
        "layer_types": [f"{'sliding' if window and near else 'full'}_attention" for near in local],
        "sliding_window": window or settings["max_position_embeddings"], "rope_parameters": rope,
        "query_pre_attn_scalar": width if layers == largest else settings["head_dim"],
    }  # fmt: skip


def _rope(
    architecture: str, keys: dict[str, Any], packed: dict[str, Packed], settings: dict[str, Any]
) -> dict[str, Any]:
    """Returns the rotation that keys and tensors describe, and takes them out.

    A tensor of factors divides the frequencies. YaRN scales attention as llama.cpp does.
    """
    head_dim, length = settings["head_dim"], settings["max_position_embeddings"]
    rope = {"rope_type": "default", "rope_theta": keys.pop("rope.freq_base", 10000.0)}
    kinds = {"none", "linear", "longrope", "yarn"}
    scaling = {name: keys.pop(f"rope.scaling.{name}", SCALING[name]) for name in SCALING}
    original, scale = scaling["original_context_length"] or length, scaling["attn_factor"]
    if architecture == "phi3":
        rope["partial_rotary_factor"] = keys.pop("rope.dimension_count", head_dim) / head_dim
        settings["original_max_position_embeddings"] = original  # its config takes no other
        kinds.remove("yarn")  # transformers' has none
    if (kind := keys.get("rope.scaling.type", "linear")) in kinds:
        keys.pop("rope.scaling.type", None)
    factor = scaling["factor"] or keys.pop("rope.scale_linear", 0) or 1.0
    if kind == "yarn":
        growth, share = 0.1 * log(max(factor, 1.0)), scaling["yarn_log_multiplier"]
        return rope | {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "beta_fast": scaling["yarn_beta_fast"], "beta_slow": scaling["yarn_beta_slow"],
            "attention_factor": scale * (1 + growth) / (1 + growth * share),
        }  # fmt: skip
    factor = 1.0 if kind == "none" else factor
    short = long = [factor] * int(head_dim * rope.get("partial_rotary_factor", 1) / 2)
    names = FACTORS[1:] if FACTORS[1] in packed else FACTORS[:1] * 2
    if architecture not in LOCAL and packed.keys() >= set(names):
        arrays = {name: factor * _array(*packed.pop(name)) for name in set(names)}
        short, long = (arrays[name].tolist() for name in names)
    elif scale == 1 and (factor == 1 or architecture != "phi3"):
        return rope | ({} if factor == 1 else {"rope_type": "linear", "factor": factor})
    return rope | {
        "rope_type": "longrope", "attention_factor": scale, "factor": max(length / original, 1.0),
        "short_factor": short, "long_factor": long, "original_max_position_embeddings": original,
    }  # fmt: skip
