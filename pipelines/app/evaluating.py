"""Runs an evaluation of a trained model: processes, memory, and the files that it leaves."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig
from transformers.utils.logging import disable_progress_bar

from pipelines.app.checkpoint import check_checkpoint, file_hash
from pipelines.app.hydra_app import write_json
from pipelines.app.summary import SHORT_NAMES, summary
from pipelines.app.tracking import tracked
from value_aware_attention.call import chunked, max_elements_within
from value_aware_attention.distributed import is_first, own_device, started_processes
from value_aware_attention.files import save_json, write_text
from value_aware_attention.hugging_face.saved import saved_tokenizer
from value_aware_attention.measurement import Record
from value_aware_study.data.tokens import TOKENS_REMEDY
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.paths import inside

if TYPE_CHECKING:
    from wandb import Run


@contextmanager
def evaluating(cfg: DictConfig) -> Iterator[str]:
    """Joins all processes and keeps blocks within cfg.memory_gib; yields this process's device.

    Refuses a checkpoint that cannot be evaluated. Where memory runs out all the same, a ValueError
    names the values to lower.
    """
    with started_processes(), chunked(max_elements_within(cfg.memory_gib)):
        inside(cfg.records, cfg.name)
        check_checkpoint(cfg)
        if cfg.get("approximation") is None:  # a grid needs it at its end
            saved_tokenizer(cfg.tokenizer, TOKENS_REMEDY)
        if not (is_first() and sys.stderr.isatty()):
            disable_progress_bar()
        try:
            yield own_device()
        except (MemoryError, RuntimeError) as error:
            is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            if not is_memory and "DefaultCPUAllocator" not in str(error):  # which has no class
                raise
            raise ValueError(
                f"out of memory: lower evaluation.memory_gib (it is {cfg.memory_gib}), then "
                f"evaluation.batch_size (it is {cfg.task.batch_size})"
            ) from error


def hashes_of(cfg: DictConfig) -> dict[str, str]:
    """Computes the sha256 of the checkpoint and of the tokens."""
    return {"checkpoint": file_hash([cfg.checkpoint]), "data": file_hash([cfg.tokens])}


def tracked_by_first(
    cfg: DictConfig, stage: str, hashes: dict[str, str], cell: str = ""
) -> "AbstractContextManager[Run | None]":
    """Opens the stage's W&B run in the first process; yields None in the others.

    It is named after the model and, of a sweep, after the one cell that is measured.
    """
    name = f"{cfg.name} {cell}".strip()
    return tracked(cfg, stage, name, **hashes) if is_first() else nullcontext()


def write_record(cfg: DictConfig, folder: str, record: Record) -> None:
    """Writes <folder>/<model>.json in the first process."""
    if is_first():
        save_json(inside(folder, cfg.name, ".json"), record.to_json())


def write_summary(cfg: DictConfig, record: Record, explored: Exploration) -> None:
    """Writes the exploration, what `dvc metrics show` compares, and the curves that it plots."""
    if is_first():
        save_json(inside(cfg.explored, cfg.name, ".json"), explored.to_json())
        write_json(inside(cfg.metrics, cfg.name, ".json"), summary(record))
        write_text(inside(cfg.plots, cfg.name, ".csv"), curves(record))


def curves(record: Record) -> str:
    """Lists the end metric of both optimal choices by r as CSV, for every r that both have."""
    cells = [cell for cell in record.cells if cell.approximation in SHORT_NAMES]
    values = {(cell.parameters["r"], SHORT_NAMES[cell.approximation]): cell.value for cell in cells}
    names = list(SHORT_NAMES.values())
    both = (r for r in sorted({r for r, _ in values}) if all((r, name) in values for name in names))
    rows = [",".join(map(str, [r, *(values[r, name] for name in names)])) for r in both]
    return "\n".join([f"r,{','.join(names)}", *rows]) + "\n"
