from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.refusals import assert_refused
from value_aware_study.data.batches import (
    CausalBatches,
    FrozenMaskedBatches,
    MaskedBatches,
    MaskedSequences,
)

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(folder, tokens):
    np.save(folder / "stream.npy", np.arange(tokens, dtype=np.uint16))
    return folder / "stream.npy"


def test_inputs_and_targets_overlap_by_one_and_the_batches_end(tmp_path):
    batches = CausalBatches(stream(tmp_path, 1000), length=16, batch_size=4, steps=9, seed=0)
    assert len(batches) == len(list(batches)) == 9
    for batch in batches:
        assert batch.shape == (4, 17) and batch.dtype == torch.int64
        assert (batch[:, 1:] - batch[:, :-1] == 1).all()


@same_folder
@given(tokens=st.integers(9, 400), length=st.integers(1, 8), seed=st.integers(0, 99))
def test_an_epoch_visits_each_block_once(tmp_path, tokens, length, seed):
    path = stream(tmp_path, tokens)
    batches = CausalBatches(path, length=length, batch_size=1, steps=10**9, seed=seed)
    starts = sorted(int(batches[step][0, 0]) for step in range(batches.blocks))
    assert all(b - a == length for a, b in pairwise(starts))
    assert starts[-1] + length < tokens  # the last target exists
    # all but the random offset and what is too short for a block is seen
    assert len(starts) * length > tokens - 3 * length


@pytest.mark.parametrize("steps", [40, 10**9])
def test_the_order_is_the_one_that_runs_were_made_with(tmp_path, steps):
    """The order is written out once more, as published results depend on it."""
    batches = CausalBatches(stream(tmp_path, 500), length=8, batch_size=3, steps=steps, seed=7)
    blocks = 500 // 8 - 1
    starts = torch.cat([batches[step][:, 0] for step in range(40)])
    for index, start in enumerate(starts.tolist()):
        epoch, position = divmod(index, blocks)
        order = np.arange(blocks)
        np.random.default_rng((7, epoch, 0)).shuffle(order)
        offset = np.random.default_rng((7, epoch, 1)).integers(8)
        assert start == offset + 8 * order[position]


def test_causal_batches_that_cannot_be_made(tmp_path):
    options = {"batch_size": 1, "steps": 1, "seed": 0}
    np.save(tmp_path / "two.npy", np.zeros((3, 3)))
    for file, error, line in (
        (stream(tmp_path, 8), ValueError, "8 tokens are too few for length 8"),
        (tmp_path / "nowhere.npy", FileNotFoundError, r"nowhere\.npy is missing: tokenize the"),
        (tmp_path / "two.npy", ValueError, r"two\.npy has 2 dimensions, 1 are needed"),
    ):
        assert_refused(line, CausalBatches, file, error=error, length=8, **options)


@pytest.fixture
def paths(tmp_path):
    """Writes two sources of 7 and 12 instances of 8 tokens; instance i has the tokens 100 + i."""
    instances = np.arange(19)[:, None] + 100 + np.zeros((19, 8), np.uint16)
    instances[:, 0], instances[:, -1] = 0, 2
    files = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for file, rows in zip(files, np.split(instances.astype(np.uint16), [7]), strict=True):
        np.save(file, rows)
    return files


def sequences(paths, length=8, **options):
    return MaskedSequences(
        paths,
        length=length,
        mask_token=4,
        special_tokens=[0, 1, 2, 3, 4],
        vocabulary_size=200,
        **options,
    )


def numbers(batch):
    """Returns the instance numbers of a batch, read from its unmasked tokens."""
    tokens = torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])
    return [row[row >= 100].unique().tolist() for row in tokens]


def test_batches_run_over_the_end_of_an_epoch_which_visits_every_sequence_once(paths):
    batches = MaskedBatches(sequences(paths), batch_size=8, steps=5, seed=0)
    assert [len(batches[step]["labels"]) for step in range(5)] == [8] * 5
    order = [number for step in range(5) for number in numbers(batches[step])]
    for epoch in (order[:19], order[19:38]):
        assert sorted(epoch) == [[100 + i] for i in range(19)] != epoch


def test_instances_are_joined_within_a_source(paths):
    joined = sequences(paths, length=16)
    assert len(joined) == 3 + 6
    batches = MaskedBatches(joined, batch_size=9, steps=1, seed=0)
    pairs = [[100 + i, 101 + i] for i in (0, 2, 4, 7, 9, 11, 13, 15, 17)]
    assert batches[0]["input_ids"].shape == (9, 16)
    assert sorted(numbers(batches[0])) == pairs


def test_a_step_is_a_function_of_seed_and_step_and_masks_change(paths):
    options = {"batch_size": 19, "steps": 4, "seed": 1}
    batches, again = (MaskedBatches(sequences(paths), **options) for _ in range(2))
    torch.testing.assert_close(batches[3], again[3], rtol=0, atol=0)
    # rows differ in their tokens only, so equal random numbers would hide equal positions
    assert not torch.equal(*(batches[step]["labels"] >= 0 for step in range(2)))


def test_options_reach_the_masking(paths):
    batch = MaskedBatches(sequences(paths, fraction=0.5), batch_size=19, steps=1, seed=0)[0]
    assert (batch["labels"] >= 0).sum(-1).tolist() == [3] * 19
    assert not (batch["labels"][:, [0, -1]] >= 0).any()


def test_masked_batches_that_cannot_be_made(paths):
    assert_refused("at least one file of instances", sequences, [])
    assert_refused("length 20 is not a multiple", sequences, paths, length=20)


@pytest.mark.parametrize("limit", [None, 5, 100])
def test_batch_size_changes_nothing(paths, limit):
    def rows(batch_size):
        options = {"batch_size": batch_size, "seed": 0, "limit": limit}
        batches = FrozenMaskedBatches(sequences(paths), **options)
        everything = [batches[index] for index in range(len(batches))]
        return {n: torch.cat([b[n] for b in everything]) for n in everything[0]}

    assert len(rows(1)["labels"]) == (5 if limit == 5 else 19)
    torch.testing.assert_close(rows(1), rows(4), rtol=0, atol=0)
    torch.testing.assert_close(rows(1), rows(19), rtol=0, atol=0)


def test_a_limit_is_a_sample_of_all_sources(paths):
    batch = FrozenMaskedBatches(sequences(paths), batch_size=8, seed=0, limit=8)[0]
    sample = [number[0] for number in numbers(batch)]
    assert len(set(sample)) == 8 and min(sample) < 107 <= max(sample)
