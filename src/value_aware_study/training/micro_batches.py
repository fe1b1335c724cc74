"""A step's batch as micro-batches, taken one after the other, and each process's rows of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Batch", "MicroBatch", "MicroBatches", "check_micro_batches", "row_count", "rows_of"]

Batch = Any  # a tensor, or a dictionary of tensors whose first dimension is the batch


class MicroBatch(NamedTuple):
    """Holds what one forward and backward pass reads of a step's batch."""

    rows: Batch
    position: int  # within its step
    targets: int  # of the whole batch: a micro-batch may hold more or fewer of its masked tokens


class MicroBatches(Dataset[MicroBatch]):
    """Cuts batch s into items s * accumulate + i: its rows i, i + accumulate, ..."""

    def __init__(
        self,
        batches: Dataset[Any],
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
        rows = rows_of(batch, slice(index, None, self.accumulate))
        return MicroBatch(rows, index, self.count_targets(batch))


def check_micro_batches(devices: int, accumulate: int, batch_size: int | None = None) -> None:
    """Raises ValueError where there are none, or a batch does not divide into equal ones."""
    if min(devices, accumulate) < 1:
        raise ValueError(f"devices {devices} and accumulate {accumulate} must be at least 1")
    if batch_size is not None and batch_size % (devices * accumulate):
        raise ValueError(
            f"batch_size {batch_size} does not divide over {devices} devices with {accumulate} "
            f"micro-batches each; it must be a multiple of {devices * accumulate}"
        )


def rows_of(batch: Batch, rows: slice) -> Batch:
    if isinstance(batch, Tensor):
        return batch[rows]
    return {name: tensor[rows] for name, tensor in batch.items()}


def row_count(batch: Batch) -> int:
    return len(batch if isinstance(batch, Tensor) else next(iter(batch.values())))
