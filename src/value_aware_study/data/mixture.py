"""A mixture of in-context tasks for one model, each with tokens of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.measurement.masking import IGNORED
from value_aware_study.data.in_context import Batch, InContextTask


@dataclass(frozen=True, kw_only=True)
class Mixture(InContextTask):
    """Draws batches of one task after another at random, as `MixedTask` shows it to the model."""

    tasks: Sequence[InContextTask]
    share: float = 1.0
    """Part of its size that each task has"""

    def __post_init__(self) -> None:
        if len({(task.prefix, task.length) for task in self.tasks}) != 1:
            sizes = [(task.prefix, task.length) for task in self.tasks]
            raise ValueError(f"(prefix, length) of tasks are {sizes}; they must be one pair")

    @property
    def prefix(self) -> int:  # type: ignore[override]
        return self.tasks[0].prefix

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.tasks[0].length

    @property
    def vocabulary_size(self) -> int:
        return sum(task.vocabulary_size for task in self.tasks)

    def part(self, number: int) -> "MixedTask":
        """Returns one of the tasks, with the tokens that it has here."""
        first = sum(task.vocabulary_size for task in self.tasks[:number])
        return MixedTask(self.tasks[number], first, self.vocabulary_size)

    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        number = int(torch.randint(len(self.tasks), (), generator=generator))
        task = self.part(number)
        return (task if self.share == 1 else task.smaller(self.share)).draw(rows, generator)

    def smaller(self, share: float) -> Self:
        return replace(self, share=share)

    def metrics(
        self, logits: Float[Tensor, "rows N vocabulary"], batch: Batch
    ) -> dict[str, Float[Tensor, " rows"]]:
        """Measures a batch as its task does."""
        firsts = [self.part(number).first for number in range(len(self.tasks))]
        number = sum(int(batch["input_ids"][0, 0]) >= first for first in firsts) - 1
        return self.part(number).metrics(logits, batch)


@dataclass(frozen=True)
class MixedTask(InContextTask):
    """A task whose tokens begin at `first` of a vocabulary of `tokens`."""

    task: InContextTask
    first: int
    tokens: int

    @property
    def vocabulary_size(self) -> int:
        return self.tokens

    @property
    def prefix(self) -> int:  # type: ignore[override]
        return self.task.prefix

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.task.length

    def smaller(self, share: float) -> Self:
        return type(self)(self.task.smaller(share), self.first, self.tokens)

    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        batch = self.task.draw(rows, generator)
        return {name: (x + self.first).where(x != IGNORED, IGNORED) for name, x in batch.items()}

    def metrics(
        self, logits: Float[Tensor, "rows N vocabulary"], batch: Batch
    ) -> dict[str, Float[Tensor, " rows"]]:
        own = {name: (x - self.first).where(x != IGNORED, IGNORED) for name, x in batch.items()}
        last = self.first + self.task.vocabulary_size
        return self.task.metrics(logits[..., self.first : last], own)
