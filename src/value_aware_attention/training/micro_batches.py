"""A step's batch in parts: micro-batches taken one after the other, shares of processes at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Batch", "Part", "Parts", "check_parts", "row_count", "rows_of"]

Batch = Any  # a tensor, or a dictionary of tensors whose first dimension is the batch


class Part(NamedTuple):
    """What one forward and backward pass reads of a step's batch."""

    rows: Batch
    number: int  # of the micro-batch within its step
    targets: int  # of the step's whole batch: parts may hold more or fewer of its masked tokens


class Parts(Dataset[Part]):
    """Item s * accumulate + i: the rows i, i + accumulate, ... of batch s."""

    def __init__(
        self,
        batches: Dataset[Any],
        *,
        accumulate: int,
        processes: int,
        count_targets: Callable[[Batch], int],
    ) -> None:
        self.batches, self.accumulate, self.processes = batches, accumulate, processes
        self.count_targets = count_targets

    def __getitem__(self, item: int) -> Part:
        step, index = divmod(item, self.accumulate)
        batch = self.batches[step]
        check_parts(self.processes, self.accumulate, row_count(batch))
        rows = rows_of(batch, slice(index, None, self.accumulate))
        return Part(rows, index, self.count_targets(batch))


def check_parts(devices: int, accumulate: int, batch_size: int | None = None) -> None:
    """Raises ValueError where there are no parts, or a batch does not divide into equal ones."""
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
