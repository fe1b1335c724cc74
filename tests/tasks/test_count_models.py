"""Count models agree with dictionaries on the tokens that the language models are scored on."""

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from value_aware_attention import kernels
from value_aware_attention.measurement.recorded import evenly_spaced
from value_aware_attention.measurement.task import Task
from value_aware_attention.models import CausalLanguageModel, build_roberta
from value_aware_study.data.batches import CausalBatches, MaskedSequences
from value_aware_study.evaluation import counts
from value_aware_study.evaluation.counts import Bigram, CausalCounts, MaskedCounts, pair_counts
from value_aware_study.evaluation.texts import causal_task, context_windows, masked_task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
VOCABULARY = 12
MASK, SPECIALS = 4, [0, 1, 2, 3, 4]


def slow_bigram(rows: list[list[int]], size: int = VOCABULARY):
    """Returns p(w | v) of interpolated Kneser-Ney, computed from dictionaries."""
    pairs = Counter(pair for row in rows for pair in itertools.pairwise(row))
    once = sum(count == 1 for count in pairs.values())
    twice = sum(count == 2 for count in pairs.values())
    discount = once / (once + 2 * twice) if once else 0.75

    def probability(v: int, w: int) -> float:
        preceders = sum(following == w for _, following in pairs)
        lower = (preceders + 1) / (len(pairs) + size)
        total = sum(count for (previous, _), count in pairs.items() if previous == v)
        if not total:
            return lower
        followers = sum(previous == v for previous, _ in pairs)
        kept = max(pairs[v, w] - discount, 0)
        return kept / total + discount * followers / total * lower

    return probability


rows_of_tokens = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=7, max_size=7), min_size=1, max_size=6
)


@given(rows=rows_of_tokens)
def test_the_bigram_is_kneser_neys_and_sums_to_one(rows: list[list[int]]) -> None:
    bigram, slow = Bigram(pair_counts([np.array(rows)], VOCABULARY)), slow_bigram(rows)
    tokens = np.arange(VOCABULARY)
    expected = np.array([[slow(v, w) for w in tokens] for v in tokens])
    np.testing.assert_allclose(bigram.after(tokens), expected)
    np.testing.assert_allclose(bigram.before(tokens), expected.T)
    previous, following = np.repeat(tokens, VOCABULARY), np.tile(tokens, VOCABULARY)
    np.testing.assert_allclose(bigram.probabilities(previous, following), expected.ravel())
    np.testing.assert_allclose(expected.sum(axis=1), 1.0)
    assert (expected > 0).all()


def test_pairs_that_all_repeat_still_leave_something_for_the_others() -> None:
    bigram = Bigram(pair_counts([np.array([[5, 6]] * 3)], VOCABULARY))
    assert 0 < bigram.after(np.array([5]))[0, 7] < bigram.after(np.array([5]))[0, 6] < 1


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


@pytest.mark.parametrize("units", [None, 3])
def test_causal_models_are_scored_on_the_targets_of_the_task(
    tmp_path: Path, units: int | None
) -> None:
    task, models = small_causal(tmp_path, units), causal_models(tmp_path)
    exact = task.run(None)
    scored = models(task, exact)
    stream = np.load(tmp_path / "evaluation.npy").tolist()
    windows = list(context_windows(len(stream) - 1, 20, 12))
    windows = [windows[i] for i in evenly_spaced(len(windows), units)]
    train = np.load(models.training).tolist()
    slow = slow_bigram([train])
    for name, record in scored.items():
        assert record.unit_counts == tuple(exact.counts), name
        assert record.low <= record.value <= record.high
        assert record.value == pytest.approx(math.exp(sum(record.unit_totals) / record.count))
    totals = [
        -sum(math.log(slow(stream[t], stream[t + 1])) for t in range(first, end))
        for _, first, end in windows
    ]
    np.testing.assert_allclose(scored["bigram"].unit_totals, totals)
    counts = Counter(train[1:])
    of_token = {w: (counts[w] + 1) / (len(train) - 1 + VOCABULARY) for w in range(VOCABULARY)}
    totals = [
        -sum(math.log(of_token[stream[t + 1]]) for t in range(first, end))
        for _, first, end in windows
    ]
    np.testing.assert_allclose(scored["unigram"].unit_totals, totals)


def test_a_bigram_counts_just_the_batches_the_model_was_trained_on(tmp_path: Path) -> None:
    task, models = small_causal(tmp_path, None), causal_models(tmp_path)
    scored = models(task, task.run(None))
    assert scored["bigram"].tokens == 149 and scored["bigram_tokens_read"].tokens == 3 * 2 * 9
    rows = [row for step in range(3) for row in models.batches[step].tolist()]
    slow, stream = slow_bigram(rows), np.load(tmp_path / "evaluation.npy").tolist()
    total = -sum(math.log(slow(v, w)) for v, w in itertools.pairwise(stream))
    assert sum(scored["bigram_tokens_read"].unit_totals) == pytest.approx(total)


def test_counts_do_not_depend_on_the_blocks_they_are_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, models = small_causal(tmp_path, None), causal_models(tmp_path)
    whole = models(task, task.run(None))
    monkeypatch.setattr(counts, "TOKENS_AT_ONCE", 7)
    assert models(task, task.run(None)) == whole


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


def slow_choice(rows: list[list[int]], left: int, right: int) -> int:
    """Returns argmax_w c(l, w, r) + p(w | l, r) over ordinary tokens; <mask> tells nothing."""
    bigram = slow_bigram(rows)
    counts = Counter(token for row in rows for token in row[1:])
    triples = Counter(
        middle
        for row in rows
        for before, middle, after in zip(row, row[1:], row[2:], strict=False)
        if (before, after) == (left, right)
    )

    def likely(w: int) -> float:
        own = (counts[w] + 1) / (counts.total() + VOCABULARY)
        first = own if left == MASK else bigram(left, w)
        return first * (1.0 if right == MASK else bigram(w, right))

    whole = sum(likely(w) for w in range(VOCABULARY))
    return max(set(range(VOCABULARY)) - set(SPECIALS), key=lambda w: triples[w] + likely(w) / whole)


def test_masked_models_choose_as_dictionaries_do_on_the_tasks_tokens(tmp_path: Path) -> None:
    task = small_masked(tmp_path)
    training = sequences(tmp_path, "train", 9, 2, VOCABULARY - 2)  # two tokens are never counted
    exact = task.run(None)
    scored = MaskedCounts(training)(task, exact)
    rows = training.tokens(range(9)).tolist()
    sees = {
        "unigram": lambda left, right: (MASK, MASK),
        "left_neighbour": lambda left, right: (left, MASK),
        "both_neighbours": lambda left, right: (left, right),
    }
    assert list(scored) == list(sees)
    for name, seen in sees.items():
        wrong = []
        for inputs, labels in zip(
            *(x.tolist() for x in task.texts[0].take(range(25))), strict=True
        ):
            asked = [place for place, label in enumerate(labels) if label >= 0]
            chosen = [slow_choice(rows, *seen(inputs[p - 1], inputs[p + 1])) for p in asked]
            wrong.append(sum(w != labels[p] for w, p in zip(chosen, asked, strict=True)))
        assert scored[name].unit_totals == tuple(wrong), name
        assert scored[name].unit_counts == tuple(exact.counts)
        assert scored[name].tokens == 9 * 11


def test_what_stood_between_two_neighbours_most_often_is_chosen(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.array([[0, 5, 6, 7, 2]] * 2 + [[0, 5, 8, 9, 2]] * 9))
    training = MaskedSequences(
        [tmp_path / "train.npy"], length=5, mask_token=MASK, special_tokens=SPECIALS,
        vocabulary_size=VOCABULARY,
    )  # fmt: skip
    models = MaskedCounts(training)
    pairs = pair_counts([training.parts[0]], VOCABULARY)
    left, right = np.array([5, 5]), np.array([7, MASK])
    known = (left, right, models._between(left, right))
    (chosen,) = models._likeliest(pairs, [known])
    assert chosen.tolist() == [6, 8]
