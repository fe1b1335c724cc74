"""What compressed caches lose on prompts that are read once."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from value_aware_attention.records.cache_record import FULL
from value_aware_attention.records.estimate import Estimate, estimate
from value_aware_attention.records.record import JsonRecord, RunOn


@dataclass(frozen=True, kw_only=True)
class PromptCell:
    """Holds the losses of one cache on every prompt; the numbers are by prompt.

    Attributes:
        cache: Its name.
        keep: Share of the prompt's keys that heads keep on average.
        kl: KL(exact || compressed) in nats a predicted token, at least 1e-12.
        nats: -log probability of a predicted token.
        right: Share of the predicted tokens that are the model's likeliest ones; 1: the whole
            answer is right.
    """

    cache: str
    keep: float
    kl: tuple[float, ...]
    nats: tuple[float, ...]
    right: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PromptRecord(JsonRecord):
    """Compressed caches on prompts of one kind and length; the first cell has the full cache.

    Attributes:
        task: Kind of the prompts, such as "needles".
        text: Name of the text that they are cut from; `description` has its title and licence.
        prefix: Tokens of a prompt.
    """

    version: ClassVar[int] = 1
    made_by: ClassVar[str] = "python -m pipelines.caches"
    model: str
    task: str
    text: str
    description: str
    prefix: int
    run_on: RunOn
    cells: tuple[PromptCell, ...]

    def check(self) -> None:
        """Raises ValueError for content that no measurement writes."""
        if not self.cells or self.cells[0].cache != FULL:
            raise ValueError(f"its first cell is not of the {FULL}")
        if len(sizes := {len(cell.kl) for cell in self.cells}) > 1:
            raise ValueError(f"cells have {sorted(sizes)} prompts; they must have one number")

    def ratio(self, cell: PromptCell, other: PromptCell) -> Estimate:
        """Computes the geometric mean of KL over another cache's KL, paired over prompts."""
        logs = np.log(np.array(cell.kl)) - np.log(np.array(other.kl))
        log = estimate(logs, np.ones_like(logs))
        ends = {end: None if x is None else float(np.exp(x)) for end, x in vars(log).items()}
        return Estimate(**ends)
