"""Count models, the baselines of language models: Kneser-Ney, and bigrams around a mask."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from value_aware_attention.measurement.measure import end_metric
from value_aware_attention.measurement.record import Baseline
from value_aware_attention.measurement.task import Task, UnitSums
from value_aware_study.data.batches import CausalBatches, MaskedSequences
from value_aware_study.data.tokens import read_tokens

Tokens = NDArray[np.integer]
Probabilities = NDArray[np.float64]

TOKENS_AT_ONCE = 2**22
"""Tokens of a block whose pairs are counted together."""


class Bigram:
    """Smooths bigram counts c(v, w) by interpolated Kneser-Ney (Ney, Essen and Kneser, 1994).

    p(w | v) = max(c(v, w) - D, 0) / c(v) + D N(v .) / c(v) p(w)
    p(w) = (N(. w) + 1) / (N(. .) + V), also after a v that nothing was seen to follow
    D = n1 / (n1 + 2 n2), 3/4 where no pair occurs just once

    N counts different pairs, n1 and n2 those that occur once and twice; V is the size of the
    vocabulary. Adding one leaves no token without probability.
    """

    def __init__(self, counts: csr_array) -> None:
        once, twice = (np.count_nonzero(counts.data == times) for times in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.75
        total, followers = counts.sum(axis=1), np.diff(counts.indptr)
        self.rest = np.ones(len(total))
        np.divide(discount * followers, total, out=self.rest, where=total > 0)
        preceders = np.bincount(counts.indices, minlength=len(total))
        self.continuation = (preceders + 1) / (preceders.sum() + len(total))
        kept = (counts.data - discount) / np.repeat(total, followers)
        self.by_previous = csr_array((kept, counts.indices, counts.indptr), shape=counts.shape)
        self.by_following = self.by_previous.tocsc()

    def probabilities(self, previous: Tokens, following: Tokens) -> Probabilities:
        """Computes p(following | previous), pair by pair."""
        kept = self.by_previous[previous, following]
        return kept + self.rest[previous] * self.continuation[following]

    def after(self, previous: Tokens) -> Probabilities:
        """Computes p(w | previous) of every token w, (tokens, V)."""
        kept = self.by_previous[previous].toarray()
        return kept + np.outer(self.rest[previous], self.continuation)

    def before(self, following: Tokens) -> Probabilities:
        """Computes p(following | w) after every token w, (tokens, V)."""
        kept = self.by_following[:, following].toarray().T
        return kept + np.outer(self.continuation[following], self.rest)


def pair_counts(blocks: Iterable[Tokens], vocabulary_size: int) -> csr_array:
    """Counts c(v, w): how often w comes right after v in the rows of blocks (rows, length)."""
    counts = csr_array((vocabulary_size, vocabulary_size), dtype=np.int64)
    for block in blocks:
        pairs = block[:, :-1].ravel(), block[:, 1:].ravel()
        counts += counted(pairs, counts.shape)
    return counts


def unigram(counts: csr_array) -> Probabilities:
    """Computes p(w) = (c(w) + 1) / (c + V), of the tokens that were counted after another one."""
    of_token = counts.sum(axis=0) + 1
    return of_token / of_token.sum()


def counted(places: tuple[Tokens, Tokens], shape: tuple[int, int]) -> csr_array:
    """Counts how often each place of a matrix is named."""
    ones = np.ones(len(places[0]), dtype=np.int64)
    return coo_array((ones, places), shape).tocsr()  # adds up what is at the same place


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
