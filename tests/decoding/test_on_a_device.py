"""Choosing keys on a GPU waits for it a few times a prompt, and starts few operations a layer.

The numbers of operations are those of this code: lower a limit where the code starts fewer.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.pretend_device import PretendDevice
from value_aware_attention.caches import LeaveOneOut
from value_aware_attention.hugging_face import compressed_cache

OPERATIONS = 370
"""Operations of a layer beyond those of reading it"""
PER_LAYER = "pages.py"
"""The file that still waits in every layer, once"""


class Counted(TorchDispatchMode):
    """Counts the operations that are dispatched within its context."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **kwargs or {})


def llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def read(model: LlamaForCausalLM, texts: int) -> tuple[int, DynamicCache]:
    """Reads a prompt on the model's device; returns the number of operations, and the cache."""
    tokens = torch.randint(50, (texts, 40), generator=torch.Generator().manual_seed(1))
    tokens, cache = tokens.to(model.device), DynamicCache(config=model.config)
    with torch.no_grad(), Counted() as counted:
        model(tokens, past_key_values=cache, logits_to_keep=1)
    return counted.operations, cache


def chosen(layers: int, texts: int) -> tuple[int, dict[str, int], DynamicCache]:
    """Returns the operations of choosing, the waits by the line of code, and the cache."""
    model = llama(layers)
    with compressed_cache(model, LeaveOneOut, keep=1 / 4):
        pass  # what is asked once of a model
    with PretendDevice() as device:
        model.to("cuda")
        reading, _ = read(model, texts)
        device.waits.clear()
        with compressed_cache(model, LeaveOneOut, keep=1 / 4):
            operations, cache = read(model, texts)
        return operations - reading, dict(device.waits), cache


@pytest.mark.filterwarnings("ignore")
def test_operations_and_waits() -> None:
    few, _, _ = chosen(1, 1)
    more, waits, _ = chosen(3, 1)
    of_texts, _, _ = chosen(3, 4)
    assert (more - few) / 2 <= OPERATIONS
    # Whatever the number of texts and heads; the single text is padded, the others need pages.
    assert of_texts <= more + 60 + 3 * 40
    of_layers = sum(n for place, n in waits.items() if place.startswith(PER_LAYER))
    assert of_layers <= 3 and sum(waits.values()) - of_layers <= 3, waits


@pytest.mark.filterwarnings("ignore")
def test_the_same_keys_as_on_a_cpu() -> None:
    _, _, cache = chosen(2, 3)
    with compressed_cache(model := llama(2), LeaveOneOut, keep=1 / 4):
        _, expected = read(model, 3)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert layer.pages.cache.held.equal(other.pages.cache)
        torch.testing.assert_close(layer.pages.key.held, other.pages.key)
