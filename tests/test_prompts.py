"""Prompts have their length, hide what is asked, and ask for it after the prompt alone."""

from collections.abc import Callable

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from value_aware_attention.measurement.caches import Prompt
from value_aware_study.evaluation.prompts import (
    NEEDLES,
    needles,
    passages,
    recalled_list,
    running_text,
)

LENGTH = 1000
TEMPLATE = "{% for turn in messages %}<{{ turn.content }}>{% endfor %}answer: "
LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Makes a token of every letter."""
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token=" "))
    plain.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=TEMPLATE)


def text(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> tuple[str, str, str]:
    """Decodes the prompt, the question after it, and the answer."""
    words = "".join(LETTERS[token] for token in prompt.tokens)
    return words[: prompt.prefix], words[prompt.prefix : prompt.answer], words[prompt.answer :]


def test_a_needle_is_asked_for_after_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [needles(tokenizer, [0] * LENGTH, LENGTH, seed) for seed in range(8)]
    for prompt in prompts:
        before, question, answer = text(tokenizer, prompt)
        assert len(before) == LENGTH and before.startswith("<Some special magic numbers")
        assert before.count("special magic numbers for ") == NEEDLES
        key = question.split("number for ")[1].split()[0]
        assert f" One of the special magic numbers for {key} is:{answer}." in before
        assert question.startswith("\n\nWhat is") and question.endswith("text is")
        assert "What is" not in before and len(answer) == 8 and answer[1:].isdigit()
    assert len({text(tokenizer, prompt)[2] for prompt in prompts}) == 8
    again = needles(tokenizer, [0] * LENGTH, LENGTH, 3).tokens
    assert again.tolist() == prompts[3].tokens.tolist()


def test_a_list_is_asked_for_after_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    before, question, answer = text(tokenizer, recalled_list(tokenizer, [0] * LENGTH, LENGTH, 0))
    assert len(before) == LENGTH and f" The list is:{answer}" in before
    assert answer.count(",") == 11 and answer.endswith(".") and question.endswith("The list is:")


def test_running_text_goes_on(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = running_text(tokenizer, list(range(60)), 50, 0)
    assert (prompt.tokens.tolist(), prompt.prefix, prompt.answer) == (list(range(60)), 50, 51)


@pytest.mark.parametrize("build", [needles, recalled_list])
def test_what_cannot_be_asked_is_named(
    tokenizer: PreTrainedTokenizerFast, build: Callable[..., Prompt]
) -> None:
    with pytest.raises(ValueError, match=r"prompts have 90 tokens; .* at least ") as refused:
        build(tokenizer, [0] * 90, 90, 0)
    least = int(str(refused.value).rpartition(" ")[2])
    assert len(build(tokenizer, [0] * least, least, 0).tokens) > least


def test_without_a_chat_template_the_words_are_plain(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    before, question, _ = text(plain, recalled_list(plain, [0] * LENGTH, LENGTH, 0))
    assert len(before) == LENGTH and before.startswith("Remember the list")
    assert question == "\n\nRepeat the list.\n\nThe list is:"


@pytest.fixture
def gemma(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same letters, where a text begins with BOS, here ~."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bos = ("~", LETTERS.index("~"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="~ $A", special_tokens=[bos]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="~", chat_template=f"{{{{ bos_token }}}}{TEMPLATE}"
    )


def letters(tokenizer: PreTrainedTokenizerFast, *texts: str) -> list[str]:
    """Decodes passages of 6 tokens."""
    return ["".join(LETTERS[token] for token in x) for x in passages(tokenizer, texts, 6)]


def test_every_prompt_begins_with_bos_where_its_tokenizer_adds_it(
    gemma: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert letters(gemma, "abcdefgh", "ijklmnop") == ["~abcde", "~ijklm"]
    assert letters(gemma, "ab", "cd", "efghijk") == ["~ab\n\nc", "~efghi"]
    assert letters(gemma, "abcdefghijklmnopq") == ["~abcde", "~fghij", "~klmno"]
    passage = next(passages(gemma, ["x" * LENGTH], LENGTH))
    for template in (gemma.chat_template, TEMPLATE):
        gemma.chat_template = template
        before, *_ = text(gemma, needles(gemma, passage, LENGTH, 0))
        same, *_ = text(tokenizer, needles(tokenizer, passage[1:], LENGTH - 1, 0))
        assert before == f"~{same}"


def test_passages_begin_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    """Short texts are joined; a text gives one passage, but where it is alone."""
    assert letters(tokenizer, "abcdefgh", "ijklmnop", "q") == ["abcdef", "ijklmn"]
    assert letters(tokenizer, "ab", "cd", "efghijk") == ["ab\n\ncd", "efghij"]
    assert letters(tokenizer, "abcdefghijklmnopq") == ["abcdef", "ghijkl"]
    assert letters(tokenizer, "abc") == [] and letters(tokenizer, "abc", "d") == ["abc\n\nd"]
