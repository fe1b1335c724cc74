"""The unit every source yields."""

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation", "evaluation"]
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")


@dataclass(frozen=True)
class Document:
    """Holds a text and its publisher's split; None leaves the choice to `write_corpus`."""

    text: str
    split: Split | None = None
