"""Estimates n-gram models by interpolated modified Kneser-Ney smoothing."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Tokens = NDArray[np.integer]
Probabilities = NDArray[np.float64]

UNKNOWN = -1
"""Token of a context that says nothing, such as a mask: the tokens up to it are left out."""


class _Discounted(NamedTuple):
    """Holds the discounted counts of the n-grams of one order."""

    discounted: Probabilities
    """max(c - D(c), 0) / c(context) of each n-gram"""
    rest: Probabilities
    """Mass that the discounts leave to the lower order, by number of the context"""


class _Order(NamedTuple):
    """Holds the n-grams of one order, sorted by `keys`: number of the context times V + token."""

    keys: Integers
    highest: _Discounted
    lower: _Discounted


class KneserNey:
    """Smooths n-gram counts by interpolated modified Kneser-Ney (Chen and Goodman, 1998).

    p_n(w | h) = max(c(h w) - D(c(h w)), 0) / c(h) + rest(h) p_{n-1}(w | h without its first token)
    D(1) = 1 - 2 Y n2 / n1, D(2) = 2 - 3 Y n3 / n2, D(3+) = 3 - 4 Y n4 / n3, Y = n1 / (n1 + 2 n2);
    Y where that is not positive

    c counts occurrences at the highest order, and below it the different tokens that stand before
    the n-gram, the start of a row among them; n1 to n4 are the n-grams of an order whose count is
    1 to 4, at least 1. Below the unigrams every token has probability 1 / V. A context that was
    never seen leaves all mass to the lower order. The models of all orders up to `order` share
    their n-grams.

    `rows` are token numbers (rows, length) below `vocabulary_size`; no n-gram spans two rows.
    Raises ValueError for an order below 1 or rows shorter than it.
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
            # pandas hashes: several times faster than the sorting of np.unique
            numbers, ngrams = pd.factorize(keys.ravel(), sort=True)
            contexts = numbers.reshape(keys.shape)
            preceded = pd.unique((contexts * (size + 1) + before[:, : keys.shape[1]]).ravel())
            counts = np.bincount(numbers), np.bincount(preceded // (size + 1))
            self.orders.append(_Order(ngrams, *(_discounted(ngrams // size, c) for c in counts)))
            contexts = contexts[:, :-1]

    def probabilities(self, contexts: Tokens, following: Tokens) -> Probabilities:
        """Computes p_n(following | context), row by row.

        `contexts` are (rows, n - 1) tokens, the nearest one last, `following` (rows,) tokens. The
        tokens up to the last `UNKNOWN` of a context are left out of it.
        """
        probabilities = np.full(len(following), 1 / self.vocabulary_size)
        for n in range(1, contexts.shape[1] + 2):
            order = self.orders[n - 1]
            counted = order.highest if n == contexts.shape[1] + 1 else order.lower
            number, occurs = self._number(contexts[:, contexts.shape[1] + 1 - n :])
            occurs &= number < len(counted.rest)  # else no token ever followed
            place, follows = _find(order.keys, number * self.vocabulary_size + following)
            rest = counted.rest[np.where(occurs, number, 0)]
            probabilities *= np.where(occurs, rest, 1.0)
            probabilities += np.where(occurs & follows, counted.discounted[place], 0.0)
        return probabilities

    def _number(self, contexts: Tokens) -> tuple[Integers, NDArray[np.bool_]]:
        """Finds the number of each context, (rows,), and whether it occurs."""
        number, occurs = np.zeros(len(contexts), dtype=np.int64), np.ones(len(contexts), dtype=bool)
        for order, token in zip(self.orders, contexts.T, strict=False):
            number, is_ngram = _find(order.keys, number * self.vocabulary_size + token)
            occurs &= is_ngram & (token != UNKNOWN)
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

    `left` and `right` are the (rows, n - 1) tokens before and after each gap of a text,
    `candidates` (rows, K); returns (rows, K). The factors of the tokens after a gap end at the
    first `UNKNOWN` one.
    """
    rows, count = candidates.shape
    before, after = (np.repeat(side, count, axis=0) for side in (left, right))
    text = np.column_stack([before, candidates.ravel(), after])
    width = left.shape[1]
    score = np.log(model.probabilities(before, text[:, width]))
    for place in range(width + 1, text.shape[1]):
        rows_known = (text[:, width + 1 : place + 1] != UNKNOWN).all(axis=1)
        context = text[rows_known, place - width : place]
        score[rows_known] += np.log(model.probabilities(context, text[rows_known, place]))
    return score.reshape(rows, count)
