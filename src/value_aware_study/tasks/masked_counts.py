"""Count models beside a masked LM, scored on exactly the tokens that it is asked for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from value_aware_attention.measurement.cells import end_metric
from value_aware_attention.measurement.record import Baseline
from value_aware_attention.measurement.tasks import Task, UnitSums
from value_aware_study.data.batches import MaskedSequences
from value_aware_study.tasks.kneser_ney import (
    TOKENS_AT_ONCE,
    Bigram,
    Probabilities,
    Tokens,
    counted,
    pair_counts,
    unigram,
)

__all__ = ["MaskedCounts"]

QUERIES_AT_ONCE = 256
"""Rows of probabilities over the whole vocabulary that are held together."""


@dataclass(frozen=True, eq=False)
class MaskedCounts:
    """Predicts the likeliest ordinary token: of all, after the left neighbour, between both.

    argmax_w c(l, w, r) + p(w | l, r), with p(w | l, r) ~ p(w | l) p(r | w) of `Bigram` and c the
    count of the triple: a triple that was seen decides, the bigrams break its ties and stand in
    for one that was not. Neighbours are what the input shows; one that is <mask> says nothing, and
    p(w) takes the place of p(w | l). `training` are all training sequences.
    """

    training: MaskedSequences

    def __call__(self, task: Task, exact: UnitSums) -> dict[str, Baseline]:
        """Returns each model's error on the task's masked tokens, with its paired interval."""
        size, mask = self.training.vocabulary_size, self.training.mask_token
        inputs, labels = (x.numpy() for x in task.texts[0].take(range(len(task.texts[0].inputs))))
        rows, columns = np.nonzero(labels >= 0)
        counts = np.bincount(rows, minlength=len(labels)).astype(np.float64)
        shown = np.pad(inputs, ((0, 0), (1, 1)), constant_values=mask)
        left, right = shown[rows, columns], shown[rows, columns + 2]
        pairs = pair_counts(_rows_of_sequences(self.training), size)
        nothing, unseen = np.full_like(left, mask), csr_array((len(left), size))
        models = {
            "unigram": (nothing, nothing, unseen),
            "left_neighbour": (left, nothing, unseen),
            "both_neighbours": (left, right, self._between(left, right)),
        }
        records = {}
        for name, chosen in zip(models, self._likeliest(pairs, models.values()), strict=True):
            wrong = np.bincount(rows, chosen != labels[rows, columns], minlength=len(labels))
            sums = UnitSums(wrong.astype(np.float64), counts)
            measured = end_metric(sums, exact, task.metric)
            records[name] = Baseline(tokens=int(pairs.sum()), **measured)
        return records

    def _between(self, left: Tokens, right: Tokens) -> csr_array:
        """c(l, w, r) of every token w for each pair of neighbours, (pairs, V)."""
        size = self.training.vocabulary_size
        asked, place = np.unique(left * size + right, return_inverse=True)
        counts = csr_array((len(asked), size), dtype=np.int64)
        for block in _rows_of_sequences(self.training):
            outer = block[:, :-2].astype(np.int64) * size + block[:, 2:]
            found = np.searchsorted(asked, outer).clip(max=len(asked) - 1)
            seen = asked[found] == outer
            counts += counted((found[seen], block[:, 1:-1][seen]), counts.shape)
        return counts[place]

    def _likeliest(
        self, pairs: csr_array, models: Iterable[tuple[Tokens, Tokens, csr_array]]
    ) -> Iterator[Tokens]:
        """The choices of each model: of the neighbours it sees, and the triples they were in."""
        bigram, of_token = Bigram(pairs), unigram(pairs)
        for left, right, triples in models:
            chosen = []
            for start in range(0, len(left), QUERIES_AT_ONCE):
                part = slice(start, start + QUERIES_AT_ONCE)
                likely = self._between_bigrams(bigram, of_token, left[part], right[part])
                score = triples[part].toarray() + likely
                score[:, self.training.special_tokens] = -1.0  # never asked for
                chosen.append(score.argmax(axis=1))
            yield np.concatenate(chosen)

    def _between_bigrams(
        self, bigram: Bigram, of_token: Probabilities, left: Tokens, right: Tokens
    ) -> Probabilities:
        """p(w | l, r) of every token w, (pairs, V)."""
        hidden = [side[:, None] == self.training.mask_token for side in (left, right)]
        likely = np.where(hidden[0], of_token, bigram.after(left))
        likely *= np.where(hidden[1], 1.0, bigram.before(right))
        return likely / likely.sum(axis=1, keepdims=True)


def _rows_of_sequences(sequences: MaskedSequences) -> Iterator[Tokens]:
    """All sequences of all sources, several together."""
    for part in sequences.parts:
        together = max(1, TOKENS_AT_ONCE // part.shape[1])
        for start in range(0, len(part), together):
            yield np.asarray(part[start : start + together])
