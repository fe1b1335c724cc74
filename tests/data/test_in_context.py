"""In-context tasks ask, score and solve by their context alone."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot

from value_aware_attention.measurement.masking import IGNORED
from value_aware_study.data.in_context import (
    AssociativeRecall,
    Copying,
    InContextBatches,
    InContextTask,
    MarkovChains,
)

RECALL = AssociativeRecall(pairs=5, prefix=20, length=44)
MARKOV = MarkovChains(states=3, prefix=6, length=13)
COPYING = Copying(symbols=7, prefix=9)
TASKS = (RECALL, MARKOV, COPYING)
SEEDS = st.integers(0, 2**32)


def drawn(task: InContextTask, seed: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    batch = task.draw(rows, torch.Generator().manual_seed(seed))
    return batch["input_ids"], batch["labels"]


@pytest.mark.parametrize("task", TASKS)
def test_rows_have_the_tasks_sizes_and_a_label_is_the_token_after_it(task: InContextTask) -> None:
    inputs, labels = drawn(task, 0, rows=50)
    assert inputs.shape == labels.shape == (50, task.length)
    assert inputs.dtype == labels.dtype == torch.int64
    assert set(inputs.unique().tolist()) == set(range(task.vocabulary_size))
    scored = labels[:, :-1] != IGNORED
    assert torch.equal(labels[:, :-1][scored], inputs[:, 1:][scored])


@pytest.mark.parametrize("task", TASKS)
def test_rows_depend_on_the_generator_alone(task: InContextTask) -> None:
    first, _ = drawn(task, 1)
    torch.manual_seed(5)
    again, _ = drawn(task, 1)
    other, _ = drawn(task, 2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(first.unique(dim=0)) == len(first)


@settings(max_examples=30)
@given(pairs=st.integers(2, 6), more=st.integers(0, 9), asks=st.integers(1, 15), seed=SEEDS)
def test_every_key_that_is_asked_was_stated_with_the_value_that_is_scored(
    pairs: int, more: int, asks: int, seed: int
) -> None:
    prefix = 2 * (pairs + more)
    task = AssociativeRecall(pairs=pairs, prefix=prefix, length=prefix + 2 * asks)
    for row, labels in zip(*map(Tensor.tolist, drawn(task, seed)), strict=True):
        stated = dict(zip(row[:prefix:2], row[1:prefix:2], strict=True))
        assert sorted(stated) == list(range(0, 2 * pairs, 2))
        assert sorted(stated.values()) == list(range(1, 2 * pairs, 2))
        assert labels[prefix::2] == [stated[key] for key in row[prefix::2]]
        assert labels[1::2] == [IGNORED] * (len(row) // 2)
        earlier: set[int] = set()
        for key, label in zip(row[:prefix:2], labels[:prefix:2], strict=True):
            assert label == (stated[key] if key in earlier else IGNORED)
            earlier.add(key)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_a_smaller_task_has_its_share_of_everything(share: float) -> None:
    smaller = AssociativeRecall(pairs=24, prefix=128, length=256).smaller(share)
    sizes = (smaller.pairs, smaller.prefix, smaller.length)
    assert sizes == (24 * share, 128 * share, 256 * share)
    assert MARKOV.smaller(share) == MARKOV and COPYING.smaller(share) == COPYING
    assert RECALL.smaller(0.01).pairs == 2


def test_rows_grow_over_the_first_steps_of_a_training_and_nowhere_else() -> None:
    options = {"batch_size": 2, "steps": 20, "seed": 0}
    batches = InContextBatches(RECALL, split="train", growing=0.5, **options)
    lengths = [batches[step]["input_ids"].shape[1] for step in range(20)]
    assert lengths == sorted(lengths)
    assert lengths[0] == lengths[3] == RECALL.smaller(0.25).length < lengths[5]
    assert lengths[9] < lengths[10] == RECALL.length
    held_out = InContextBatches(RECALL, split="validation", growing=0.5, **options)
    assert held_out[0]["input_ids"].shape[1] == RECALL.length
    with pytest.raises(ValueError, match="growing is 2; it must lie between 0 and 1"):
        InContextBatches(RECALL, split="train", growing=2, **options)


def test_a_string_is_copied_after_its_separator() -> None:
    inputs, labels = drawn(COPYING, 0)
    string = inputs[:, :9]
    assert (string < 7).all() and (inputs[:, 9] == 7).all()
    assert torch.equal(inputs[:, 10:], string[:, :-1])
    assert torch.equal(labels[:, 9:], string) and (labels[:, :9] == IGNORED).all()


def test_chains_follow_laws_that_are_uniform_on_the_simplex() -> None:
    """P(x1, x2 = 0, 0) is 1/2 * E[p] = 1/4 with two states, P(0, 0, 0) is 1/2 * E[p^2] = 1/6."""
    inputs, _ = drawn(MarkovChains(states=2, prefix=1, length=4), 0, rows=20_000)
    zeros = [(inputs[:, :n] == 0).all(1).double().mean().item() for n in (1, 2, 3, 4)]
    assert zeros == pytest.approx([1 / 2, 1 / 4, 1 / 6, 1 / 8], abs=0.015)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=7))
def test_bayes_is_the_integral_over_all_laws(chain: list[int]) -> None:
    """With two states, quadrature gives the probability of moving to state 1 from the last one."""
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    likelihood = torch.ones_like(grid)
    for before, after in pairwise(chain):
        if before == chain[-1]:
            likelihood *= grid if after else 1 - grid
    expected = float((likelihood * grid).sum() / likelihood.sum())
    laws = MarkovChains(states=2, prefix=1, length=9).bayes(torch.tensor([chain]))
    assert laws.shape == (1, len(chain), 2)
    assert laws[0, -1, 1].item() == pytest.approx(expected, abs=1e-5)


@given(SEEDS)
def test_bayes_counts_transitions_before_each_position(seed: int) -> None:
    inputs, _ = drawn(MARKOV, seed, rows=1)
    row, laws = inputs[0].tolist(), MARKOV.bayes(inputs)[0]
    for n, state in enumerate(row):
        after = [row[m + 1] for m in range(n) if row[m] == state]
        law = [(after.count(b) + 1) / (len(after) + 3) for b in range(3)]
        assert laws[n].tolist() == pytest.approx(law, rel=1e-6)


def test_a_model_that_is_bayes_is_nowhere_from_it_and_no_model_is_better() -> None:
    batch = MARKOV.draw(200, torch.Generator().manual_seed(0))
    laws = MARKOV.bayes(batch["input_ids"])
    best = MARKOV.metrics(laws.log() + 3, batch)
    uniform = MARKOV.metrics(torch.zeros_like(laws), batch)
    assert best["nats_to_bayes"].abs().max() < 1e-6
    labels = batch["labels"][:, 6:, None]
    nats = -laws[:, 6:].gather(-1, labels).log().mean((1, 2))
    torch.testing.assert_close(best["nats"], nats)
    torch.testing.assert_close(uniform["nats"], torch.full((200,), math.log(3)))
    assert uniform["nats_to_bayes"].shape == (200,) and (uniform["nats_to_bayes"] > 0).all()
    gap = float((uniform["nats"] - best["nats"]).mean())
    assert float(uniform["nats_to_bayes"].mean()) == pytest.approx(gap, abs=0.03)


@pytest.mark.parametrize("task", [RECALL, COPYING])
def test_answers_are_measured_row_by_row_after_the_prefix(task: InContextTask) -> None:
    batch = task.draw(2, torch.Generator().manual_seed(0))
    labels = batch["labels"].clone()
    if task is RECALL:  # a key that is asked again has its value after the prefix too
        for row, keys in enumerate(batch["input_ids"].tolist()):
            for n in range(task.prefix, task.length, 2):
                if keys[n] in keys[task.prefix : n]:
                    labels[row, n] = IGNORED
    logits = 9.0 * one_hot(labels.clamp(min=0), task.vocabulary_size)
    asked = (labels[1, task.prefix :] != IGNORED).nonzero().flatten() + task.prefix
    logits[1, asked[0]] = -logits[1, asked[0]]  # one answer of the second row is wrong
    logits[:, : task.prefix] = -99.0  # and nothing before the prefix's end counts
    logits[:, : task.prefix, 0] = 99.0
    metrics = task.metrics(logits, batch)
    assert metrics["accuracy"].tolist() == pytest.approx([1.0, 1 - 1 / len(asked)])
    assert metrics["exact_match"].tolist() == [1.0, 0.0]
    others = task.vocabulary_size - 1
    right = math.log(1 + others * math.exp(-9))
    wrong = math.log(1 + others * math.exp(9))
    nats = [right, (wrong + (len(asked) - 1) * right) / len(asked)]
    assert len(asked) == (5 if task is RECALL else 9)
    assert metrics["nats"].tolist() == pytest.approx(nats, rel=1e-3)


def test_batches_are_functions_of_seed_and_step() -> None:
    def item(seed: int, step: int, split: str = "train") -> Tensor:
        batches = InContextBatches(RECALL, batch_size=4, steps=9, seed=seed, split=split)
        return batches[step]["input_ids"]

    assert item(1, 2).shape == (4, RECALL.length)
    assert torch.equal(item(1, 2), item(1, 2))
    items = [item(*at) for at in ((1, 2), (2, 1), (1, 3), (0, 2), (1, 2, "validation"))]
    assert len(torch.stack(items).unique(dim=0)) == 5
    with pytest.raises(IndexError, match=r"step 9 is outside 0 .. 8"):
        item(1, 9)
    with pytest.raises(ValueError, match="split is 'test'; it must be one of train, validation"):
        item(1, 2, "test")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AssociativeRecall(pairs=1, prefix=20, length=44), "pairs is 1"),
        (lambda: AssociativeRecall(pairs=5, prefix=8, length=44), "prefix 8"),
        (lambda: AssociativeRecall(pairs=5, prefix=20, length=45), "length 45"),
        (lambda: AssociativeRecall(pairs=5, prefix=20, length=20), "length 20"),
        (lambda: MarkovChains(states=1, prefix=6, length=13), "states is 1"),
        (lambda: MarkovChains(states=3, prefix=13, length=13), "prefix 13"),
        (lambda: Copying(symbols=1, prefix=9), "symbols 1"),
        (lambda: Copying(symbols=7, prefix=0), "prefix 0"),
    ],
)
def test_sizes_that_leave_nothing_to_ask_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        make()
    assert "\n" not in str(refusal.value)
