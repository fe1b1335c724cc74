"""Builds prompts with continuations that a compressed cache is read with: answers and text.

A question comes after the prompt, so that no choice of keys has seen it.
"""

from collections.abc import Iterator, Sequence
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from value_aware_attention.measurement.prompted import Prompt

NEEDLES = 4
DIGITS = 7
ITEMS = 12
MARGIN = 8
"""Tokens before the first inserted sentence, and after the last one, at least"""
KEYS = (
    "Athens Berlin Boston Cairo Dallas Denver Dublin Geneva Lima Lisbon Lyon Madrid Munich "
    "Naples Oslo Paris Porto Prague Quito Rome Tokyo Turin Vienna Warsaw"
)
NOUNS = (
    "apple beach bread bridge brush candle chair clock cloud dream fruit garden glass green "
    "heart horse house knife light metal money music night ocean paper piano plant queen river "
    "sheep smile snake stone storm sugar table tiger train water window"
)


def running_text(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prefix: int, continuation: int
) -> Iterator[Prompt]:
    """Cuts a prompt and its continuation from the beginning of each text that is long enough."""
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=prefix + continuation).input_ids
        if len(tokens) == prefix + continuation:
            yield Prompt(torch.tensor(tokens), prefix, prefix + 1)


def needles(tokenizer: PreTrainedTokenizerBase, text: str, prefix: int, seed: int) -> Prompt:
    """Hides keys with numbers in a text and asks for one of them: RULER's multi-key needle.

    The sentences are those of RULER (arXiv 2404.06654, niah_multikey), its distractors `NEEDLES`
    - 1 keys of the same form.
    """
    draw = Random(seed)
    keys = draw.sample(KEYS.split(), NEEDLES)
    numbers = ["".join(draw.choices("123456789", k=DIGITS)) for _ in keys]
    sentences = [
        f" One of the special magic numbers for {key} is: {number}."
        for key, number in zip(keys, numbers, strict=True)
    ]
    asked = draw.randrange(NEEDLES)
    return _asked(
        tokenizer, text, prefix, draw, sentences,
        task="Some special magic numbers are hidden within the following text. Make sure to "
        "memorize them. I will quiz you about the numbers afterwards.",
        question=f"What is the special magic number for {keys[asked]} mentioned in the provided "
        "text?",
        begun=f"The special magic number for {keys[asked]} mentioned in the provided text is",
        answer=f" {numbers[asked]}",
    )  # fmt: skip


def recalled_list(tokenizer: PreTrainedTokenizerBase, text: str, prefix: int, seed: int) -> Prompt:
    """Hides a list of words in a text and asks for all of it."""
    draw = Random(seed)
    words = ", ".join(draw.sample(NOUNS.split(), ITEMS))
    return _asked(
        tokenizer, text, prefix, draw, [f" The list is: {words}."],
        task="Remember the list in the following text.", question="Repeat the list.",
        begun="The list is:", answer=f" {words}.",
    )  # fmt: skip


def _asked(
    tokenizer: PreTrainedTokenizerBase, text: str, prefix: int, draw: Random,
    sentences: Sequence[str], *, task: str, question: str, begun: str, answer: str,
) -> Prompt:  # fmt: skip
    """Hides sentences in a text of `prefix` tokens with its task, and asks after it.

    Raises ValueError for a tokenizer without a chat template, and a text that is too short.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template, by which questions are asked")
    mark = "\0"
    chat = [{"role": "user", "content": f"{task}\n\n{mark}\n\n{question}"}]
    template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    before, after = str(template).split(mark)

    def tokens(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False).input_ids)

    head, hidden = tokens(before), [tokens(sentence) for sentence in sentences]
    room = prefix - len(head) - sum(map(len, hidden))
    haystack = tokens(text[: 16 * prefix])[: max(0, room)]
    if len(haystack) < room or room < 2 * MARGIN + len(hidden):
        raise ValueError(
            f"a text of {len(haystack)} tokens is left for a prompt of {prefix}, {prefix - room} "
            f"of which are the task's: give a longer text, or another length"
        )
    depths = sorted(draw.sample(range(MARGIN, room - MARGIN), len(hidden)))
    inserted = head
    for begin, end, sentence in zip([0, *depths], depths, hidden, strict=False):
        inserted = [*inserted, *haystack[begin:end], *sentence]
    inserted += haystack[depths[-1] :]
    asked = tokens(after + begun)
    return Prompt(torch.tensor([*inserted, *asked, *tokens(answer)]), prefix, prefix + len(asked))
