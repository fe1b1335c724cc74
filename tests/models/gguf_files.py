"""Writes tiny models as GGUF files, in the layout of llama.cpp."""

from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz ", "Ġ", "th"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def llama() -> LlamaForCausalLM:
    """Draws a model with grouped heads, tied embeddings and sharp attention."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=len(WORDS), tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data *= 8 if weight.ndim > 1 else 1
    return model


def write_gguf(model: LlamaForCausalLM, path: Path, *, quantised: bool = False) -> Path:
    """Writes the weights as fp32, or those of the layers in 8 bits."""
    writer, config = GGUFWriter(str(path), "llama"), model.config
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(WORDS) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = _permuted(name, weight, model.config).numpy()
        if quantised and "proj" in name:
            packed = quants.quantize(array, GGMLQuantizationType.Q8_0)
            writer.add_tensor(_name(name), packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, *inner, _ = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(inner)]}.weight"


def _permuted(name: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    """Interleaves the halves of each head of queries and keys, as llama.cpp rotates them."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if part in name), None)
    if count is None:
        return weight
    rows = len(weight) // count
    return weight.view(count, 2, rows // 2, -1).swapaxes(1, 2).reshape(weight.shape).contiguous()
