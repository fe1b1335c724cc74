"""Builds prompts and their continuations for a compressed cache: answers and running text.

A question follows the prompt, so no choice of keys has seen it.
"""

from collections.abc import Iterator, Sequence
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from value_aware_attention.measurement.caches import Prompt
from value_aware_attention.measurement.windows import special_tokens

NEEDLES = 4
MARGIN = 8
"""Least number of tokens before the first inserted sentence, and after the last one"""
NEEDLE_KEYS = (
    "Athens Berlin Boston Cairo Dallas Denver Dublin Geneva Lima Lisbon Lyon Madrid Munich "
    "Naples Oslo Paris Porto Prague Quito Rome Tokyo Turin Vienna Warsaw"
)
NOUNS = (
    "apple beach bread bridge brush candle chair clock cloud dream fruit garden glass green "
    "heart horse house knife light metal money music night ocean paper piano plant queen river "
    "sheep smile snake stone storm sugar table tiger train water window"
)


def passages(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int
) -> Iterator[list[int]]:
    """Cuts a passage from the start of each text, joining short ones; cuts up a single text.

    Each begins with what the tokenizer puts before a text, such as Gemma's BOS.
    """
    first, _ = special_tokens(tokenizer)
    if len(texts) == 1:
        whole, size = tokenizer(texts[0], add_special_tokens=False).input_ids, tokens - len(first)
        yield from (first + whole[end - size : end] for end in range(size, len(whole) + 1, size))
        return
    passage = [*first]
    for text in texts:
        room = tokens - len(passage)
        passage += tokenizer(
            text[: 16 * room] + "\n\n", truncation=True, max_length=room, add_special_tokens=False
        ).input_ids
        if len(passage) == tokens:
            yield passage
            passage = [*first]


def running_text(
    tokenizer: PreTrainedTokenizerBase, passage: Sequence[int], prefix: int, seed: int
) -> Prompt:
    """Continues a passage with its own text."""
    return Prompt(torch.tensor(passage), prefix, prefix + 1)


def needles(
    tokenizer: PreTrainedTokenizerBase, passage: Sequence[int], prefix: int, seed: int
) -> Prompt:
    """Hides keys with numbers in a text and asks for one of them: RULER's multi-key needle.

    The sentences are RULER's (arXiv 2404.06654, niah_multikey). The distractors are `NEEDLES` - 1
    keys of the same form.
    """
    draw = Random(seed)
    keys = draw.sample(NEEDLE_KEYS.split(), NEEDLES)
    numbers = ["".join(draw.choices("123456789", k=7)) for _ in keys]
    sentences = [
        f" One of the special magic numbers for {key} is: {number}."
        for key, number in zip(keys, numbers, strict=True)
    ]
    asked = draw.randrange(NEEDLES)
    return _asked(
        tokenizer, passage, prefix, draw, sentences,
        task="Some special magic numbers are hidden within the following text. Make sure to "
        "memorize them. I will quiz you about the numbers afterwards.",
        question=f"What is the special magic number for {keys[asked]} mentioned in the provided "
        "text?",
        begun=f"The special magic number for {keys[asked]} mentioned in the provided text is",
        answer=f" {numbers[asked]}",
    )  # fmt: skip


def recalled_list(
    tokenizer: PreTrainedTokenizerBase, passage: Sequence[int], prefix: int, seed: int
) -> Prompt:
    """Hides a list of words in a text and asks for the whole list."""
    draw = Random(seed)
    words = ", ".join(draw.sample(NOUNS.split(), 12))
    return _asked(
        tokenizer, passage, prefix, draw, [f" The list is: {words}."],
        task="Remember the list in the following text.", question="Repeat the list.",
        begun="The list is:", answer=f" {words}.",
    )  # fmt: skip


def _asked(
    tokenizer: PreTrainedTokenizerBase, passage: Sequence[int], prefix: int, draw: Random,
    sentences: Sequence[str], *, task: str, question: str, begun: str, answer: str,
) -> Prompt:  # fmt: skip
    """Hides sentences in a passage: task and passage fill `prefix` tokens, the question follows.

    A tokenizer without a chat template, as of a base model, gets the same words as plain text.
    Raises ValueError for a prompt too short for the task.
    """
    mark = "\0"
    template = words = f"{task}\n\n{mark}\n\n{question}"
    if tokenizer.chat_template is None:
        template += "\n\n"
    else:
        chat = [{"role": "user", "content": words}]
        template = str(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        )
    before, after = template.split(mark)

    def tokens(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False).input_ids)

    first, _ = special_tokens(tokenizer)
    passage = passage[len(first) :]
    head, hidden = tokens(before), [tokens(sentence) for sentence in sentences]
    head = head if head[: len(first)] == first else first + head  # a template may have it too
    room = prefix - len(head) - sum(map(len, hidden))
    if room < (least := 2 * MARGIN + len(hidden)):
        raise ValueError(
            f"prompts have {prefix} tokens; {prefix - room} are the task's, so they must have at "
            f"least {prefix - room + least}"
        )
    depths = sorted(draw.sample(range(MARGIN, room - MARGIN), len(hidden)))
    inserted = head
    for begin, end, sentence in zip([0, *depths], depths, hidden, strict=False):
        inserted = [*inserted, *passage[begin:end], *sentence]
    inserted += passage[depths[-1] : room]
    asked = tokens(after + begun)
    return Prompt(torch.tensor([*inserted, *asked, *tokens(answer)]), prefix, prefix + len(asked))
