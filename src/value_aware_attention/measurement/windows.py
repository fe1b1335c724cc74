"""Cuts a text into windows, for measuring any language model or encoder."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from random import Random

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from value_aware_attention.arguments import check_at_least
from value_aware_attention.hugging_face.layers import attention_layers, auto_class
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.masking import mask_tokens
from value_aware_attention.measurement.recorded import evenly_spaced
from value_aware_attention.measurement.task import Task, Text
from value_aware_attention.records.record import TextRead


@dataclass(frozen=True)
class TextWindows:
    """The windows read, their places among all of the text's windows, and the text's size.

    Attributes:
        special_tokens: Number of special tokens that the tokenizer puts around each window.
        begins_with_bos: True: these begin with BOS, for a model that continues a text.
    """

    tokens: Int[Tensor, "W L"]
    places: tuple[int, ...]
    available: int
    text_tokens: int
    special_tokens: int
    begins_with_bos: bool = False

    def __len__(self) -> int:
        return len(self.places)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def share_read(self) -> float:
        """The share of the text's tokens that are in the windows."""
        return len(self) * (self.length - self.special_tokens) / self.text_tokens

    def described(self, text: TextRead) -> TextRead:
        """Adds the share of the text in the windows to a record's description of its text."""
        return replace(
            text, available_units=self.available, tokens=self.text_tokens,
            share_read=self.share_read, begins_with_bos=self.begins_with_bos,
        )  # fmt: skip


def text_windows(
    texts: str | Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    windows: int | None,
    seed: int | None = None,
    closed: bool = True,
) -> TextWindows:
    """Takes at most `windows` windows of `length` tokens, evenly spaced or drawn with `seed`.

    The tokens of all `texts` are cut one after the other; a rest shorter than a window is left out.
    Each window gets the tokenizer's special tokens around it. `closed` False leaves out those at
    its end, for models that continue a text. Raises ValueError if the text is empty or fills no
    window.
    """
    if windows is not None:
        check_at_least(1, windows=windows)
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not any(text.strip() for text in texts):
        raise ValueError("the text is empty")
    before, after = special_tokens(tokenizer)
    after = after if closed else []
    read = length - len(before) - len(after)
    if read < 1:
        raise ValueError(f"length is {length}; it must be above {length - read}, special tokens")
    tokens = list(
        chain.from_iterable(
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts
        )
    )
    available = len(tokens) // read
    if not available:
        raise ValueError(
            f"the text has {len(tokens)} token{'s' * (len(tokens) != 1)}, a window of {length} "
            f"needs {read} of them: give a longer text or a smaller length"
        )
    places = evenly_spaced(available, windows)
    if seed is not None and windows is not None and windows < available:
        places = sorted(Random(seed).sample(range(available), windows))
    rows = [before + tokens[place * read : (place + 1) * read] + after for place in places]
    return TextWindows(
        torch.tensor(rows), tuple(places), available, len(tokens), length - read,
        begins_with_bos=adds_bos(tokenizer) and not closed,
    )  # fmt: skip


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer begins a text with BOS, as Gemma's does."""
    return special_tokens(tokenizer)[0][:1] == [tokenizer.bos_token_id]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Finds the special tokens that the tokenizer puts before and after a text.

    It tokenizes a word, if necessary one of the vocabulary: if a tokenizer drops the text, tokens
    before and after it look alike.
    """
    for word in chain("aA0", islice(tokenizer.get_vocab(), 1000)):
        with suppress(Exception):  # from Rust, for a tokenizer without a token for unknown words
            encoding = tokenizer(word, return_special_tokens_mask=True)
            tokens, special = encoding["input_ids"], encoding["special_tokens_mask"]
            if not all(special):
                before, after = special.index(0), special[::-1].index(0)
                return list(tokens[:before]), list(tokens[len(tokens) - after :])
    return [], []


def windows_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: TextWindows,
    *,
    seed: int = 0,
    kernel: Kernel | None = None,
    context: int = 0,
) -> Task:
    """Measures a model on windows of text, each a separate part, by its `metric_of`.

    For a masked language model, 15% of the ordinary tokens of each window are hidden; the choice
    depends only on `seed` and the window's place in the text. A causal model is scored on every
    token of a window after the first, an encoder on every position. A causal model's first
    `context` tokens are only context, without predictions or errors; its other predictions are
    compared with the exact model's. `kernel` None is the model's own. Raises ValueError for a
    masked language model whose tokenizer has no mask token.
    """
    metric, rows = metric_of(model), windows.tokens.split(1)
    context = context if metric == "perplexity" else 0
    if metric == "perplexity":
        texts = [Text.of_tokens(row, context=context) for row in rows]
    elif metric == "cosine":
        texts = [Text(row, row) for row in rows]
    else:
        if tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token; a masked language model needs one")
        size = min(len(tokenizer), vocabulary_size(model))
        texts = [
            Text(*_masked(row, place, tokenizer, size, seed))
            for row, place in zip(rows, windows.places, strict=True)
        ]
    return Task(
        model, texts, metric, kernel=kernel, first_row=context, scored_rows=context > 0,
        predictions=context > 0,
    )  # fmt: skip


def _masked(
    tokens: Tensor, place: int, tokenizer: PreTrainedTokenizerBase, size: int, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    own_seed = torch.randint(2**62, (place + 1,), generator=generator)[place]
    inputs, labels = mask_tokens(
        tokens[0],
        generator=torch.Generator().manual_seed(int(own_seed)),
        mask_token=tokenizer.mask_token_id,
        special_tokens=tokenizer.all_special_ids,
        vocabulary_size=size,
    )
    return inputs[None], labels[None]


def metric_of(model: PreTrainedModel) -> str:
    """Finds a model's end metric from the head of its class, as transformers lists them.

    It is "error" for a masked language model, "perplexity" for a causal one, else "cosine". Raises
    ValueError for an encoder-decoder, and for a model whose attention cannot be replaced.
    """
    attention_layers(model)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder; give a masked or a causal "
            f"language model, or an encoder alone"
        )
    return {AutoModelForMaskedLM: "error", AutoModelForCausalLM: "perplexity"}.get(
        auto_class(model.config, type(model).__name__), "cosine"
    )


def vocabulary_size(model: PreTrainedModel) -> int:
    """Counts the tokens that a model knows. Raises ValueError if it reads other input."""
    with suppress(NotImplementedError):  # such as a model of images
        size = getattr(model.get_input_embeddings(), "num_embeddings", None)
        if isinstance(size, int) and model.main_input_name == "input_ids":
            return size
    raise ValueError(
        f"{type(model).__name__} reads no text, or not text alone; give a language model or an "
        f"encoder of text"
    )
