"""Reads causal language models from GGUF files, the format of llama.cpp.

If a tensor or a key of the architecture is not used, the file is refused with its name, except for
keys that do not affect the computation.
"""

import re
import struct
from math import log, prod
from mmap import ACCESS_READ, mmap
from os import SEEK_CUR
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    dequantize,
    get_tensor_name_map,
)
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from value_aware_attention.files import reading
from value_aware_attention.hugging_face.saved import gguf_file, installed

Packed = tuple[int, np.ndarray]  # number of the tensor type, bytes

# Keys -> settings of transformers.
SIZE_KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
RMS = SIZE_KEYS | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
HEAD_KEYS = {"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"}
WINDOW_KEYS = HEAD_KEYS | {"attention.sliding_window": "sliding_window"}
CAPS = WINDOW_KEYS | {
    f"{at}_logit_softcapping": f"{at}_logit_softcapping" for at in ("attn", "final")
}

# Supported architectures: the type in transformers, required keys, optional keys.
ARCHITECTURES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "llama": ("llama", RMS, HEAD_KEYS), "qwen2": ("qwen2", RMS, HEAD_KEYS),
    "qwen3": ("qwen3", RMS, HEAD_KEYS),
    "gemma": ("gemma", RMS, HEAD_KEYS), "gemma2": ("gemma2", RMS, CAPS),
    "gemma3": ("gemma3_text", RMS, CAPS), "phi3": ("phi3", RMS, WINDOW_KEYS),
    "starcoder2": (
        "starcoder2", SIZE_KEYS | {"attention.layer_norm_epsilon": "norm_epsilon"}, WINDOW_KEYS
    ),
    "gpt2": ("gpt2", SIZE_KEYS | {
        "feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"
    }, {}),
}  # fmt: skip

# Gemma's defaults for missing keys: the window, and the period of layers without one. The scale of
# queries is in no file: it is from width / heads for the model with this many layers, and from the
# head size for the others.
LOCAL = {"gemma2": (4096, 2, 46), "gemma3": (None, 6, 62)}

# Settings of scaled rotations, with llama.cpp's defaults; tensors of factors.
SCALING = {
    "factor": 0.0, "attn_factor": 1.0, "original_context_length": 0, "yarn_log_multiplier": 0.0,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
}  # fmt: skip
FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

# Keys without effect (tensors have the vocabulary's size), and values of keys without effect.
HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
NEUTRAL = {
    "attention.causal": True, "attention.sliding_window": 0, "expert_count": 0,
    "expert_used_count": 0,
}  # fmt: skip
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
TOKEN_KEYS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

# Settings that add a bias to all of these modules.
BIASES = {
    "attention_bias": {"attn_q", "attn_k", "attn_v", "attn_output"},
    "mlp_bias": {"ffn_gate", "ffn_up", "ffn_down"},
    "use_bias": {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"},
}


def _take(stream: mmap, form: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))


def _value(stream: mmap, kind: int) -> Any:
    """Reads a value of the type with this number: a text, a list, or a type of struct."""
    if kind == 8:
        return _take(stream, f"{_take(stream, 'Q')[0]}s")[0].decode()
    if kind != 9:
        return _take(stream, "BbHhIif?__Qqd"[kind])[0]
    kind, count = _take(stream, "IQ")
    return [_value(stream, kind) for _ in range(count)]


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Packed]]:
    """Reads the keys and values of a file, and its tensors in packed form.

    Raises ValueError for a damaged file, and for a part of a split model, naming all parts.
    """
    with reading(file, "fetch it again"), file.open("rb") as opened:
        stream = mmap(opened.fileno(), 0, access=ACCESS_READ)
        magic, version, tensors, keys = _take(stream, "4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version}")
        values = {_value(stream, 8): _value(stream, *_take(stream, "I")) for _ in range(keys)}
        rows = [
            (_value(stream, 8), _take(stream, f"{_take(stream, 'I')[0]}Q"), *_take(stream, "IQ"))
            for _ in range(tensors)
        ]
        stream.seek(-stream.tell() % values.get("general.alignment", 32), SEEK_CUR)
        data, packed = np.frombuffer(stream, np.uint8)[stream.tell() :], {}
        for name, (width, *others), kind, start in rows:
            elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            shape = (*others[::-1], width // elements * size)
            packed[name] = kind, data[start : start + prod(shape)].reshape(shape)
    if (count := values.get("split.count", 1)) > 1:
        parts = {re.sub(r"\d+(?=-of-)", f"{part:05}", file.name) for part in range(1, count + 1)}
        raise ValueError(
            f"{file} is one of {count} parts: join {', '.join(sorted(parts))} with "
            f"llama-gguf-split --merge, and give the whole"
        )
    return values, packed


def bits_a_weight(name: str | Path) -> float | None:
    """Counts the bits of a weight over all tensors of a model's GGUF file; None if it has none."""
    if not (file := gguf_file(installed(name))):
        return None
    tensors = [
        (data.size, GGML_QUANT_SIZES[GGMLQuantizationType(kind)])
        for kind, data in read_gguf(file)[1].values()
    ]
    weights = sum(size // block * elements for size, (elements, block) in tensors)
    return 8 * sum(size for size, _ in tensors) / weights


def described(file: Path) -> str:
    """Writes a file's name, licence and bits a weight, in one line."""
    values = {"general.name": "not stated", "general.license": "not stated", **read_gguf(file)[0]}
    return (
        f"{file.name}, as named by the file, not compared with the publisher's: name "
        f"{values['general.name']}, licence {values['general.license']}; "
        f"{bits_a_weight(file):.2f} bits a weight"
    )


def load_gguf(file: Path, dtype: torch.dtype) -> Any:
    """Loads the model of a file in `dtype`, with transformers' report of its weights.

    Raises ValueError for an unsupported architecture, for unused keys and tensors, and in the cases
    of `read_gguf`.
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
    caps = getattr(config, "attn_logit_softcapping", None)  # older releases ignored it with sdpa
    return build.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True,
        ignore_mismatched_sizes=True, attn_implementation="eager" if caps else None,
    )  # fmt: skip


def _array(kind: int, data: np.ndarray) -> np.ndarray:
    return np.array(dequantize(data, GGMLQuantizationType(kind)), np.float32)


def _config(architecture: str, values: dict[str, Any], packed: dict[str, Packed]) -> Any:
    """Builds the config from keys and tensors; ValueError for unused keys.

    Tensors that belong to the config are removed from `packed`.
    """
    (kind, needed, optional), start = ARCHITECTURES[architecture], f"{architecture}."
    keys = {key.removeprefix(start): values[key] for key in values if key.startswith(start)}
    single = {key for key in keys if not isinstance(keys[key], list)}  # not per layer
    if lacking := needed.keys() - single:
        raise ValueError(f"it has no single {start}{min(lacking)}")
    names = {key: name for key, name in (needed | optional).items() if key in single}
    settings: dict[str, Any] = {name: keys.pop(key) or None for key, name in names.items()}
    heads = settings["num_attention_heads"]
    head_dim = settings.get("head_dim", settings["hidden_size"] // heads)
    if optional:
        settings = {"num_key_value_heads": heads, "head_dim": head_dim} | settings
        settings["rope_parameters"] = _rope(architecture, keys, packed, settings)
    if architecture in LOCAL:
        settings |= _local(architecture, keys, settings)
    neutral = NEUTRAL | dict.fromkeys(HEAD_SIZES, head_dim) | {"attention.head_count_kv": heads}
    if left := sorted(key for key in keys.keys() - HARMLESS if neutral.get(key) != keys[key]):
        listed = ", ".join(f"{start}{key} = {keys[key]}" for key in left[:3])
        raise ValueError(f"{listed} may change what the model computes, and is not read")
    biased = {name.split(".")[-2] for name in packed if name.endswith(".bias")}
    if kind in ("llama", "qwen2"):  # differ in biases: llama's 4 projections or none, qwen2's 3
        kind = "qwen2" if "attn_q" in biased and "attn_output" not in biased else "llama"
    build: Any = CONFIG_MAPPING[kind]
    flags = {name: bool(biased & BIASES[name]) for name in BIASES if hasattr(build, name)}
    tokens = {
        name: values.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKEN_KEYS.items()
    }
    return build(
        **settings, **flags, **tokens,
        vocab_size=len(packed.get("token_embd.weight", (0, [0]))[1]),
        tie_word_embeddings="output.weight" not in packed,
    )  # fmt: skip


def _local(architecture: str, keys: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the windows, rotations and scale of queries of Gemma's layers."""
    window, period, largest = LOCAL[architecture]
    window, rope = settings.get("sliding_window", window), settings["rope_parameters"]
    layers, width = settings["num_hidden_layers"], settings["hidden_size"]
    period = keys.pop("attention.sliding_window_pattern", period)
    local = period if isinstance(period, list) else [i % period < period - 1 for i in range(layers)]
    if architecture == "gemma3":
        near = {"rope_type": "default", "rope_theta": keys.pop("rope.freq_base_swa", 10000.0)}
        rope = {"full_attention": rope, "sliding_attention": near}
    share = width // settings["num_attention_heads"]
    return {
        "layer_types": [f"{'sliding' if window and near else 'full'}_attention" for near in local],
        "sliding_window": window or settings["max_position_embeddings"], "rope_parameters": rope,
        "query_pre_attn_scalar": share if layers == largest else settings["head_dim"],
    }  # fmt: skip


def _rope(
    architecture: str, keys: dict[str, Any], packed: dict[str, Packed], settings: dict[str, Any]
) -> dict[str, Any]:
    """Returns the rotation described by keys and tensors, and removes these.

    A tensor of factors divides the frequencies. YaRN scales attention as llama.cpp does.
    """
    head_dim, length = settings["head_dim"], settings["max_position_embeddings"]
    rope = {"rope_type": "default", "rope_theta": keys.pop("rope.freq_base", 10000.0)}
    kinds = {"none", "linear", "longrope", "yarn"}
    scaling = {name: keys.pop(f"rope.scaling.{name}", SCALING[name]) for name in SCALING}
    original, scale = scaling["original_context_length"] or length, scaling["attn_factor"]
    if architecture == "phi3":
        rope["partial_rotary_factor"] = keys.pop("rope.dimension_count", head_dim) / head_dim
        settings["original_max_position_embeddings"] = original  # the config of phi3 reads it here
        kinds.remove("yarn")  # transformers' phi3 has none
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
    names = FACTOR_TENSORS[1:] if FACTOR_TENSORS[1] in packed else FACTOR_TENSORS[:1] * 2
    if architecture not in LOCAL and packed.keys() >= set(names):
        arrays = {name: factor * _array(*packed.pop(name)) for name in set(names)}
        short, long = (arrays[name].tolist() for name in names)
    elif scale == 1 and (factor == 1 or architecture != "phi3"):
        return rope | ({} if factor == 1 else {"rope_type": "linear", "factor": factor})
    return rope | {
        "rope_type": "longrope", "attention_factor": scale, "factor": max(length / original, 1.0),
        "short_factor": short, "long_factor": long, "original_max_position_embeddings": original,
    }  # fmt: skip
