"""Presses are cache methods, and cache methods presses, with the score of kvpress.

A press written here stands for kvpress', which need not be installed; where it is, three of its
presses keep the keys of our methods.
"""

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.caches.methods import Spy
from tests.caches.seen import observed
from tests.hugging_face.models import batch, logits, sharp
from value_aware_attention import caches
from value_aware_attention.caches import AfterPrefix, CacheMethod, Observed
from value_aware_attention.hugging_face import attention_layers, replace_attention
from value_aware_attention.kernels import Elu

PREFIX, R = 11, 6
AS_PUBLISHED = {"prefix": PREFIX, "observed": "last", "rows": PREFIX, "sinks": 0, "recent": 0}
WINDOW = {"prefix": PREFIX, "observed": "last", "rows": 3, "sinks": 0, "recent": 3}


class LastQueries:
    """A press by hand: the mean weight that the last three queries give a key, which it keeps."""

    compression_ratio = 0.0

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        cos, sin = (x[:, None, -3:] for x in kwargs["position_embeddings"])
        query = module.q_proj(hidden_states[:, -3:]).unflatten(-1, (-1, module.head_dim))
        query = query.transpose(1, 2)
        first, second = query.chunk(2, dim=-1)
        query = query * cos + torch.cat([-second, first], dim=-1) * sin
        every = keys.repeat_interleave(module.num_key_value_groups, dim=1)
        later = torch.ones(3, keys.shape[2]).triu(keys.shape[2] - 2).bool()
        weights = (query @ every.mT / module.head_dim**0.5).masked_fill(later, -torch.inf)
        weights = weights.softmax(-1)
        torch.testing.assert_close(weights, attentions[:, :, -3:], atol=1e-5, rtol=1e-4)
        scores = weights.mean(-2).unflatten(1, (keys.shape[1], -1)).mean(2)
        scores[..., -3:] = 2.0
        return scores


def kept_by(method: CacheMethod, kind: str = "llama", **options: Any) -> list[Tensor]:
    """Lets a model, of two groups of two heads, choose keys in each layer."""
    spy, model = Spy(method), sharp(kind)
    with replace_attention(model, AfterPrefix(spy, **options)):
        logits(model, batch("none"))
    return [kept.indices for kept in spy.kept]


def same_keys(press: Any, method: CacheMethod, **options: Any) -> None:
    """Compares a press by its own rules with a method and its options."""
    found, expected = kept_by(caches.Press(R, press), **AS_PUBLISHED), kept_by(method, **options)
    assert len(found) == len(expected) > 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_press_sees_queries_keys_and_weights_of_the_observed_rows() -> None:
    press = LastQueries()
    same_keys(press, caches.ObservedAttention(R), **WINDOW)
    assert int(PREFIX * (1 - press.compression_ratio)) == R


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (SimpleNamespace(compression_ratio=0.5), "of type SimpleNamespace"),
        (SimpleNamespace(score=0.5), "of type SimpleNamespace"),
        (LastQueries, "the class LastQueries"),
        (None, "None"),
    ],
    ids=["no score", "a number", "a class", "nothing"],
)
def test_a_press_without_score_is_refused_in_one_line(wrong: object, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        caches.Press(R, wrong)
    assert str(raised.value) == f"press is {said}; it must have the score of kvpress"


def test_a_press_that_needs_the_whole_module_is_refused_in_one_line() -> None:
    class ReadsKeys(LastQueries):
        def score(self, module: Any, *_: Any) -> Tensor:
            return module.k_proj

    said = r"^ReadsKeys needs more than queries, keys and values: [^\n]*'k_proj'[^\n]*$"
    with pytest.raises(ValueError, match=said):
        caches.Press(4, ReadsKeys()).keep(observed(batch=(2, 2)))
    with pytest.raises(ValueError, match=r"^keys have dimensions \(2,\); a press has texts x"):
        caches.Press(4, LastQueries()).keep(observed())
    with pytest.raises(ValueError, match=r"^Press got the kernel Elu\(\); it supports Exponential"):
        caches.Press(4, LastQueries()).keep(observed(batch=(2, 2), kernel=Elu()))


def test_heads_without_groups_are_scored_alike() -> None:
    press = SimpleNamespace(score=lambda *given: given[3].norm(dim=-1) * given[4].shape[1])
    seen = observed(batch=(2, 3), group=1)
    query, key, value = (x[:, :, None] for x in (seen.query, seen.key, seen.value))
    alike = Observed(query=query, key=key, value=value, kernel=seen.kernel)
    found = caches.Press(4, press).keep(alike).indices
    assert torch.equal(found[:, :, 0], caches.Press(4, press).keep(seen).indices)
    pressed = kept_by(caches.Press(R, press), kind="gpt2", **AS_PUBLISHED)
    assert pressed[0].shape == (3, 4, 1, R)


@pytest.fixture
def kvpress() -> Iterator[ModuleType]:
    """Imports kvpress, which wraps the attention functions of transformers, and unwraps them."""
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    yield pytest.importorskip("kvpress")
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "knorm", "tova", "criticalkv"])
def test_presses_of_kvpress_keep_the_keys_of_our_methods(kvpress: ModuleType, name: str) -> None:
    snapkv = kvpress.SnapKVPress(window_size=3, kernel_size=5)
    last = AS_PUBLISHED | {"rows": 1, "recent": 1}
    same = {
        "snapkv": (snapkv, caches.ObservedAttention(R, pool=5), WINDOW),
        "keydiff": (kvpress.KeyDiffPress(), caches.KeyDiff(R), AS_PUBLISHED),
        "knorm": (kvpress.KnormPress(), caches.KeyNorm(R), AS_PUBLISHED),
        "tova": (kvpress.TOVAPress(), caches.ObservedAttention(R, by_layer=True), last),
        "criticalkv": (
            kvpress.CriticalKVPress(kvpress.KnormPress()),
            caches.CriticalValues(caches.KeyNorm(R)),
            AS_PUBLISHED,
        ),
    }
    press, method, options = same[name]
    same_keys(press, method, **options)


def test_a_press_for_another_kind_of_module_says_so(kvpress: ModuleType) -> None:
    said = r"^ExpectedAttentionPress needs more [^\n]*'rotary_emb'[^\n]*$"
    with pytest.raises(ValueError, match=said):
        caches.Press(6, kvpress.ExpectedAttentionPress()).keep(observed(batch=(2, 2), rows=8))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_method_as_a_press_keeps_the_keys_that_it_keeps(kvpress: ModuleType, kind: str) -> None:
    """In the attention module of a model, with its output projection."""
    options = {"observed": "last", "rows": 4, "sinks": 1, "recent": 2}
    calls: list[tuple[nn.Module, dict[str, Any]]] = []
    model, inputs = sharp(kind), batch("none")
    inputs = {name: x[:, :PREFIX] for name, x in inputs.items()}
    layer = attention_layers(model)[1]
    hook = layer.register_forward_pre_hook(
        lambda module, _, given: calls.append((module, given)), with_kwargs=True
    )
    spy = Spy(caches.CriticalValues(caches.ObservedAttention(R)))
    with replace_attention(model, AfterPrefix(spy, prefix=PREFIX - 1, **options)):
        logits(model, inputs)
    hook.remove()
    ((module, given),) = calls
    assert given["hidden_states"].shape[1] == PREFIX
    seen = spy.seen[1]
    press = caches.as_press(lambda r: caches.CriticalValues(caches.ObservedAttention(r)), **options)
    assert isinstance(press, kvpress.ScorerPress)
    press.compression_ratio = 1 - (R + 0.5) / seen.keys
    turn = tuple(x[:, : PREFIX - 1] for x in given["position_embeddings"])
    hidden = given["hidden_states"][:, : PREFIX - 1]
    with torch.no_grad():
        scores = press.score(
            module, hidden, seen.key, seen.value, None, {"position_embeddings": turn}
        )
    kept = scores.topk(R, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(kept, spy.kept[1].indices) and scores.sum() == kept.numel()


def test_what_a_press_cannot_do_is_refused(kvpress: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"^AttentionMatching refits values; a press drops keys$"):
        caches.as_press(caches.AttentionMatching)
    with pytest.raises(ValueError, match=r"^observed is 'repeat'; it must be one of last, causal$"):
        caches.as_press(caches.ObservedAttention, observed="repeat")
