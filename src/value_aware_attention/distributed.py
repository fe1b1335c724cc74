"""Shares work among the processes that torchrun starts, one per device.

They exchange only a few numbers per grid cell, so the gloo backend serves both CPUs and GPUs. A
process that was started alone computes everything.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE = timedelta(days=7)
"""Longest wait for a slower process; torchrun ends processes that wait for a dead one."""
SECONDS_TO_SPEAK = 60.0
"""Seconds that the other processes wait after a failure. torchrun ends all processes when one ends,
and the failing one must print its error first."""


@contextmanager
def started_processes() -> Iterator[None]:
    """Lets the processes that torchrun started (WORLD_SIZE) work together within the context.

    If a process fails, its error is raised in that process. In all others the context ends with
    SystemExit, so that the error is printed once.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    store, rank, size = next(rendezvous("env://"))
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE
    )
    try:
        yield
    except Exception:
        if _fails_first(store):
            raise
        time.sleep(SECONDS_TO_SPEAK)
        raise SystemExit(1) from None
    finally:
        distributed.destroy_process_group()


def _fails_first(store: distributed.Store) -> bool:
    """Returns whether this process is the first to fail; a lost store means that another was."""
    try:
        return store.add("failed", 1) == 1
    except RuntimeError:
        return False


def processes() -> int:
    """Returns the number of processes that work together."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def is_first() -> bool:
    """Returns whether this process writes files and draws progress."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def own_device() -> str:
    """Returns this process's GPU (from LOCAL_RANK) and makes it current; "cpu" without GPUs.

    Raises ValueError if this machine has more processes than GPUs.
    """
    if not torch.cuda.is_available():
        return "cpu"
    local, available = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= available:
        raise ValueError(
            f"process {local + 1} of this machine has no GPU of its own: start at most {available}"
        )
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def shared_map(compute: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Computes each item in one process and returns all results in every process.

    Items are dealt in turn: with P processes, rank p computes items p, p + P, p + 2 P ...
    """
    count = processes()
    if count == 1:
        return [compute(item) for item in items]
    shares: list[list[Result]] = [[] for _ in range(count)]
    distributed.all_gather_object(
        shares, [compute(item) for item in items[distributed.get_rank() :: count]]
    )
    return [shares[index % count][index // count] for index in range(len(items))]


def broadcast(read: Callable[[], Item]) -> Item:
    """Calls `read` in the first process and returns its result in every process."""
    if processes() == 1:
        return read()
    box = [read() if is_first() else None]
    distributed.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]
