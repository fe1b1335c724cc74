"""Choosing keys on a GPU waits for it a few times a prompt, and starts few operations a layer.

The numbers of operations are those of this code: lower a limit where the code starts fewer.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.approximations.methods import Counted
from tests.pretend_device import PretendDevice
from value_aware_attention.caches import LeaveOneOut
from value_aware_attention.hugging_face import compressed_cache

OPERATIONS = 198
"""Operations of a layer beyond those of reading it; three of them are the positions of its keys"""
WAITS = 3
"""Waits of a prompt: what is refused, the kept keys of each head, and their means for the report"""
OF_PADDING = 6
"""Waits of a layer of padded texts, whatever their lengths"""


def llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def read(model: LlamaForCausalLM, texts: int, padding: int = 0) -> tuple[int, DynamicCache]:
    """Reads a prompt on the model's device; returns the number of operations, and the cache.

    Each text begins with `padding` more tokens of padding than the one before.
    """
    tokens = torch.randint(50, (texts, 40), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(40) >= padding * torch.arange(texts)[:, None]).long() if padding else None
    inputs = [None if x is None else x.to(model.device) for x in (tokens, mask)]
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), Counted() as counted:
        model(*inputs, past_key_values=cache, logits_to_keep=1)
    return counted.counts.total(), cache


def chosen(
    layers: int, texts: int, padding: int = 0, **options: Any
) -> tuple[int, dict[str, int], DynamicCache]:
    """Returns the operations of choosing, the waits by the line of code, and the cache."""
    model = llama(layers)
    with compressed_cache(model, LeaveOneOut, keep=1 / 4):
        pass  # what is asked once of a model
    with PretendDevice() as device:
        model.to("cuda")
        reading, _ = read(model, texts, padding)
        device.waits.clear()
        with compressed_cache(model, LeaveOneOut, keep=1 / 4, **options):
            operations, cache = read(model, texts, padding)
        return operations - reading, dict(device.waits), cache


@pytest.mark.filterwarnings("ignore")
def test_operations_and_waits() -> None:
    few, _, _ = chosen(1, 1)
    more, waits, _ = chosen(3, 1)
    of_texts, also, _ = chosen(3, 4)
    assert (more - few) / 2 <= OPERATIONS
    # Whatever the number of texts and heads; the single text is padded, the others need pages.
    assert of_texts <= more + 3 * 42
    assert sum(waits.values()) <= WAITS >= sum(also.values()), (waits, also)


@pytest.mark.filterwarnings("ignore")
def test_waits_with_other_budgets_and_padding() -> None:
    def of_layer(texts: int, padding: int = 0, **options: object) -> float:
        few, more = (chosen(n, texts, padding, **options)[1] for n in (1, 3))
        return (sum(more.values()) - sum(few.values())) / 2

    assert of_layer(2, pool=None) == 0
    assert of_layer(2, pool="layer") == 1
    assert of_layer(2, padding=3) <= OF_PADDING >= of_layer(4, padding=3)


@pytest.mark.filterwarnings("ignore")
def test_the_same_keys_as_on_a_cpu() -> None:
    _, _, cache = chosen(2, 3)
    with compressed_cache(model := llama(2), LeaveOneOut, keep=1 / 4):
        _, expected = read(model, 3)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert layer.pages.cache.held.equal(other.pages.cache)
        torch.testing.assert_close(layer.pages.key.held, other.pages.key)
