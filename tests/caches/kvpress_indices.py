"""Writes which keys kvpress keeps of a small model's caches, for test_kvpress.py to compare with.

kvpress pins a transformers older than this project's, so it runs in an environment of its own:

    python3.11 -m venv peers && peers/bin/pip install kvpress==0.5.5 transformers==5.2.0
    peers/bin/python tests/caches/kvpress_indices.py
"""

from importlib.metadata import version
from pathlib import Path
from unittest import mock

import kvpress
import torch
from kvpress.presses import kvzip_press
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

WRITTEN = Path(__file__).with_name("kvpress.safetensors")
LENGTH, BUDGETS = 48, (12, 24, 31)

PRESSES = {
    "snapkv": lambda ratio: kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5),
    "snapkv_unpooled": lambda ratio: kvpress.SnapKVPress(ratio, window_size=8, kernel_size=1),
    "tova": kvpress.TOVAPress,
    "h2o": kvpress.ObservedAttentionPress,
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "streaming_llm": lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=4),
    "expected_attention": lambda ratio: kvpress.ExpectedAttentionPress(
        ratio, n_future_positions=16, n_sink=0
    ),
    "expected_attention_sinks": lambda ratio: kvpress.ExpectedAttentionPress(
        ratio, n_future_positions=16, n_sink=4
    ),
    "criticalkv_snapkv": lambda ratio: kvpress.CriticalKVPress(
        kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5)
    ),
    "criticalkv_h2o": lambda ratio: kvpress.CriticalKVPress(kvpress.ObservedAttentionPress(ratio)),
}
KVZIP = {
    "kvzip_layer": lambda ratio: kvpress.KVzipPress(ratio, layerwise=True),
    "kvzip_model": lambda ratio: kvpress.KVzipPress(ratio, layerwise=False),
}


class NoTokenizer:
    """Encodes every prompt as no tokens: KVzip then repeats the text and nothing else."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name: str) -> "NoTokenizer":
        return cls()

    def encode(self, text: str, **options: object) -> Tensor:
        return torch.zeros(1, 0, dtype=torch.long)


class Recorder:
    """Records what each layer's attention was last given: rotated queries and keys, values."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest, **options
    ):
        self.given[module.layer_idx] = (query, key, value)
        return self.attend(module, query, key, value, *rest, **options)

    attend = staticmethod(modeling_llama.eager_attention_forward)

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        layers = zip(*(self.given[layer] for layer in sorted(self.given)), strict=True)
        named = zip(("query", "key", "value"), layers, strict=True)
        return {prefix + name: torch.cat(x)[..., -LENGTH:, :] for name, x in named}


def small_model() -> LlamaForCausalLM:
    """Two layers of four heads that share two caches; weights so large that attention is uneven."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def kept_by(press: kvpress.BasePress, model: LlamaForCausalLM, text: Tensor, key: Tensor) -> Tensor:
    """Finds the keys (layers, heads, LENGTH) that are left in the cache, whatever their order."""
    cache = DynamicCache()
    with press(model):
        model(input_ids=text, past_key_values=cache)
    left = torch.cat([layer.keys for layer in cache.layers])
    return (key[..., None, :] == left[..., None, :, :]).all(-1).any(-1)


def kept_by_kvzip(press: kvpress.KVzipPress, model: LlamaForCausalLM, text: Tensor) -> Tensor:
    """Finds the keys (layers, heads, LENGTH) that its patch of attention does not mask."""
    model.set_attn_implementation("sdpa")  # what it masks by
    with mock.patch.object(kvzip_press, "AutoTokenizer", NoTokenizer), press(model):
        model.model(input_ids=text, past_key_values=DynamicCache())
    model.set_attn_implementation("eager")
    layers = [layer.self_attn for layer in model.model.layers]
    kept = torch.ones(len(layers), model.config.num_key_value_heads, LENGTH, dtype=torch.bool)
    for mask, layer in zip(kept, layers, strict=True):
        _, heads, places = layer.masked_key_indices
        mask[heads, places] = False
        layer.masked_key_indices = None
    return kept


@torch.no_grad()
def main() -> None:
    model = small_model()
    text = torch.randint(64, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with mock.patch.object(modeling_llama, "eager_attention_forward", Recorder()) as recorder:
        cache = DynamicCache()
        model(input_ids=text, past_key_values=cache)
        written = recorder.tensors()
        model(input_ids=text, past_key_values=cache)
        written |= recorder.tensors("repeated_")
    weights = torch.stack([layer.self_attn.o_proj.weight.T for layer in model.model.layers])
    written["projection"] = weights.unflatten(1, (4, 8))
    for r in BUDGETS:
        ratio = 1 - (r + 0.5) / LENGTH  # a press keeps int(LENGTH * (1 - ratio)) keys
        for name, press in PRESSES.items():
            written[f"{name}/{r}"] = kept_by(press(ratio), model, text, written["key"])
        for name, press in KVZIP.items():
            written[f"{name}/{r}"] = kept_by_kvzip(press(ratio), model, text)
    packages = ", ".join(f"{name} {version(name)}" for name in ("kvpress", "transformers", "torch"))
    save_file({name: x.contiguous() for name, x in written.items()}, WRITTEN, {"by": packages})


if __name__ == "__main__":
    main()
