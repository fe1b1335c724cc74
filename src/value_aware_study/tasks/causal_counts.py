"""Count models beside a causal LM, scored on exactly its targets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from value_aware_attention.measurement.cells import end_metric
from value_aware_attention.measurement.record import Baseline
from value_aware_attention.measurement.tasks import Task, UnitSums
from value_aware_study.data.batches import CausalBatches
from value_aware_study.data.tokens import read_tokens
from value_aware_study.tasks.kneser_ney import (
    TOKENS_AT_ONCE,
    Bigram,
    Probabilities,
    Tokens,
    pair_counts,
    unigram,
)

__all__ = ["CausalCounts"]


@dataclass(frozen=True, eq=False)
class CausalCounts:
    """Scores unigram, bigram, and the bigram of no more tokens than the causal LM was trained on.

    `training` is the file of the training stream, `batches` what the model was trained on.
    """

    training: Path | str
    batches: CausalBatches

    def __call__(self, task: Task, exact: UnitSums) -> dict[str, Baseline]:
        """Returns each model's perplexity on the task's targets, with its paired interval."""
        vocabulary_size = task.model.config.vocabulary_size
        stream = read_tokens(self.training, dimensions=1)
        every = pair_counts(_rows_of_stream(stream), vocabulary_size)
        read = pair_counts(_rows_of_batches(self.batches), vocabulary_size)
        of_token = unigram(every)
        models: dict[str, tuple[csr_array, Callable[[Tokens, Tokens], Probabilities]]] = {
            "unigram": (every, lambda previous, following: of_token[following]),
            "bigram": (every, Bigram(every).probabilities),
            "bigram_tokens_read": (read, Bigram(read).probabilities),
        }
        return {
            name: Baseline(
                tokens=int(counts.sum()),
                **end_metric(_nats(task, probabilities), exact, task.metric),
            )
            for name, (counts, probabilities) in models.items()
        }


def _nats(task: Task, probabilities: Callable[[Tokens, Tokens], Probabilities]) -> UnitSums:
    """Computes -log p of the targets of each of the task's windows."""
    totals, counts = [], []
    for inputs, labels in zip(task.texts[0].inputs, task.texts[0].labels, strict=True):
        asked = labels >= 0
        found = probabilities(np.array(inputs[asked]), np.array(labels[asked]))
        totals.append(-np.log(found).sum())
        counts.append(float(len(found)))
    return UnitSums(np.array(totals), np.array(counts))


def _rows_of_stream(stream: Tokens) -> Iterator[Tokens]:
    """Yields the stream as single rows, each from the last token of the one before."""
    for start in range(0, len(stream) - 1, TOKENS_AT_ONCE):
        yield np.asarray(stream[None, start : start + TOKENS_AT_ONCE + 1])


def _rows_of_batches(batches: CausalBatches) -> Iterator[Tokens]:
    """Yields the rows that a model is trained on, several batches together."""
    together = max(1, TOKENS_AT_ONCE // (batches.batch_size * batches.length))
    for start in range(0, len(batches), together):
        steps = range(start, min(start + together, len(batches)))
        yield np.concatenate([batches[step].numpy() for step in steps])
