"""Passages are whole sentences, and what the explorer shows of them agrees with dense attention."""

import json
from functools import partial

import pytest
import torch
from probed import model, tokenizer, words
from torch import Tensor

from tests.recorded import recorded
from tests.refusals import assert_refused
from value_aware_attention import kernels
from value_aware_attention.approximations import (
    OptimalValueAware,
    OptimalValueOblivious,
    SampledKeys,
    SlidingWindow,
)
from value_aware_attention.attention import attention, attention_weights
from value_aware_attention.call import Call
from value_aware_attention.measurement.task import Task, Text
from value_aware_study.evaluation import explorer
from value_aware_study.evaluation.exploration import WHOLE, Exploration, Kept, Model

SENTENCES = [f"W{place} {' '.join(['w1', 'w2'] * 10)} w{place}." for place in range(4)]
NOTHING: tuple[list[int], list[int]] = ([], [])


def text(tokens: list[str]) -> str:
    return "".join(tokens).strip()


def test_whole_sentences_are_taken_and_the_first_of_a_text_is_not() -> None:
    written = f"{' '.join(SENTENCES)}\n\nParameters\n--------\nx : w1 w2"
    chosen = explorer.passage([written], tokenizer(), NOTHING)
    assert text(chosen.pieces) == " ".join(SENTENCES[1:3])
    assert len(chosen.ids) == len(chosen.pieces) == 44


def test_a_passage_of_more_common_words_is_preferred() -> None:
    wordy = f"One. The {' '.join(['w1'] * 33)} end."
    fewer = f"One. The {' '.join(['w1'] * 33)} e-n-d."

    class Pieces:
        """Splits words at hyphens, as a tokenizer of parts of words does."""

        is_fast = False

        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text.replace("-", " ").split())))}

        def decode(self, ids: list[int]) -> str:
            return f" {ids[0]}"

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [str(token) for token in ids]

    chosen = explorer.passage([fewer, wordy], Pieces(), ([7], [9]))  # type: ignore[arg-type]
    assert chosen.pieces[0] == " 7" and chosen.pieces[-1] == " 9" and len(chosen.ids) == 37


def test_without_sentences_as_many_whole_words_as_fit_are_taken() -> None:
    chosen = explorer.passage([words(100)], tokenizer(), ([0], [2]), most=20)
    assert text(chosen.pieces) == f"<s> {' '.join(words(100).split()[1:19])} </s>"
    assert text(explorer.passage(["alone"], tokenizer(), NOTHING).pieces) == "alone"
    assert_refused("the text is empty", explorer.passage, [" \n"], tokenizer(), NOTHING)


@pytest.mark.parametrize("name", ["roberta", "gpt2", "llama", "bert", "our_causal", "our_masked"])
def test_every_kind_of_model_is_explored(name: str) -> None:
    [explored] = explorer.exploration("a", model(name), tokenizer(), [words(200)]).models
    assert len(explored.heads) == (8 if name == "llama" else 4)
    closed = [name in ("roberta", "bert", "our_masked"), True]
    assert [explored.tokens[-1] == " </s>", explored.tokens[0] == " <s>"] == closed
    errors = [choice.error for query in explored.heads[0].queries for choice in query.kept[0]]
    assert all(error is not None for error in errors)


def test_heads_are_evenly_spaced_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "MOST_HEADS", 2)
    [explored] = explorer.exploration("a", model("bert"), tokenizer(), [words(200)]).models
    assert [(head.layer, head.head) for head in explored.heads] == [(0, 0), (1, 0)]


def test_hidden_tokens_of_a_masked_model_are_restored() -> None:
    tokens = torch.arange(5, 17)[None]
    hidden = tokens.clone()
    hidden[0, 3::4] = 4  # <mask>
    task = Task(model("roberta"), [Text(hidden, tokens.where(hidden == 4, -100))], "error")
    [explored] = explorer.evaluated_exploration("a", task, tokenizer()).models
    assert text(list(explored.tokens)) == " ".join(f"w{place}" for place in range(1, 11))


METHODS = {
    "OVA": OptimalValueAware,
    "OVA with the mean": partial(OptimalValueAware, mean=True),
    "OVO": OptimalValueOblivious,
    "window": SlidingWindow,
    "sampled": lambda r: SampledKeys(r, seed=0),
}
SIZES = (1, 3)
TOKENS = ("a", "b", "c", "d", "e", "f")


def call(generator: torch.Generator, causal: bool, mask: Tensor | None = None) -> Call:
    """Records a call of two sequences of eight positions and three heads."""
    query, key, value = (torch.randn(2, 3, 8, 4, generator=generator) for _ in range(3))
    return recorded(query, key, value, kernels.Exponential(), causal, 2, mask)


def dense(weights: tuple[int, ...], keys: tuple[int, ...] | range) -> Tensor:
    row = torch.zeros(len(TOKENS))
    row[list(keys)] = torch.tensor(weights) / WHOLE
    return row


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_and_errors_are_those_of_dense_attention(
    generator: torch.Generator, causal: bool, masked: bool
) -> None:
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[..., 1] = False
    layer = call(generator, causal, mask)
    [*heads] = explorer.explored_model("tiny", [layer], TOKENS, METHODS, SIZES).heads
    query, key, value = (x[0, :, :6] for x in (layer.query, layer.key, layer.value))
    cut = None if mask is None else mask[0, :, :6, :6]
    exact = attention_weights(query, key, attn_mask=cut, is_causal=causal)
    output = attention(query, key, value, attn_mask=cut, is_causal=causal)
    assert [(head.layer, head.head) for head in heads] == [(0, 0), (0, 1), (0, 2)]
    of_means = []
    for head in heads:
        for row, explored in enumerate(head.queries):
            weights = dense(explored.weights, range(len(explored.weights)))
            assert torch.allclose(weights, exact[head.head, row], atol=0.5 / WHOLE + 1e-6)
            seen = value[head.head][exact[head.head, row] > 0]
            for size, kept_by_methods in zip(SIZES, explored.kept, strict=True):
                for choice in kept_by_methods:
                    check(choice, size, value[head.head], output[head.head, row], seen.mean(dim=0))
                with_mean = [choice.mean is not None for choice in kept_by_methods]
                assert with_mean == [name == "OVA with the mean" for name in METHODS]
                of_means.append(kept_by_methods[with_mean.index(True)].mean)
    assert 0 in of_means and any(mean and 0.1 < mean < 0.9 for mean in of_means)


def check(choice: Kept, size: int, value: Tensor, output: Tensor, mean: Tensor) -> None:
    of_mean = choice.mean or 0
    assert len(choice.keys) + (of_mean > 0) <= size and len(set(choice.keys)) == len(choice.keys)
    # A window whose keys are all masked keeps none: its output is zero, and so all error is left.
    expected = WHOLE if choice.keys or of_mean else 0
    assert sum(choice.weights) + WHOLE * of_mean == pytest.approx(expected, abs=size)
    assert choice.error is not None
    approximate = dense(choice.weights, choice.keys) @ value + of_mean * mean
    error = (approximate - output).square().sum() / output.square().sum()
    assert choice.error == pytest.approx(float(error), rel=0.05, abs=0.05)  # rounded weights


def test_heads_are_those_asked_for(generator: torch.Generator) -> None:
    calls = [call(generator, True) for _ in range(2)]
    model = explorer.explored_model("tiny", calls, TOKENS, METHODS, SIZES, heads={(0, 2), (1, 1)})
    assert [(head.layer, head.head) for head in model.heads] == [(0, 2), (1, 1)]


def test_an_output_of_zero_has_no_relative_error(generator: torch.Generator) -> None:
    layer = call(generator, False)
    zero = recorded(
        layer.query,
        layer.key,
        0 * layer.value,
        layer.kernel,
        False,
        0,
    )
    [head, *_] = explorer.explored_model("tiny", [zero], TOKENS, METHODS, SIZES).heads
    assert {choice.error for choice in head.queries[0].kept[0]} == {None}


def test_more_tokens_than_keys_are_refused(generator: torch.Generator) -> None:
    line, calls = "9 tokens given for a call of 8 keys", [call(generator, True)]
    assert_refused(line, explorer.explored_model, "tiny", calls, "abcdefghi", METHODS, SIZES)


def test_json_is_read_back_and_small(generator: torch.Generator) -> None:
    model: Model = explorer.explored_model("tiny", [call(generator, True)], TOKENS, METHODS, SIZES)
    exploration = Exploration(SIZES, tuple(METHODS), (model,))
    text = exploration.to_json()
    assert Exploration.from_json(text) == exploration
    before = text.replace(",null]", "]")  # what records from before the mean have
    assert before != text and Exploration.from_json(before) == exploration
    assert json.loads(text)["models"][0]["tokens"] == list(TOKENS)
    assert len(text) < 300 * len(model.heads) * len(TOKENS)
