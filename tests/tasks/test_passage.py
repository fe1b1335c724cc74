"""A passage is whole sentences, or at least whole words, in a model's tokens."""

import pytest
import torch
from probed import model, tokenizer, words

from value_aware_attention.measurement.task import Task, Text
from value_aware_study.evaluation import explorer
from value_aware_study.evaluation.explorer import passage

SENTENCES = [f"W{place} {' '.join(['w1', 'w2'] * 10)} w{place}." for place in range(4)]
NOTHING: tuple[list[int], list[int]] = ([], [])


def text(tokens: list[str]) -> str:
    return "".join(tokens).strip()


def test_whole_sentences_are_taken_and_the_first_of_a_text_is_not() -> None:
    written = f"{' '.join(SENTENCES)}\n\nParameters\n--------\nx : w1 w2"
    chosen = passage([written], tokenizer(), NOTHING)
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

    chosen = passage([fewer, wordy], Pieces(), ([7], [9]))  # type: ignore[arg-type]
    assert chosen.pieces[0] == " 7" and chosen.pieces[-1] == " 9" and len(chosen.ids) == 37


def test_without_sentences_as_many_whole_words_as_fit_are_taken() -> None:
    chosen = passage([words(100)], tokenizer(), ([0], [2]), most=20)
    assert text(chosen.pieces) == f"<s> {' '.join(words(100).split()[1:19])} </s>"
    assert text(passage(["alone"], tokenizer(), NOTHING).pieces) == "alone"
    with pytest.raises(ValueError, match="the text is empty"):
        passage([" \n"], tokenizer(), NOTHING)


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
