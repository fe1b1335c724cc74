"""A mixture of in-context tasks for one model, each with tokens of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention.measurement.masking import IGNORED
from value_aware_study.data.in_context import Batch, InContextTask


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
        return replace(self, task=self.task.smaller(share))

    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        batch = self.task.draw(rows, generator)
        return {name: (x + self.first).where(x != IGNORED, IGNORED) for name, x in batch.items()}

    def metrics(
        self, logits: Float[Tensor, "rows N vocabulary"], batch: Batch
    ) -> dict[str, Float[Tensor, " rows"]]:
        own = {name: (x - self.first).where(x != IGNORED, IGNORED) for name, x in batch.items()}
        last = self.first + self.task.vocabulary_size
        return self.task.metrics(logits[..., self.first : last], own)


@dataclass(frozen=True, kw_only=True)
class Mixture(InContextTask):
    """Draws batches with as many rows of each task, one task's after another's."""

    tasks: Sequence[InContextTask]
    names: Sequence[str]
    share: float = 1.0
    """Part of its size that each task has"""

    def __post_init__(self) -> None:
        sizes = [(task.prefix, task.length) for task in self.tasks]
        if len(set(sizes)) != 1:
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

    def part(self, name: str) -> MixedTask:
        """Returns one of the tasks, with the tokens that it has here."""
        number = list(self.names).index(name)
        first = sum(task.vocabulary_size for task in self.tasks[:number])
        return MixedTask(self.tasks[number], first, self.vocabulary_size)

    def smaller(self, share: float) -> Self:
        return replace(self, share=share)

    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        """Draws a batch; raises ValueError unless rows divide evenly over the tasks."""
        if rows % len(self.tasks):
            raise ValueError(f"{rows} rows; they must be a multiple of {len(self.tasks)} tasks")
        drawn = [
            self.part(name).smaller(self.share).draw(rows // len(self.tasks), generator)
            for name in self.names
        ]
        fill = {"input_ids": 0, "labels": IGNORED}  # after the end of a smaller task
        return {
            name: torch.cat([pad(x[name], (0, self.length - x[name].shape[1]), value=unread)
                             for x in drawn])
            for name, unread in fill.items()
        }  # fmt: skip

    def metrics(
        self, logits: Float[Tensor, "rows N vocabulary"], batch: Batch
    ) -> dict[str, Float[Tensor, " rows"]]:
        """Measures each task's rows, under "recall_accuracy" and so on.

        The other rows are 0 and its own so much larger that the mean over all rows is the task's.
        "nats" is the mean over tasks.
        """
        found = dict(self._metrics(logits, batch))
        nats = torch.stack([found.pop(f"{name}_nats") for name in self.names]).mean(dim=0)
        return {"nats": nats} | found

    def _metrics(self, logits: Tensor, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            part = self.part(name)
            token = batch["input_ids"][:, 0] - part.first
            own = (token >= 0) & (token < part.task.vocabulary_size)
            rows = {key: x[own] for key, x in batch.items()}
            for metric, x in part.metrics(logits[own], rows).items():
                whole = x.new_zeros(len(logits))
                whole[own] = len(logits) / max(1, len(x)) * x
                yield f"{name}_{metric}", whole
