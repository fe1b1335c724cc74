"""Kneser-Ney against its recursion, and count models against loops on the scored tokens."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.refusals import assert_refused
from value_aware_attention import kernels
from value_aware_attention.measurement.recorded import evenly_spaced
from value_aware_attention.measurement.task import Task
from value_aware_attention.models import CausalLanguageModel, build_roberta
from value_aware_study.data.batches import CausalBatches, MaskedSequences
from value_aware_study.evaluation.counts import (
    UNKNOWN_TOKEN,
    CausalCounts,
    KneserNey,
    MaskedCounts,
    log_likelihood,
)
from value_aware_study.evaluation.texts import causal_task, context_windows, masked_task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
VOCABULARY = 12
MASK, SPECIALS = 4, [0, 1, 2, 3, 4]


def small_causal(folder: Path, units: int | None) -> Task:
    torch.manual_seed(0)
    model = CausalLanguageModel(
        vocabulary_size=VOCABULARY, layers=1, width=8, heads=1, feedforward=8,
        kernel=kernels.Elu(), dropout=0.0,
    )  # fmt: skip
    np.save(folder / "evaluation.npy", np.random.default_rng(1).integers(VOCABULARY, size=90))
    return causal_task(
        model=model, tokens=folder / "evaluation.npy", length=20, context=12, units=units,
        batch_size=3, recorded_units=1, device="cpu",
    )  # fmt: skip


def causal_models(folder: Path) -> CausalCounts:
    train = folder / "train.npy"
    np.save(train, np.random.default_rng(0).integers(VOCABULARY, size=150))
    batches = CausalBatches(train, length=9, batch_size=2, steps=3, seed=5)
    return CausalCounts(train, batches)


def slow_nats(rows: list[list[int]], order: int, stream: list[int], first: int, end: int) -> float:
    """Adds -log p of the targets first .. end - 1 of a window, one by one."""
    model = KneserNey(np.array(rows), order=order, vocabulary_size=VOCABULARY)
    total = 0.0
    for target in range(first + 1, end + 1):
        context = np.array(stream[target - order + 1 : target], dtype=np.int64)
        total -= np.log(model.probabilities(context[None], np.array([stream[target]]))).item()
    return total


@pytest.mark.parametrize("units", [None, 3])
def test_n_grams_are_scored_on_the_targets_of_the_task(tmp_path: Path, units: int | None) -> None:
    task, models = small_causal(tmp_path, units), causal_models(tmp_path)
    exact = task.run(None)
    scored = models(task, exact)
    stream = np.load(tmp_path / "evaluation.npy").tolist()
    windows = list(context_windows(len(stream) - 1, 20, 12))
    windows = [windows[i] for i in evenly_spaced(len(windows), units)][1:]  # the first has no past
    for name, record in scored.items():
        assert record.unit_counts == tuple(exact.counts), name
        assert record.low <= record.value <= record.high
        assert record.value == pytest.approx(math.exp(sum(record.unit_totals) / record.count))
    read = [row for step in range(3) for row in models.batches[step].tolist()]
    for suffix, rows, tokens in (
        ("", [np.load(models.training).tolist()], 149),
        ("_tokens_read", read, 3 * 2 * 9),
    ):
        for name, order in {"unigram": 1, "bigram": 2, "trigram": 3, "5gram": 5}.items():
            record = scored[name + suffix]
            totals = [slow_nats(rows, order, stream, first, end) for _, first, end in windows]
            assert record.unit_totals[1:] == pytest.approx(totals), name
            assert record.tokens == tokens


def sequences(folder: Path, name: str, rows: int, seed: int, high: int) -> MaskedSequences:
    made = np.random.default_rng(seed).integers(5, high, size=(rows, 12))
    made[:, 0], made[:, -1] = 0, 2
    np.save(folder / f"{name}.npy", made)
    return MaskedSequences(
        [folder / f"{name}.npy"], length=12, mask_token=MASK, special_tokens=SPECIALS,
        vocabulary_size=VOCABULARY, fraction=0.4,
    )  # fmt: skip


def small_masked(folder: Path) -> Task:
    torch.manual_seed(0)
    model = build_roberta(
        vocabulary_size=VOCABULARY, layers=1, width=8, heads=1, feedforward=8, length=12, block=12,
        dropout=0.0,
    )  # fmt: skip
    return masked_task(
        model=model, sequences=sequences(folder, "evaluation", 25, 1, VOCABULARY), seed=1,
        units=None, batch_size=4, recorded_units=1, device="cpu",
    )  # fmt: skip


def slow_choice(name: str, model: KneserNey, text: list[int], place: int) -> int:
    """Chooses the ordinary token that makes a text likeliest, by a loop over all of them."""
    width = {"both_neighbours": 1, "4grams": 3, "4grams_shown_token": 3}.get(name, 0)

    def log_p(context: list[int], token: int) -> float:
        padded = [UNKNOWN_TOKEN] * width + [UNKNOWN_TOKEN if t == MASK else t for t in context]
        contexts = np.array(padded[len(padded) - width :], dtype=np.int64)[None]
        return np.log(model.probabilities(contexts, np.array([token]))).item()

    def score(token: int) -> float:
        tried = [*text[:place], token, *text[place + 1 :]]
        total = log_p(tried[:place], token)
        for after in range(place + 1, min(place + width + 1, len(text))):
            if text[after] == MASK:
                break
            total += log_p(tried[:after], text[after])
        if name.endswith("shown_token") and text[place] != MASK:
            ordinary = VOCABULARY - len(SPECIALS)
            total += math.log(0.1 * (token == text[place]) + 0.1 / ordinary)
        return total

    return max((w for w in range(VOCABULARY) if w not in SPECIALS), key=score)


def test_masked_tokens_are_chosen_as_by_a_loop_over_the_vocabulary(tmp_path: Path) -> None:
    task = small_masked(tmp_path)
    training = sequences(tmp_path, "train", 9, 2, VOCABULARY - 2)  # two tokens are never counted
    exact = task.run(None)
    scored = MaskedCounts(training)(task, exact)
    model = KneserNey(training.tokens(range(9)).numpy(), order=4, vocabulary_size=VOCABULARY)
    texts, targets = (x.tolist() for x in task.texts[0].take(range(25)))
    for name, record in scored.items():
        wrong = []
        for text, labels in zip(texts, targets, strict=True):
            asked = [place for place, label in enumerate(labels) if label >= 0]
            wrong.append(sum(slow_choice(name, model, text, p) != labels[p] for p in asked))
        assert record.unit_totals == pytest.approx(wrong), name
        assert record.unit_counts == tuple(exact.counts)
        assert record.tokens == 9 * 12
    assert scored["4grams_shown_token"].value < scored["unigram"].value


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
    contexts = np.tile(rows[:1, :3], (SIZE, 1))
    contexts[:, place] = UNKNOWN_TOKEN
    model = KneserNey(rows, order=4, vocabulary_size=SIZE)
    slow, context = Slow(rows.tolist(), 4), tuple(rows[0, place + 1 : 3].tolist())
    expected = [slow.probability(context, w) for w in range(SIZE)]
    assert model.probabilities(contexts, np.arange(SIZE)) == pytest.approx(expected)


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
    rows = np.zeros((1, 4), dtype=np.int64)
    assert_refused(message, KneserNey, rows, vocabulary_size=SIZE, **arguments)
