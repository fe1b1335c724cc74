"""Unigram and bigram from counts of tokens: what a model must be below to have learned more."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

__all__ = [
    "TOKENS_AT_ONCE",
    "Bigram",
    "Probabilities",
    "Tokens",
    "counted",
    "pair_counts",
    "unigram",
]

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
