"""Cache methods keep the keys that kvpress keeps of the same queries, keys and values.

`kvpress_indices.py` wrote them to kvpress.safetensors, with what its presses keep at three budgets.
A press with a rule of its own is our scores with the line in which it differs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM

from tests.caches.methods import Spy
from value_aware_attention.caches import (
    AfterPrefix,
    CacheMethod,
    CriticalValues,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    Observed,
    ObservedAttention,
    Recent,
)
from value_aware_attention.call import Layer
from value_aware_attention.hugging_face.traits import rotations

WRITTEN = load_file(Path(__file__).with_name("kvpress.safetensors"))
LAYERS, HEADS, LENGTH, HEAD_DIM = WRITTEN["key"].shape
BUDGETS = (12, 24, 31)

SNAPKV = {"observed": "last", "rows": 8, "recent": 8}
EVERY_ROW = {"observed": "causal", "rows": LENGTH}

LAST = {"observed": "last", "rows": 1, "recent": 1}

Choice = tuple[Callable[[int], CacheMethod], dict[str, Any]]
"""A method of r and the options of `AfterPrefix` with which it is a press."""

SAME: dict[str, Choice] = {
    "snapkv": (lambda r: ObservedAttention(r, pool=5), SNAPKV),
    "snapkv_unpooled": (ObservedAttention, SNAPKV),
    "tova": (partial(ObservedAttention, by_layer=True), LAST),
    "knorm": (KeyNorm, {}),
    "keydiff": (KeyDiff, {}),
    "streaming_llm": (Recent, {"sinks": 4}),
    "expected_attention": (lambda r: ExpectedAttention(r, horizon=16), EVERY_ROW),
    "criticalkv_snapkv": (lambda r: CriticalValues(ObservedAttention(r, pool=5)), SNAPKV),
}


class PerRow(ObservedAttention):
    """kvpress's H2O: the sum over queries is divided by how many see the key; H2O's is not."""

    def scores(self, seen: Observed) -> Tensor:
        return (seen.weights.sum(dim=-2) / seen.visible.sum(dim=-2)).mean(dim=-2)


class WithoutSinks(ExpectedAttention):
    """kvpress's expected attention: the softmax is over the keys without the sinks."""

    def scores(self, seen: Observed) -> Tensor:
        left = {name: getattr(seen, name)[..., 4:, :] for name in ("key", "value")}
        left["visible"] = seen.visible[..., 4:]
        return pad(super().scores(replace(seen, **left, protected=None)), (4, 0))


UNSUNK = {"observed": "last", "rows": LENGTH - 4, "sinks": 4}

OTHER: dict[str, tuple[Choice, Choice]] = {
    "h2o": ((PerRow, EVERY_ROW), (ObservedAttention, EVERY_ROW)),
    "criticalkv_h2o": (
        (lambda r: CriticalValues(PerRow(r)), EVERY_ROW),
        (lambda r: CriticalValues(ObservedAttention(r)), EVERY_ROW),
    ),
    "expected_attention_sinks": (
        (lambda r: WithoutSinks(r, horizon=16), UNSUNK),
        (lambda r: ExpectedAttention(r, horizon=16), UNSUNK),
    ),
}
"""With kvpress's rule, and as it is here."""


@cache
def model_layers() -> tuple[tuple[Tensor, Tensor, Tensor], Layer]:
    """The text with one row after it, (layers, heads, group, N, .), and what is known of layers."""

    def grouped(kind: str) -> list[Tensor]:
        query, key, value = (WRITTEN[kind + name] for name in ("query", "key", "value"))
        return [query.unflatten(1, (HEADS, -1)), key[:, :, None], value[:, :, None]]

    config = LlamaConfig(
        vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, head_dim=HEAD_DIM,
    )  # fmt: skip
    layer = Layer(
        projection=WRITTEN["projection"].unflatten(1, (HEADS, -1)),
        rotary=next(rotations(LlamaForCausalLM(config))),
        repeated=tuple(grouped("repeated_")),
    )
    return tuple(pad(x, (0, 0, 0, 1)) for x in grouped("")), layer


def shown(method: CacheMethod, **options: Any) -> Spy:
    """Lets a method choose keys of all layers at once."""
    spy, (tensors, layer) = Spy(method), model_layers()
    options = {"prefix": LENGTH, "sinks": 0, "recent": 0} | options
    AfterPrefix(spy, **options)(*tensors, is_causal=True, layer=layer)
    return spy


def kept_by(choice: Choice, r: int) -> Tensor:
    """Marks the keys (layers, heads, LENGTH) that are kept."""
    method, options = choice
    kept = torch.zeros(LAYERS, HEADS, LENGTH, dtype=torch.bool)
    return kept.scatter(-1, shown(method(r), **options).kept[-1].indices, value=True)


@pytest.mark.parametrize("r", BUDGETS)
@pytest.mark.parametrize("name", SAME)
def test_the_same_keys_are_kept(name: str, r: int) -> None:
    assert torch.equal(kept_by(SAME[name], r), WRITTEN[f"{name}/{r}"])


@pytest.mark.parametrize("name", OTHER)
def test_one_line_is_all_that_differs(name: str) -> None:
    theirs, ours = OTHER[name]
    found = torch.stack([WRITTEN[f"{name}/{r}"] for r in BUDGETS])
    assert torch.equal(torch.stack([kept_by(theirs, r) for r in BUDGETS]), found)
    assert not torch.equal(torch.stack([kept_by(ours, r) for r in BUDGETS]), found)


@pytest.mark.parametrize("r", BUDGETS)
@pytest.mark.parametrize("shared_by", ["layer", "model"])
def test_kvzip_keeps_the_same_keys_by_one_budget_for_several_heads(shared_by: str, r: int) -> None:
    """As many of each head as are among the largest scores of a layer, or of the model."""
    spy = shown(ObservedAttention(r, aggregate="max"), observed="repeat", rows=LENGTH, sinks=4)
    found = WRITTEN[f"kvzip_{shared_by}/{r}"].flatten(0 if shared_by == "model" else 1)
    scores = spy.method.scores(spy.seen[-1])
    scores[..., spy.seen[-1].protected] = torch.inf
    largest = scores.view_as(found).topk(int(found.sum(dim=-1).max())).indices
    assert torch.equal(torch.zeros_like(found).scatter(-1, largest, value=True), found)


def test_a_growing_cache_expects_queries_from_the_next_row_on() -> None:
    """However few keys are left by then."""
    seen = shown(ExpectedAttention(12), prefix=LENGTH - 8, every=4).seen[-1]
    assert (seen.keys, seen.start) == (16, LENGTH)
