"""Text cut into token windows of one length, without padding, of which a sample is read."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, takewhile
from random import Random

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from value_aware_attention.measurement.recorded import evenly_spaced

__all__ = ["TextWindows", "text_windows"]


@dataclass(frozen=True)
class TextWindows:
    """Holds the windows read, their places among all of the text's windows, and its size."""

    tokens: Int[Tensor, "W L"]
    places: tuple[int, ...]
    available: int
    text_tokens: int
    special_tokens: int
    """Special tokens that the tokenizer put around each window"""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def share_read(self) -> float:
        """Returns the share of the text's tokens that are in the windows."""
        return len(self) * (self.length - self.special_tokens) / self.text_tokens


def text_windows(
    texts: str | Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    windows: int | None,
    seed: int | None = None,
    closed: bool = True,
) -> TextWindows:
    """Takes at most `windows` windows of `length` tokens, evenly spaced or drawn by `seed`.

    The tokens of all `texts` are cut one after the other; a rest shorter than a window is left out.
    Each window gets the special tokens that the tokenizer puts around a text; not `closed` leaves
    out those at its end, for models that read on. Raises ValueError where the text is empty or does
    not fill a window.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not any(text.strip() for text in texts):
        raise ValueError("the text is empty")
    before, after = special_tokens(tokenizer, next(text for text in texts if text.strip()))
    after = after if closed else []
    read = length - len(before) - len(after)
    if read < 1:
        raise ValueError(f"length is {length}; it must be above {length - read}, special tokens")
    encoded = [tokenizer(text, add_special_tokens=False, verbose=False) for text in texts]
    tokens = list(chain.from_iterable(encoding["input_ids"] for encoding in encoded))
    available = len(tokens) // read
    if not available:
        raise ValueError(
            f"the text has {len(tokens)} tokens, a window of {length} needs {read} of them: give a "
            f"longer text or a smaller length"
        )
    places = _places(available, windows, seed)
    rows = [before + tokens[place * read : (place + 1) * read] + after for place in places]
    special = len(before) + len(after)
    return TextWindows(torch.tensor(rows), tuple(places), available, len(tokens), special)


def special_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Finds the special tokens that the tokenizer puts before and after a text."""
    encoding = tokenizer(text[:100], return_special_tokens_mask=True)
    tokens, special = encoding["input_ids"], encoding["special_tokens_mask"]
    before = len(list(takewhile(bool, special)))
    after = len(list(takewhile(bool, reversed(special))))
    if before == len(tokens):  # nothing but special tokens: which side they are on is not known
        return [], []
    return list(tokens[:before]), list(tokens[len(tokens) - after :])


def _places(available: int, windows: int | None, seed: int | None) -> list[int]:
    if windows is not None and windows < 1:
        raise ValueError(f"windows is {windows}; it must be at least 1")
    if seed is None or windows is None or windows >= available:
        return evenly_spaced(available, windows)
    return sorted(Random(seed).sample(range(available), windows))
