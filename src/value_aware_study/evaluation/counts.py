"""Scores n-gram models on a language model's targets: the strongest baselines that count tokens.

They are smoothed by interpolated modified Kneser-Ney.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import csr_array

from value_aware_attention.measurement.measure import end_metric
from value_aware_attention.measurement.task import Task, UnitSums
from value_aware_attention.records.record import Baseline
from value_aware_study.data.batches import CausalBatches, MaskedSequences
from value_aware_study.data.tokens import Tokens, read_tokens

Integers = NDArray[np.int64]
Probabilities = NDArray[np.float64]

UNKNOWN_TOKEN = -1
"""Stands for a token without information, such as a mask; a context starts after the last one."""
CAUSAL_ORDERS = {"unigram": 1, "bigram": 2, "trigram": 3, "5gram": 5}
CLOZE_ORDER = 4
GAP_CANDIDATES = 512
"""Tokens that n-grams choose among in a gap: the likeliest between its two neighbours."""
GAPS_AT_ONCE = 256
"""Rows of scores over the whole vocabulary in memory at a time."""


class _Discounted(NamedTuple):
    """The discounted counts of the n-grams of one order.

    Attributes:
        discounted: max(c - D(c), 0) / c(context) of each n-gram.
        rest: Mass that the discounts leave to the lower order, by the context's number.
    """

    discounted: Probabilities
    rest: Probabilities


class _Order(NamedTuple):
    """The n-grams of one order, sorted by `keys`: number of the context times V + token."""

    keys: Integers
    highest: _Discounted
    lower: _Discounted


class KneserNey:
    """Smooths n-gram counts by interpolated modified Kneser-Ney (Chen and Goodman, 1998).

    p_n(w | h) = max(c(h w) - D(c(h w)), 0) / c(h) + rest(h) p_{n-1}(w | h without its first token)
    D(1) = 1 - 2 Y n2 / n1, D(2) = 2 - 3 Y n3 / n2, D(3+) = 3 - 4 Y n4 / n3, Y = n1 / (n1 + 2 n2);
    Y if that is not positive

    At the highest order c counts occurrences. Below, it counts the different tokens before the
    n-gram, including the start of a row. n1 to n4 are the n-grams of an order with count 1 to 4, at
    least 1. Below the unigrams every token has probability 1 / V. An unseen context leaves all mass
    to the lower order. The models of all orders up to `order` share their n-grams.

    `rows` are token numbers (rows, length) below `vocabulary_size`; no n-gram spans two rows.
    Raises ValueError for an order below 1 or rows shorter than the order.
    """

    def __init__(self, rows: Tokens, *, order: int, vocabulary_size: int) -> None:
        if order < 1:
            raise ValueError(f"order is {order}; it must be at least 1")
        if rows.shape[1] < order:
            raise ValueError(
                f"rows have {rows.shape[1]} tokens; order {order} needs at least {order}"
            )
        self.vocabulary_size = size = vocabulary_size
        rows = rows.astype(np.int64)
        before = np.pad(rows, ((0, 0), (1, 0)), constant_values=size)
        self.orders: list[_Order] = []
        contexts = np.zeros_like(rows)  # the empty context has number 0
        for n in range(1, order + 1):
            keys = contexts * size + rows[:, n - 1 :]
            # pandas hashes, which is several times faster than np.unique's sorting
            numbers, ngrams = pd.factorize(keys.ravel(), sort=True)
            contexts = numbers.reshape(keys.shape)
            preceded = pd.unique((contexts * (size + 1) + before[:, : keys.shape[1]]).ravel())
            counts = np.bincount(numbers), np.bincount(preceded // (size + 1))
            self.orders.append(_Order(ngrams, *(_discounted(ngrams // size, c) for c in counts)))
            contexts = contexts[:, :-1]

    def probabilities(self, contexts: Tokens, following: Tokens) -> Probabilities:
        """Computes p_n(following | context), row by row.

        `contexts` are (rows, n - 1) tokens, the nearest last; `following` (rows,) tokens. Tokens up
        to the last `UNKNOWN_TOKEN` of a context are ignored.
        """
        probabilities = np.full(len(following), 1 / self.vocabulary_size)
        for n in range(1, contexts.shape[1] + 2):
            order = self.orders[n - 1]
            counted = order.highest if n == contexts.shape[1] + 1 else order.lower
            number, occurs = self._number(contexts[:, contexts.shape[1] + 1 - n :])
            occurs &= number < len(counted.rest)  # false if no token ever followed
            place, follows = _find(order.keys, number * self.vocabulary_size + following)
            probabilities *= np.where(occurs, counted.rest[np.where(occurs, number, 0)], 1.0)
            probabilities += np.where(occurs & follows, counted.discounted[place], 0.0)
        return probabilities

    def _number(self, contexts: Tokens) -> tuple[Integers, NDArray[np.bool_]]:
        """Finds the number of each context, (rows,), and whether it occurs."""
        number, occurs = np.zeros(len(contexts), dtype=np.int64), np.ones(len(contexts), dtype=bool)
        for order, token in zip(self.orders, contexts.T, strict=False):
            number, is_ngram = _find(order.keys, number * self.vocabulary_size + token)
            occurs &= is_ngram & (token != UNKNOWN_TOKEN)
        return number, occurs


def _discounted(contexts: Integers, counts: Integers) -> _Discounted:
    """Discounts the counts of an order's n-grams, sorted by the numbers of their contexts."""
    n1, n2, n3, n4 = np.bincount(counts, minlength=5)[1:5].clip(min=1)
    y = n1 / (n1 + 2 * n2)
    estimates = np.array([y, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    estimates[estimates <= 0] = y  # too few n-grams for an estimate
    discount = estimates[np.minimum(counts, 3)]
    total = np.bincount(contexts, counts).astype(np.float64)
    rest = np.ones_like(total)
    np.divide(np.bincount(contexts, discount), total, out=rest, where=total > 0)
    return _Discounted((counts - discount) / total[contexts], rest)


def _find(keys: Integers, asked: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Finds the place of each asked number among sorted keys, and whether it is there."""
    place = np.searchsorted(keys, asked).clip(max=len(keys) - 1)
    return place, keys[place] == asked


def log_likelihood(
    model: KneserNey, left: Tokens, candidates: Tokens, right: Tokens
) -> Probabilities:
    """Computes log p(candidate, right | left) of each candidate, up to a constant.

    `left` and `right` are the (rows, n - 1) tokens before and after each gap; `candidates` is
    (rows, K). Returns (rows, K). The tokens after a gap count up to the first `UNKNOWN_TOKEN`.
    """
    rows, count = candidates.shape
    before, after = (np.repeat(side, count, axis=0) for side in (left, right))
    text = np.column_stack([before, candidates.ravel(), after])
    width = left.shape[1]
    score = np.log(model.probabilities(before, text[:, width]))
    for place in range(width + 1, text.shape[1]):
        rows_known = (text[:, width + 1 : place + 1] != UNKNOWN_TOKEN).all(axis=1)
        score[rows_known] += np.log(
            model.probabilities(text[rows_known, place - width : place], text[rows_known, place])
        )
    return score.reshape(rows, count)


@dataclass(frozen=True, eq=False)
class CausalCounts:
    """Scores n-gram models of all training tokens, and of those the causal LM was trained on.

    `training` is the file of the training stream; `batches` yields the LM's training batches.
    """

    training: Path | str
    batches: CausalBatches

    def __call__(self, task: Task, exact: UnitSums) -> dict[str, Baseline]:
        """Returns each model's perplexity on the task's targets, with its paired interval."""
        stream = np.asarray(read_tokens(self.training, dimensions=1))[None]
        read = np.concatenate([self.batches[step].numpy() for step in range(len(self.batches))])
        size, longest = task.model.config.vocabulary_size, max(CAUSAL_ORDERS.values())
        baselines = {}
        for suffix, rows in (("", stream), ("_tokens_read", read)):
            model = KneserNey(rows, order=longest, vocabulary_size=size)
            for name, order in CAUSAL_ORDERS.items():
                baselines[name + suffix] = Baseline(
                    tokens=rows[:, 1:].size,
                    **end_metric(_nats(task, model, order), exact, task.metric),
                )
        return baselines


def _nats(task: Task, model: KneserNey, order: int) -> UnitSums:
    """Computes -log p of the targets of each of the task's windows."""
    totals, counts = [], []
    for inputs, labels in zip(task.texts[0].inputs, task.texts[0].labels, strict=True):
        places = np.flatnonzero(labels >= 0)
        before = np.pad(inputs, (order - 1, 0), constant_values=UNKNOWN_TOKEN)
        contexts = before[places[:, None] + np.arange(1, order)]
        totals.append(-np.log(model.probabilities(contexts, np.array(labels[places]))).sum())
        counts.append(float(len(places)))
    return UnitSums(np.array(totals), np.array(counts))


@dataclass(frozen=True, eq=False)
class MaskedCounts:
    """Predicts masked tokens by n-grams on both sides, counted in all training sequences.

    A token w between l and r has the score p(w | l) p(r | l w). Both sides have as many tokens as
    the n-grams span; a <mask> nearby cuts them off. A model may also look at the token t in the
    gap: it multiplies by the probability that masking leaves t there, as one in ten of the masked
    tokens is kept and one in ten is replaced by a random token.
    """

    training: MaskedSequences

    def __call__(self, task: Task, exact: UnitSums) -> dict[str, Baseline]:
        """Returns each model's error on the task's masked tokens, with its paired interval."""
        inputs, labels = (x.numpy() for x in task.texts[0].take(range(len(task.texts[0].inputs))))
        rows, columns = np.nonzero(labels >= 0)
        targets, visible = labels[rows, columns], inputs[rows, columns]
        counted = np.concatenate([np.asarray(source) for source in self.training.sources])
        model = KneserNey(counted, order=CLOZE_ORDER, vocabulary_size=self.training.vocabulary_size)
        unmasked = np.where(inputs == self.training.mask_token, UNKNOWN_TOKEN, inputs)
        wide = CLOZE_ORDER - 1
        padded = np.pad(unmasked, ((0, 0), (wide, wide)), constant_values=UNKNOWN_TOKEN)
        around = padded[rows[:, None], columns[:, None] + np.arange(2 * wide + 1)]
        left, right = around[:, :wide], around[:, wide + 1 :]
        candidates = self._candidates(model, left[:, -1], right[:, 0], visible)
        special = np.isin(candidates, self.training.special_tokens)  # never targets
        likely = self._log_unigram(model)[candidates]
        unchanged = self._log_unchanged(candidates, visible)
        near = log_likelihood(model, left[:, -1:], candidates, right[:, :1])
        far = log_likelihood(model, left, candidates, right)
        scores = {
            "unigram": likely,
            "shown_token": likely + unchanged,
            "both_neighbours": near,
            "4grams": far,
            "4grams_shown_token": far + unchanged,
        }
        units = np.bincount(rows, minlength=len(labels)).astype(np.float64)
        baselines = {}
        for name, score in scores.items():
            best = np.where(special, -np.inf, score).argmax(axis=1)
            chosen = candidates[np.arange(len(rows)), best]
            missed = np.bincount(rows, chosen != targets, len(labels)).astype(np.float64)
            baselines[name] = Baseline(
                tokens=counted.size, **end_metric(UnitSums(missed, units), exact, task.metric)
            )
        return baselines

    def _log_unigram(self, model: KneserNey) -> NDArray[np.float64]:
        """Computes log p(w) of every token, (V,); -inf for special tokens."""
        tokens = np.arange(model.vocabulary_size)
        scores = np.log(model.probabilities(tokens[:, None][:, :0], tokens))
        scores[self.training.special_tokens] = -np.inf
        return scores

    def _log_unchanged(self, candidates: Tokens, visible: Tokens) -> Probabilities:
        """Computes log p(visible token | candidate), up to a constant; 0 for the mask."""
        training = self.training
        ordinary = training.vocabulary_size - len(set(training.special_tokens))
        unmasked = (visible != training.mask_token)[:, None]
        return np.where(
            unmasked,
            np.log(0.1 * ((candidates == visible[:, None]) + 1 / ordinary)),
            0.0,
        )

    def _candidates(self, model: KneserNey, left: Tokens, right: Tokens, visible: Tokens) -> Tokens:
        """Chooses the tokens that are scored in each gap, (gaps, K), sorted by number.

        They include the most frequent token and the one in the gap.
        """
        likely = self._log_unigram(model)
        best = []
        for block in _neighbour_scores(model, left, right):
            block[:, self.training.special_tokens] = -1.0
            count = min(GAP_CANDIDATES, block.shape[1])
            best.append(np.argpartition(-block, count - 1, axis=1)[:, :count])
        ordinary = np.where(
            np.isin(visible, self.training.special_tokens), likely.argmax(), visible
        )
        return np.sort(
            np.column_stack(
                [np.full(len(visible), likely.argmax()), ordinary, np.concatenate(best)]
            ),
            axis=1,
        )


def _neighbour_scores(model: KneserNey, left: Tokens, right: Tokens) -> Iterator[Probabilities]:
    """Yields p(w | left) p(right | w) of every token w, (gaps, V), a few gaps at a time."""
    size, pairs, words = model.vocabulary_size, model.orders[1], model.orders[0].keys
    unigram = model.probabilities(np.full((size, 1), UNKNOWN_TOKEN), np.arange(size))
    rest = np.ones(size)
    rest[words[: len(pairs.highest.rest)]] = pairs.highest.rest
    contexts, following = np.divmod(pairs.keys, size)
    places = (words[contexts], following)
    discounted = csr_array((pairs.highest.discounted, places), shape=(size, size))
    by_following = discounted.tocsc()
    for start in range(0, len(left), GAPS_AT_ONCE):
        before, behind = (side[start : start + GAPS_AT_ONCE] for side in (left, right))
        forward = discounted[before].toarray() + np.outer(rest[before], unigram)
        backward = by_following[:, behind].toarray().T + np.outer(unigram[behind], rest)
        forward[before == UNKNOWN_TOKEN], backward[behind == UNKNOWN_TOKEN] = unigram, 1.0
        yield forward * backward
