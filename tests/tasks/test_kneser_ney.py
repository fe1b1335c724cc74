from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from value_aware_study.evaluation.counts import UNKNOWN_TOKEN, KneserNey, log_likelihood

SIZE = 5
TEXTS = arrays(
    np.int64, st.tuples(st.integers(1, 3), st.integers(4, 30)), elements=st.integers(0, SIZE - 1)
)
"""Rows of tokens of a vocabulary of SIZE"""


class Slow:
    """Evaluates the recursion of Chen and Goodman with dictionaries of n-grams."""

    def __init__(self, rows: Sequence[Sequence[int]], order: int) -> None:
        self.counts = [self.count(rows, n, highest=n == order) for n in range(1, order + 1)]

    @staticmethod
    def count(rows: Sequence[Sequence[int]], n: int, *, highest: bool) -> Counter:
        times, before = Counter(), defaultdict(set)
        for row in rows:
            for start in range(len(row) - n + 1):
                gram = tuple(row[start : start + n])
                times[gram] += 1
                before[gram].add(row[start - 1] if start else "start")
        return times if highest else Counter({gram: len(tokens) for gram, tokens in before.items()})

    def discount(self, n: int, count: int) -> float:
        n1, n2, n3, n4 = (
            max(1, sum(c == times for c in self.counts[n - 1].values())) for times in (1, 2, 3, 4)
        )
        y = n1 / (n1 + 2 * n2)
        discounts = {1: 1 - 2 * y * n2 / n1, 2: 2 - 3 * y * n3 / n2, 3: 3 - 4 * y * n4 / n3}
        return discounts[min(count, 3)] if discounts[min(count, 3)] > 0 else y

    def probability(self, context: tuple[int, ...], token: int) -> float:
        n = len(context) + 1
        lower = self.probability(context[1:], token) if context else 1 / SIZE
        followed = {g: c for g, c in self.counts[n - 1].items() if g[:-1] == context}
        total = sum(followed.values())
        if not total:
            return lower
        rest = sum(self.discount(n, c) for c in followed.values()) / total
        count = followed.get((*context, token), 0)
        return ((count - self.discount(n, count)) / total if count else 0.0) + rest * lower


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 4), st.data())
def test_probabilities_are_those_of_the_slow_recursion_and_sum_to_one(rows, order, data) -> None:
    model = KneserNey(rows, order=order, vocabulary_size=SIZE)
    length = data.draw(st.integers(0, order - 1))
    slow = Slow(rows.tolist(), length + 1)
    context = tuple(data.draw(st.lists(st.integers(0, SIZE - 1), min_size=length, max_size=length)))
    contexts = np.tile(np.array(context, dtype=np.int64), (SIZE, 1))
    probabilities = model.probabilities(contexts, np.arange(SIZE))
    assert probabilities == pytest.approx([slow.probability(context, w) for w in range(SIZE)])
    assert probabilities.sum() == pytest.approx(1)
    assert (probabilities > 0).all()


@given(TEXTS, st.integers(0, 2))
def test_the_tokens_up_to_an_unknown_one_are_left_out(rows, place) -> None:
    model = KneserNey(rows, order=4, vocabulary_size=SIZE)
    contexts = np.tile(rows[:1, :3], (SIZE, 1))
    contexts[:, place] = UNKNOWN_TOKEN
    probabilities = model.probabilities(contexts, np.arange(SIZE))
    contexts[:, :place] = 0
    assert (probabilities == model.probabilities(contexts, np.arange(SIZE))).all()
    assert probabilities.sum() == pytest.approx(1)
    if place == 2:
        continued = Slow(rows.tolist(), 2).counts[0]
        lower = KneserNey(rows, order=2, vocabulary_size=SIZE)
        unseen = lower.probabilities(np.full((SIZE, 1), UNKNOWN_TOKEN), np.arange(SIZE))
        assert probabilities == pytest.approx(unseen)
        assert probabilities.argmax() in {gram[0] for gram in continued}


@given(TEXTS, st.integers(1, 3), st.data())
def test_a_gap_is_scored_by_the_text_that_its_candidates_complete(rows, order, data) -> None:
    model = KneserNey(rows, order=order, vocabulary_size=SIZE)
    width = order - 1
    tokens = st.lists(st.integers(0, SIZE - 1), min_size=width, max_size=width)
    left, right = (np.array([data.draw(tokens)], dtype=np.int64) for _ in range(2))
    hidden = data.draw(st.integers(0, width))  # first unknown token on the right
    right[:, hidden:] = UNKNOWN_TOKEN
    scores = log_likelihood(model, left, np.arange(SIZE)[None], right)
    for candidate in range(SIZE):
        text = [*left[0], candidate, *right[0, :hidden]]
        expected = sum(
            np.log(
                model.probabilities(
                    np.array([text[i - width : i]], dtype=np.int64).reshape(1, width),
                    np.array([text[i]]),
                )
            )
            for i in range(width, len(text))
        )
        assert scores[0, candidate] == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": 0}, "order is 0; it must be at least 1"),
        ({"order": 5}, "rows have 4 tokens; order 5 needs at least 5"),
    ],
)
def test_bad_arguments_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        KneserNey(np.zeros((1, 4), dtype=np.int64), vocabulary_size=SIZE, **arguments)
