"""Batches by optimizer step: item s depends on (seed, s) alone.

So a killed run continues with exactly the batches that it would have read. A loader must not
shuffle or batch these data sets again. Tokens are read from memory maps.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from value_aware_attention.measurement.masking import IGNORED, mask_tokens
from value_aware_study.data.tokens import (
    TOKENS_REMEDY,
    Tokens,
    check_vocabulary,
    read_tokens,
    rearrange,
)

Batch = Any  # a tensor, or a dictionary of tensors whose first dimension is the batch


class CausalBatches(Dataset[Tensor]):
    """Yields training batches of a causal LM: int64 (batch_size, length + 1).

    Inputs are [:-1] and targets [1:]. The stream is cut into blocks of `length` tokens plus the
    next one. Each epoch starts the cut at another offset and shuffles the blocks anew.
    """

    def __init__(self, path: Path, *, length: int, batch_size: int, steps: int, seed: int) -> None:
        self.tokens = read_tokens(path, dimensions=1)
        if len(self.tokens) < length + 1:
            raise ValueError(f"{path}: {len(self.tokens)} tokens are too few for length {length}")
        self.length, self.batch_size, self.steps, self.seed = length, batch_size, steps, seed
        # one block less than fits, so that every offset below `length` gives the same number
        self.blocks = max(1, len(self.tokens) // length - 1)
        self.offsets = min(length, len(self.tokens) - self.blocks * length)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Tensor:
        starts = [
            _offset(self.offsets, self.seed, epoch) + block * self.length
            for epoch, block in _visits(
                step, self.batch_size, self.steps, count=self.blocks, seed=self.seed
            )
        ]
        rows = [self.tokens[start : start + self.length + 1] for start in starts]
        return torch.from_numpy(np.stack(rows, dtype=np.int64))


class MaskedSequences:
    """Reads instances of several sources as sequences of `length` tokens, and masks them.

    Instances shorter than `length` are joined within their source (`rearrange`).
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        length: int,
        mask_token: int,
        special_tokens: Sequence[int],
        vocabulary_size: int,
        fraction: float = 0.15,
    ) -> None:
        if not paths:
            raise ValueError("masked batches need at least one file of instances, none was given")
        instances = [read_tokens(path, dimensions=2) for path in paths]
        for path, tokens in zip(paths, instances, strict=True):
            check_vocabulary(path, tokens, vocabulary_size)
        self.sources = [rearrange(tokens, length) for tokens in instances]
        self.sequences: ConcatDataset[Tokens] = ConcatDataset(self.sources)  # type: ignore[arg-type]
        self.mask_token, self.special_tokens = mask_token, list(special_tokens)
        self.vocabulary_size = vocabulary_size
        self.fraction = fraction

    def __len__(self) -> int:
        return len(self.sequences)

    def tokens(self, indices: Sequence[int]) -> Tensor:
        """Returns unmasked sequences, int64 (len(indices), length)."""
        return torch.from_numpy(np.stack([self.sequences[i] for i in indices], dtype=np.int64))

    def masked(self, tokens: Tensor, *seed: int) -> dict[str, Tensor]:
        """Masks tokens at positions drawn from `seed`: input_ids and labels, -100 = not masked."""
        # neighbouring integers are good seeds for torch, but (1, 2) and (2, 1) must differ
        entropy = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1)
        generator = torch.Generator().manual_seed(int(entropy))
        inputs, labels = mask_tokens(
            tokens,
            generator=generator,
            mask_token=self.mask_token,
            special_tokens=self.special_tokens,
            vocabulary_size=self.vocabulary_size,
            fraction=self.fraction,
        )
        return {"input_ids": inputs, "labels": labels}


def masked_sequences(
    *, folder: Path | str, split: str, length: int, fraction: float, block: int | None = None
) -> MaskedSequences:
    """Reads the masked LM's sequences of all sources that `write_tokens` left in `folder`.

    Instances of exactly `length` tokens are used as they are (the L - 2 chunks of A.1). Without
    them, shorter ones are joined (Table 4). Raises ValueError if none has the length `block`;
    None = any length.
    """
    from value_aware_attention.hugging_face.saved import saved_tokenizer

    root = Path(folder)
    lengths = sorted(int(path.name) for path in root.glob("*") if path.name.isdigit())
    if not lengths:
        raise FileNotFoundError(f"{root} holds no instances; run python -m pipelines.tokens first")
    if block is not None and block not in lengths:
        raise ValueError(
            f"masked.block is {block}; {root} was made with {lengths[0]}: take that, or "
            f"{TOKENS_REMEDY}"
        )
    instances = root / str(length if length in lengths else lengths[0])
    tokenizer = saved_tokenizer(root / "tokenizer", TOKENS_REMEDY)
    return MaskedSequences(
        sorted(instances.rglob(f"{split}.npy")),
        length=length,
        mask_token=tokenizer.mask_token_id,
        special_tokens=tokenizer.all_special_ids,
        vocabulary_size=len(tokenizer),
        fraction=fraction,
    )


class MaskedBatches(Dataset[dict[str, Tensor]]):
    """Yields training batches of a masked LM: input_ids and labels, int64 (batch_size, length).

    Each epoch shuffles the sequences of all sources and masks them anew (dynamic masking).
    """

    def __init__(
        self, sequences: MaskedSequences, *, batch_size: int, steps: int, seed: int
    ) -> None:
        self.sequences = sequences
        self.batch_size, self.steps, self.seed = batch_size, steps, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        visits = _visits(
            step, self.batch_size, self.steps, count=len(self.sequences), seed=self.seed
        )
        return self.sequences.masked(
            self.sequences.tokens([sequence for _, sequence in visits]), self.seed, step
        )


class FrozenMaskedBatches(Dataset[dict[str, Tensor]]):
    """Yields evaluation batches of a masked LM: sequences and masks that never change.

    `seed` gives the order of the sequences over all sources, so the first `limit` (None = all) are
    a sample of all sources. The mask of sequence i depends on (seed, i) alone, whatever the batch
    size. The last batch may be smaller. Raises ValueError if no token is masked.
    """

    def __init__(
        self, sequences: MaskedSequences, *, batch_size: int, seed: int, limit: int | None = None
    ) -> None:
        self.sequences = sequences
        self.batch_size, self.seed = batch_size, seed
        self.count = len(sequences) if limit is None else min(limit, len(sequences))
        if not any((self[batch]["labels"] != IGNORED).any() for batch in range(len(self))):
            raise ValueError(
                f"no masked token in {self.count} held-out sequences; masked.fraction is "
                f"{sequences.fraction:g}, raise it"
            )

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __getitem__(self, batch: int) -> dict[str, Tensor]:
        order = _permutation(len(self.sequences), self.seed, 0)
        indices = _indices(batch, self.batch_size, len(self))
        rows = [
            self.sequences.masked(self.sequences.tokens([int(order[index])]), self.seed, index)
            for index in indices[: self.count - indices.start]
        ]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


class MicroBatch(NamedTuple):
    """The input of one forward and backward pass: a part of a step's batch."""

    rows: Batch
    position: int  # within its step
    targets: int  # in the whole batch; micro-batches differ in their masked tokens


class MicroBatches(Dataset[MicroBatch]):
    """Cuts batch s into micro-batches: item s * accumulate + i has rows i, i + accumulate, ..."""

    def __init__(
        self,
        batches: Dataset[Batch],
        *,
        accumulate: int,
        world_size: int,
        count_targets: Callable[[Batch], int],
    ) -> None:
        self.batches, self.accumulate, self.world_size = batches, accumulate, world_size
        self.count_targets = count_targets

    def __getitem__(self, item: int) -> MicroBatch:
        step, index = divmod(item, self.accumulate)
        batch = self.batches[step]
        check_micro_batches(self.world_size, self.accumulate, row_count(batch))
        return MicroBatch(
            rows_of(batch, slice(index, None, self.accumulate)), index, self.count_targets(batch)
        )


def check_micro_batches(devices: int, accumulate: int, batch_size: int | None = None) -> None:
    """Raises ValueError unless a batch divides into equal micro-batches, one or more per device."""
    if min(devices, accumulate) < 1:
        raise ValueError(f"devices {devices} and accumulate {accumulate} must be at least 1")
    if batch_size is not None and batch_size % (devices * accumulate):
        raise ValueError(
            f"batch_size {batch_size} does not divide over {devices} devices with {accumulate} "
            f"micro-batches each; it must be a multiple of {devices * accumulate}"
        )


def rows_of(batch: Batch, rows: slice) -> Batch:
    is_tensor = isinstance(batch, Tensor)
    return batch[rows] if is_tensor else {name: tensor[rows] for name, tensor in batch.items()}


def row_count(batch: Batch) -> int:
    return len(batch if isinstance(batch, Tensor) else next(iter(batch.values())))


def _indices(step: int, batch_size: int, steps: int) -> range:
    if not 0 <= step < steps:
        raise IndexError(f"step {step} is outside 0 .. {steps - 1}")
    return range(step * batch_size, (step + 1) * batch_size)


def _visits(
    step: int, batch_size: int, steps: int, *, count: int, seed: int
) -> Iterator[tuple[int, int]]:
    """Yields epoch and element for each row of a step; an epoch has `count` elements."""
    for index in _indices(step, batch_size, steps):
        epoch, position = divmod(index, count)
        yield epoch, int(_permutation(count, seed, epoch)[position])


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order: NDArray[np.int64] = np.arange(count, dtype=np.int64)
    np.random.default_rng((seed, epoch, 0)).shuffle(order)
    return order


@lru_cache(maxsize=4)
def _offset(count: int, seed: int, epoch: int) -> int:
    return int(np.random.default_rng((seed, epoch, 1)).integers(count))
