"""Named decoders have the weights of their files: another dequantisation gives every tensor."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from value_aware_attention.hugging_face.saved import installed
from value_aware_attention.measurement.windows import adds_bos, text_windows, windows_task
from value_aware_attention.models.checkpoints import load_model, load_tokenizer
from value_aware_study.evaluation.pretrained import packaged_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
FOUR_NORMS = {
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def file_of(name: str) -> Path:
    try:
        return Path(installed(name))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def dequantised(file: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Reads every tensor of a GGUF file under its name in transformers."""
    gguf = pytest.importorskip("gguf")
    gemma, llama = (model.config.model_type.startswith(kind) for kind in ("gemma3", "llama"))
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    names, weights = NAMES | (FOUR_NORMS if gemma else {}), {}
    for tensor in gguf.GGUFReader(file).tensors:
        array = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        name, _, suffix = tensor.name.rpartition(".")
        if in_layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", name):
            layer, module = in_layer.groups()
            if llama and module in heads:  # llama.cpp rotates neighbours, transformers the halves
                pairs = array.reshape(heads[module], -1, 2, array.shape[-1])
                array = pairs.transpose(0, 2, 1, 3).reshape(array.shape)
            name = f"model.layers.{layer}.{names[module]}"
        if gemma and name.endswith("norm"):
            array = array - 1  # transformers adds 1 to the weights of Gemma's norms
        weights[f"{TOP.get(name, name)}.{suffix}"] = torch.from_numpy(np.ascontiguousarray(array))
    return weights


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen"])
def test_every_tensor_is_that_of_another_dequantisation(name: str) -> None:
    file, start = file_of(name), time.process_time()
    model = load_model(name)
    print(f"{name}: loaded in {time.process_time() - start:.1f} CPU seconds")
    weights, expected = model.state_dict(), dequantised(file, model)
    assert set(weights) - set(expected) in ({"lm_head.weight"}, set())  # tied to the embedding
    assert all(torch.equal(weights[key], tensor) for key, tensor in expected.items())
    print(f"{name}: {len(expected)} tensors, {sum(t.numel() for t in expected.values()):,} weights")


def test_the_dequantised_folder_has_the_same_weights(tmp_path: Path) -> None:
    file_of("smollm2")
    model = load_model("smollm2")
    for _ in range(2):  # the second finds the folder that the first wrote
        folder = packaged_model({"weights": "smollm2"}, tmp_path)
        weights = load_model(folder).state_dict()
        assert all(torch.equal(weights[key], x) for key, x in model.state_dict().items())
    text = (ROOT / "docs/licences.py").read_text()
    assert load_tokenizer(folder)(text).input_ids == load_tokenizer("smollm2")(text).input_ids


def test_gemma_needs_its_bos() -> None:
    """Windows begin with it by themselves; without it the perplexity is about twice as high."""
    file_of("gemma3")
    model, tokenizer = load_model("gemma3"), load_tokenizer("gemma3")
    text, perplexities = (ROOT / "docs/statistics.md").read_text(), []
    assert adds_bos(tokenizer)
    for add in (True, False):
        tokenizer.add_bos_token = add
        windows = text_windows(text, tokenizer, length=128, windows=4, closed=False)
        assert windows.begins_with_bos == add
        assert (windows.tokens == tokenizer.bos_token_id).sum() == 4 * add
        task = windows_task(model, tokenizer, windows)
        assert all((t.labels != tokenizer.bos_token_id).all() for t in task.texts)
        perplexities.append(np.exp(np.mean([task.run(None, part).mean() for part in range(4)])))
    print(f"perplexity {perplexities[0]:.1f} with BOS, {perplexities[1]:.1f} without")
    assert perplexities[1] > 1.5 * perplexities[0]
