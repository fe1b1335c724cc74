"""Runs an evaluation of a trained model: its checkpoint, processes, memory, and its files."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig
from transformers.utils.logging import disable_progress_bar

from pipelines.app.hydra_app import file_hash, write_json
from pipelines.app.summary import SHORT_NAMES, summary
from pipelines.app.tracking import tracked
from value_aware_attention.call import chunked, max_elements_within
from value_aware_attention.distributed import is_first, own_device, started_processes
from value_aware_attention.files import (
    CHECKSUMS,
    checksum,
    load_json,
    save_json,
    unnamed,
    write_text,
)
from value_aware_attention.hugging_face.saved import check_files, saved_tokenizer
from value_aware_attention.measurement import Record
from value_aware_study.data.tokens import TOKENS_REMEDY
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.safe_text import inside

if TYPE_CHECKING:
    from wandb import Run

CONFIG_FILE, CHECKPOINT_WEIGHTS, TOKENIZER_FILE = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
)
TRAIN_AGAIN = "train the model again"


@contextmanager
def evaluating(cfg: DictConfig) -> Iterator[str]:
    """Joins all processes and keeps blocks within cfg.memory_gib; yields this process's device.

    Refuses a checkpoint that cannot be evaluated. If memory still runs out, a ValueError names the
    values to lower.
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
            if not is_memory and "DefaultCPUAllocator" not in str(error):  # it has no class
                raise
            raise ValueError(
                f"out of memory: lower evaluation.memory_gib (it is {cfg.memory_gib}), then "
                f"evaluation.batch_size (it is {cfg.task.batch_size})"
            ) from error


def hashes_of(cfg: DictConfig) -> dict[str, str]:
    return {"checkpoint": file_hash([cfg.checkpoint]), "data": file_hash([cfg.tokens])}


def tracked_by_first(
    cfg: DictConfig, stage: str, hashes: dict[str, str], cell: str = ""
) -> "AbstractContextManager[Run | None]":
    """Opens the stage's W&B run in the first process; yields None in the others.

    It is named after the model and, in a sweep, also after the cell that is measured.
    """
    return (
        tracked(cfg, stage, f"{cfg.name} {cell}".strip(), **hashes) if is_first() else nullcontext()
    )


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
    import pandas as pd

    by_method = {
        name: {c.parameters["r"]: c.value for c in record.cells if c.approximation == method}
        for method, name in SHORT_NAMES.items()
    }
    return (
        pd.DataFrame(by_method).dropna().sort_index().to_csv(index_label="r", lineterminator="\n")
    )


def check_checkpoint(cfg: DictConfig) -> None:
    """Refuses, before any work, a model that is missing, damaged or does not match `cfg`.

    Its sizes must match, and its own tokenizer must have made the tokens. Raises FileNotFoundError
    or ValueError.
    """
    folder, tokens = Path(cfg.checkpoint), Path(cfg.tokens)
    check_model(folder)
    beside = (tokens if tokens.is_dir() else tokens.parent) / "tokenizer" / TOKENIZER_FILE
    if not (tokenizer := folder / TOKENIZER_FILE).exists():
        raise FileNotFoundError(f"{tokenizer} is missing: {TRAIN_AGAIN}")
    if beside.is_file() and checksum(tokenizer) != checksum(beside):
        raise ValueError(
            f"{tokens} was made with another tokenizer ({beside}) than {folder} was trained with: "
            f"train the model on these tokens (dvc repro), or make the tokens of its training again"
        )
    config = load_json(folder / CONFIG_FILE, remedy=TRAIN_AGAIN)
    unsaid = {name: cfg.sizes[name] for name in cfg.sizes if name == "masked_fraction"}
    other = [name for name, size in cfg.sizes.items() if (unsaid | config).get(name) != size]
    if other:
        saved, asked = (
            ", ".join(f"{name} {sizes.get(name)}" for name in other)
            for sizes in (config, dict(cfg.sizes))
        )
        raise ValueError(
            f"{folder} holds a model with {saved}; scale={cfg.scale} asks for {asked}: train it at "
            f"this scale, or give the scale and values that it was trained with"
        )


def check_model(folder: Path) -> None:
    """Refuses a trained model of which a file is missing, damaged or changed since it was written.

    Raises FileNotFoundError or ValueError, which name the file.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is missing: train the model first (dvc repro)")
    for name in (CONFIG_FILE, CHECKPOINT_WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing: {TRAIN_AGAIN}")
    check_files(folder, TRAIN_AGAIN)
    if (folder / CHECKSUMS).is_file() and (files := unnamed(folder)):
        raise ValueError(
            f"{folder / CHECKSUMS} does not name {files[0]}, which was added: {TRAIN_AGAIN}"
        )
