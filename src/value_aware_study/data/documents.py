"""The unit every source yields."""

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation", "evaluation"]
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")


@dataclass(frozen=True)
class Document:
    """A text and the split its publisher put it in; None leaves the choice to `write_corpus`."""

    text: str
    split: Split | None = None
