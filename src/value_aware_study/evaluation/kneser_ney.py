"""Estimates n-gram models of any order by interpolated modified Kneser-Ney smoothing."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer]
Integers = NDArray[np.int64]
Probabilities = NDArray[np.float64]

UNKNOWN = -1
"""Token of a context that says nothing, as a masked one: the context ends after it."""


class _Order(NamedTuple):
    """Holds the n-grams of one order, sorted by `keys`: number of the context times V + token."""

    keys: Integers
    kept: Probabilities
    """max(c - D(c), 0) / c(context) of each n-gram"""
    rest: Probabilities
    """Mass that the discounts leave to the lower order, by number of the context"""


class KneserNey:
    """Smooths n-gram counts by interpolated modified Kneser-Ney (Chen and Goodman, 1998).

    p_n(w | h) = max(c(h w) - D(c(h w)), 0) / c(h) + rest(h) p_{n-1}(w | h without its first token)
    D(1) = 1 - 2 Y n2 / n1, D(2) = 2 - 3 Y n3 / n2, D(3+) = 3 - 4 Y n4 / n3, Y = n1 / (n1 + 2 n2);
    Y where that is not positive

    c counts occurrences at the highest order, and below it the different tokens that stand before
    the n-gram, the start of a row among them; n1 to n4 are the n-grams of an order whose count is
    1 to 4, at least 1. Below the unigrams every token has probability 1 / V. A context that was
    never seen leaves all mass to the lower order.

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
        self.order, self.size = order, vocabulary_size
        rows = rows.astype(np.int64)
        before = np.pad(rows, ((0, 0), (1, 0)), constant_values=vocabulary_size)
        self.orders: list[_Order] = []
        contexts = np.zeros_like(rows)  # the empty context has number 0
        for n in range(1, order + 1):
            keys = contexts * vocabulary_size + rows[:, n - 1 :]
            found, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
            numbers = numbers.reshape(keys.shape)
            if n < order:
                preceded = numbers * (vocabulary_size + 1) + before[:, : numbers.shape[1]]
                counts = np.bincount(np.unique(preceded) // (vocabulary_size + 1))
            self.orders.append(_smoothed(found, counts, vocabulary_size))
            contexts = numbers[:, :-1]

    def probabilities(self, contexts: Tokens, following: Tokens) -> Probabilities:
        """Computes p(following | context), row by row.

        `contexts` are (rows, n) tokens, the nearest one last, `following` (rows,) tokens. Tokens up
        to the last `UNKNOWN` of a context are left out of it.
        """
        found = np.full(len(following), 1 / self.size)
        for n, order in enumerate(self.orders[: contexts.shape[1] + 1], start=1):
            context, known = self._number(contexts[:, contexts.shape[1] - n + 1 :])
            place, seen = _find(order.keys, context * self.size + following)
            rest = np.where(known, order.rest[np.where(known, context, 0)], 1.0)
            found = np.where(seen & known, order.kept[place], 0.0) + rest * found
        return found

    def _number(self, contexts: Tokens) -> tuple[Integers, NDArray[np.bool_]]:
        """Finds the number of each context, (rows,), and whether a token ever followed it."""
        number = np.zeros(len(contexts), dtype=np.int64)
        known = (contexts != UNKNOWN).all(axis=1)
        for order, token in zip(self.orders, contexts.T, strict=False):
            number, seen = _find(order.keys, number * self.size + token)
            known &= seen
        return number, known & (number < len(self.orders[contexts.shape[1]].rest))


def _smoothed(keys: Integers, counts: Integers, size: int) -> _Order:
    """Discounts the counts of an order's n-grams."""
    n1, n2, n3, n4 = np.bincount(counts, minlength=5)[1:5].clip(min=1)
    y = n1 / (n1 + 2 * n2)
    estimates = np.array([y, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    estimates[estimates <= 0] = y  # too few n-grams for an estimate
    discount = estimates[np.minimum(counts, 3)]
    context = keys // size
    total = np.bincount(context, counts).astype(np.float64)
    kept = (counts - discount) / total[context]
    rest = np.ones_like(total)
    np.divide(np.bincount(context, discount), total, out=rest, where=total > 0)
    return _Order(keys, kept, rest)


def _find(keys: Integers, asked: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Finds the place of each asked number among sorted keys, and whether it is there."""
    place = np.searchsorted(keys, asked).clip(max=len(keys) - 1)
    return place, keys[place] == asked


def log_likelihood(
    model: KneserNey, left: Tokens, candidates: Tokens, right: Tokens
) -> Probabilities:
    """Computes log p(candidate, right | left) of each candidate, up to a constant: a cloze score.

    `left` and `right` are (rows, order - 1) tokens around each gap, `candidates` (rows, K); returns
    (rows, K). A token `UNKNOWN` on the right leaves out its own factor and those after it.
    """
    rows, count = candidates.shape
    around = [np.repeat(side, count, axis=0) for side in (left, right)]
    sequence = np.column_stack([around[0], candidates.ravel(), around[1]])
    width = left.shape[1]
    score = np.log(model.probabilities(sequence[:, :width], sequence[:, width]))
    known = np.ones(len(sequence), dtype=bool)
    for place in range(width + 1, sequence.shape[1]):
        known &= sequence[:, place] != UNKNOWN
        asked = sequence[known]
        found = model.probabilities(asked[:, place - width : place], asked[:, place])
        score[known] += np.log(found)
    return score.reshape(rows, count)
