"""Random tasks that are answered from the context alone, without data and without knowledge.

A batch is {"input_ids", "labels"}, both int64 (rows, length). `labels[n]` is the token that the
logits of position n should predict, the one after it; -100 where the context does not decide it.
The first `prefix` positions hold everything the answers need: a key-value cache has to keep it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, one_hot
from torch.utils.data import Dataset

from value_aware_attention.measurement.masking import IGNORED
from value_aware_study.data.text import SPLITS

SMALLEST, HELD = 0.25, 0.3
"""Share of a task's size at which a curriculum starts, and share of its growth spent there."""

Batch = dict[str, Tensor]


class InContextTask(ABC):
    """Draws rows of a task and measures a model's logits on them, from position `prefix` on."""

    prefix: int
    length: int

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Counts the tokens."""

    @abstractmethod
    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        """Draws a batch of `rows` rows."""

    def smaller(self, share: float) -> Self:
        """Returns a task with about `share` of the facts to remember, from the same vocabulary."""
        return self

    def metrics(
        self, logits: Float[Tensor, "rows N vocabulary"], batch: Batch
    ) -> dict[str, Float[Tensor, " rows"]]:
        """Measures each row's answers at positions from `prefix` on.

        nats: mean cross-entropy. accuracy: share of answers whose logit is the largest.
        exact_match: 1 where all of a row's answers are right, else 0.
        """
        labels = self._served(batch)
        scored = labels != IGNORED
        right = ((logits.argmax(-1) == labels) & scored).sum(-1) / scored.sum(-1)
        return {
            "nats": _nats(logits, labels),
            "accuracy": right,
            "exact_match": (right == 1).to(right.dtype),
        }

    def _served(self, batch: Batch) -> Int[Tensor, "rows N"]:
        """Returns the labels from position `prefix` on; the earlier ones are ignored."""
        positions = torch.arange(self.length, device=batch["labels"].device)
        return batch["labels"].where(positions >= self.prefix, IGNORED)


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(InContextTask):
    """Multi-query associative recall (MQAR, Arora et al. 2023): k v k v ..., then keys are asked.

    The prefix states each of `pairs` (key, value) pairs at least once, at random; after it keys are
    asked at random and their values follow. The value of a key is scored if the row has held the
    key before. Keys are the even tokens, values the odd ones; every row has all of them, and rows
    differ only in which value belongs to which key.
    """

    pairs: int
    prefix: int
    length: int

    def __post_init__(self) -> None:
        if self.pairs < 2:
            raise ValueError(f"pairs is {self.pairs}; it must be at least 2")
        if self.prefix % 2 or self.length % 2 or not 2 * self.pairs <= self.prefix < self.length:
            raise ValueError(
                f"prefix {self.prefix} and length {self.length} must be even, the prefix at least "
                f"2 pairs = {2 * self.pairs} and shorter than the length"
            )

    @property
    def vocabulary_size(self) -> int:
        return 2 * self.pairs

    def smaller(self, share: float) -> Self:
        pairs = max(2, round(share * self.pairs))
        prefix = max(2 * pairs, 2 * round(share * self.prefix / 2))
        asks = max(1, round(share * (self.length - self.prefix) / 2))
        return replace(self, pairs=pairs, prefix=prefix, length=prefix + 2 * asks)

    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        values = 2 * _permutations((rows, self.pairs), generator) + 1
        # with every key asked once, a model would learn to leave out the values that were given
        asks = (self.length - self.prefix) // 2
        asked = torch.randint(self.pairs, (rows, asks), generator=generator)
        order = torch.cat([self._stated(rows, generator), asked], 1)
        key, value = 2 * order, values.gather(1, order)
        known = (order[:, :, None] == order[:, None, :]).tril(-1).any(-1)
        labels = torch.stack([value.where(known, IGNORED), torch.full_like(value, IGNORED)], -1)
        return {
            "input_ids": torch.stack([key, value], -1).flatten(1),
            "labels": labels.flatten(1),
        }

    def _stated(self, rows: int, generator: torch.Generator) -> Int[Tensor, "rows slots"]:
        """Draws the pair in each slot of the prefix: each pair once, then any, shuffled."""
        slots = self.prefix // 2
        order = torch.randint(self.pairs, (rows, slots), generator=generator)
        order[:, : self.pairs] = torch.arange(self.pairs)
        return order.gather(1, _permutations((rows, slots), generator))

    def _served(self, batch: Batch) -> Int[Tensor, "rows N"]:
        """Ignores keys that were asked before after the prefix: their values stand there too."""
        served = batch["input_ids"][:, self.prefix :]
        again = (served[:, :, None] == served[:, None, :]).tril(-1).any(-1)
        labels = super()._served(batch)
        labels[:, self.prefix :].masked_fill_(again, IGNORED)
        return labels


@dataclass(frozen=True, kw_only=True)
class MarkovChains(InContextTask):
    """In-context Markov chains (Edelman et al. 2024): each row has transitions of its own.

    For every row and state, the law of the next state is drawn uniformly among all laws (Dirichlet
    with parameters 1); the first state is uniform. Every position is scored.
    """

    states: int
    prefix: int
    length: int

    def __post_init__(self) -> None:
        if self.states < 2:
            raise ValueError(f"states is {self.states}; it must be at least 2")
        if not 1 <= self.prefix < self.length:
            raise ValueError(f"prefix {self.prefix} must lie between 1 and length {self.length}")

    @property
    def vocabulary_size(self) -> int:
        return self.states

    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        # independent exponentials, normalised, are uniform on the simplex; multinomial normalises
        laws = torch.empty(rows, self.states, self.states).exponential_(generator=generator)
        state = torch.randint(self.states, (rows,), generator=generator)
        chain = [state]
        for _ in range(self.length):
            law = laws[torch.arange(rows), state]
            state = torch.multinomial(law, 1, generator=generator).squeeze(1)
            chain.append(state)
        tokens = torch.stack(chain, 1)
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    def bayes(self, input_ids: Int[Tensor, "rows N"]) -> Float[Tensor, "rows N states"]:
        """Computes the best prediction of each next state given the row so far: the posterior law.

        Laplace's rule: (transitions a -> b so far + 1) / (transitions from a so far + states), a
        the state at the position. It is the posterior mean of the law of a.
        """
        following = one_hot(input_ids[:, 1:], self.states).double()
        same = input_ids[:, :, None] == input_ids[:, None, :-1]
        counts = same.double().tril(-1) @ following + 1
        return (counts / counts.sum(-1, keepdim=True)).float()

    def metrics(
        self, logits: Float[Tensor, "rows N vocabulary"], batch: Batch
    ) -> dict[str, Float[Tensor, " rows"]]:
        """Measures each row at positions from `prefix` on.

        nats: mean cross-entropy. nats_to_bayes: mean KL(Bayes || model). Its expectation is the
        cross-entropy in excess of that of `bayes`, with far less noise.
        """
        distance = kl_div(
            logits.log_softmax(-1), self.bayes(batch["input_ids"]), reduction="none"
        ).sum(-1)
        return {
            "nats": _nats(logits, self._served(batch)),
            "nats_to_bayes": distance[:, self.prefix :].mean(-1),
        }


@dataclass(frozen=True, kw_only=True)
class Copying(InContextTask):
    """Copying: a random string of `prefix` symbols, a separator, the string again.

    The second string is scored. A row has 2 `prefix` positions: its last symbol is a label only.
    """

    symbols: int
    prefix: int

    def __post_init__(self) -> None:
        if self.symbols < 2 or self.prefix < 1:
            raise ValueError(
                f"symbols {self.symbols} must be at least 2, prefix {self.prefix} at least 1"
            )

    @property
    def length(self) -> int:  # type: ignore[override]
        return 2 * self.prefix

    @property
    def vocabulary_size(self) -> int:
        return self.symbols + 1

    def draw(self, rows: int, generator: torch.Generator) -> Batch:
        string = torch.randint(self.symbols, (rows, self.prefix), generator=generator)
        separator = torch.full((rows, 1), self.symbols)
        return {
            "input_ids": torch.cat([string, separator, string[:, :-1]], 1),
            "labels": torch.cat([torch.full_like(string, IGNORED), string], 1),
        }


class InContextBatches(Dataset[Batch]):
    """Yields a task's batches by step: item s is a function of (seed, s, split) alone.

    Each split draws rows of its own, whatever the seed. During the first share `growing` of the
    `train` steps the task is smaller: a quarter of its size at first, then linearly larger.
    """

    def __init__(
        self,
        task: InContextTask,
        *,
        batch_size: int,
        steps: int,
        seed: int,
        split: str,
        growing: float = 0.0,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; it must be one of {', '.join(SPLITS)}")
        if not 0 <= growing <= 1:
            raise ValueError(f"growing is {growing}; it must lie between 0 and 1")
        self.task, self.batch_size, self.steps, self.seed = task, batch_size, steps, seed
        self.growing = growing * steps if split == "train" else 0.0
        self.split = SPLITS.index(split)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is outside 0 .. {self.steps - 1}")
        # SeedSequence keeps (1, 2) and (2, 1) apart
        mixed = np.random.SeedSequence((self.seed, step, self.split)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0] >> np.uint64(1)))
        return self._task(step).draw(self.batch_size, generator)

    def _task(self, step: int) -> InContextTask:
        if step >= self.growing:
            return self.task
        grown = max(0.0, (step / self.growing - HELD) / (1 - HELD))
        return self.task.smaller(SMALLEST + (1 - SMALLEST) * grown)


def _permutations(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws random orders of 0 .. shape[-1] - 1."""
    return torch.rand(shape, generator=generator).argsort(-1)


def _nats(logits: Tensor, labels: Tensor) -> Float[Tensor, " rows"]:
    """Computes each row's mean cross-entropy over its scored positions."""
    nats = cross_entropy(logits.mT, labels, ignore_index=IGNORED, reduction="none")
    return nats.sum(-1) / (labels != IGNORED).sum(-1)
