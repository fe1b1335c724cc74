"""Stage evaluate: a trained model with its attention replaced, over a grid of approximations.

The grid of a model:   python -m pipelines.evaluate model=masked length=long
On eight GPUs:         torchrun --nproc-per-node 8 -m pipelines.evaluate kernel=elu
One cell:              python -m pipelines.evaluate kernel=elu approximation=sliding_window
Its own attention:     python -m pipelines.evaluate model=masked attention=sliding_window
A sweep with a table:  python -m pipelines.evaluate -m kernel=exponential,polynomial,elu \\
                           approximation=optimal_v_oblivious approximation.r=1,4,16,65
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers.utils.logging import disable_progress_bar

from pipelines.app import app, check_counts, plain, write_json
from pipelines.checkpoint import check_checkpoint
from pipelines.provenance import file_hash, run_on
from pipelines.tracking import tracked
from value_aware_attention.approximations.closest_combination import engine
from value_aware_attention.call import chunked, max_elements_within
from value_aware_attention.distributed import (
    is_first,
    own_device,
    processes,
    started_processes,
)
from value_aware_attention.measurement.cells import (
    Cell,
    end_metric,
    evaluate_own,
    expand_axes,
    source_hash,
)
from value_aware_attention.measurement.grid import evaluate_grid, measure_layers
from value_aware_attention.measurement.record_cache import RecordCache
from value_aware_attention.measurement.task import Task, UnitSums
from value_aware_attention.models.trained_attention import SEEDS_PER_LAYER, TrainedAttention


@app("evaluate")
def main(cfg: DictConfig) -> dict[str, Any]:
    """Writes <records>/<model>.json, or returns the row of the one cell asked for."""
    with evaluating(cfg) as device:
        return evaluate(cfg, device)


@contextmanager
def evaluating(cfg: DictConfig) -> Iterator[str]:
    """What an evaluation runs in: all processes, blocks within cfg.memory_gib. Yields the device.

    Where memory runs out all the same, a ValueError names the values to lower.
    """
    with started_processes(), chunked(max_elements_within(cfg.memory_gib)):
        if processes() > 1 and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ValueError(
                f"each of the {processes()} processes would run the whole sweep: start -m without "
                f"torchrun, or torchrun without -m"
            )
        check_counts(counts(cfg))
        check_checkpoint(cfg)
        if not is_first():
            disable_progress_bar()
        try:
            yield own_device()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                f"out of memory: lower evaluation.memory_gib (it is {cfg.memory_gib}), then "
                f"evaluation.batch_size (it is {cfg.task.batch_size})"
            ) from error


def counts(cfg: DictConfig) -> dict[str, Any]:
    """On how much text an evaluation is made, by the keys that a user sets; None = on all of it."""
    choices = HydraConfig.get().runtime.choices
    units = "causal_units" if choices["model"] == "causal" else f"masked_units.{choices['length']}"
    return {
        "evaluation.batch_size": cfg.task.batch_size,
        "evaluation.recorded_units": cfg.task.recorded_units,
    } | ({} if cfg.task.units is None else {f"evaluation.{units}": cfg.task.units})


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's or this machine's memory ended; torch has no class for the latter."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "DefaultCPUAllocator" in str(error)


def evaluate(cfg: DictConfig, device: str) -> dict[str, Any]:
    """The model's grid, its one cell, or what it scores with the attention it was trained with."""
    hashes = {"checkpoint": file_hash([cfg.checkpoint]), "data": file_hash([cfg.tokens])}
    task = instantiate(cfg.task, device=device)
    if attention := TrainedAttention.of(task.model.config):
        return own_attention(cfg, task, attention, hashes)
    cache = cells_kept(cfg, hashes)
    if cfg.approximation is not None:
        cell = build_cell(cfg, cfg.choice, plain(cfg.approximation))
        records, _ = evaluate_grid(task, [cell], cache)
        return row(cfg, records[-1])
    with tracked_by_first(cfg, "evaluate", hashes) as run:
        cells, calls = evaluate_grid(task, grid(cfg, task.length), cache)
        record = header(cfg, task, cells[0]) | hashes | {"cells": cells} | measure_layers(calls())
        record |= {"count_models": count_models(cfg, task, cells[0], cache)}
        record |= longer_text(cfg, task)
        write(cfg, cfg.records, "evaluate", record)
        log_table(run, cfg, record)
    return {}


def cells_kept(cfg: DictConfig, hashes: dict[str, str]) -> RecordCache:
    """The cells computed before: of this model, data and task, by the same engine."""
    searched = {"engine": engine(own_device())}
    return RecordCache(cfg.cache, hashes | searched | {"task": plain(cfg.task)})


def count_models(
    cfg: DictConfig, task: Task, exact: dict[str, Any], cache: RecordCache
) -> dict[str, Any]:
    """What counts of the training tokens score on the same targets."""
    counted = instantiate(cfg.count_models)
    key = {"count_models": plain(cfg.count_models), "training": file_hash([cfg.training])}
    sums = UnitSums(np.array(exact["unit_totals"]), np.array(exact["unit_counts"]))
    return cache.get(key | {"source": source_hash(counted)}, lambda: counted(task, sums))


def longer_text(cfg: DictConfig, task: Any) -> dict[str, Any]:
    """The masked LM on the longer one's text in pieces of its own length, the same tokens masked.

    Nothing for the longest model, where a piece does not start as its own sequences do, and where
    a source has less than one of the longer sequences.
    """
    length = cfg.longer.sequences.length if cfg.longer else task.length
    if length == task.length or length % task.length:
        return {}
    try:
        longer = instantiate(cfg.longer)(model=task.model, device=task.device)
    except InstantiationException as error:
        if "fill no sequence" not in str(error):
            raise
        return {}
    if (longer.inputs[:, 0] != task.inputs[0, 0]).any():
        return {}
    sums = longer.run(None)
    return {"longer_text": {"length": length, **end_metric(sums, sums, task.metric)}}


def tracked_by_first(
    cfg: DictConfig, stage: str, hashes: dict[str, str]
) -> AbstractContextManager[Any]:
    """The stage's W&B run in the first process, None in the others."""
    facts = {f"{name}_sha256": value for name, value in hashes.items()}
    return tracked(cfg, stage, cfg.name, **facts) if is_first() else nullcontext()


def write(cfg: DictConfig, folder: str, stage: str, record: dict[str, Any]) -> None:
    """The record and its metrics, by the first process."""
    if is_first():
        write_json(Path(folder) / f"{cfg.name}.json", record)
        write_json(Path(cfg.metrics) / stage / f"{cfg.name}.json", summary(record))


def own_attention(
    cfg: DictConfig, task: Task, attention: TrainedAttention, hashes: dict[str, str]
) -> dict[str, Any]:
    """Writes <trained>/<model>.json: a model with the attention it was trained with, no grid."""
    if cfg.approximation is not None:
        raise ValueError(
            f"{cfg.name} was trained with {attention}; {cfg.choice} can approximate the attention "
            f"of models trained with exact attention only"
        )
    cell = evaluate_own(task)
    record = header(cfg, task, cell) | hashes | {"cells": [cell]}
    record["kernel"] = None if attention.is_mixing else kernel_name(cfg.kernel, attention)
    record |= {"attention": attention.name, "arguments": dict(attention.arguments)}
    write(cfg, cfg.trained, "evaluate", record)
    return {"model": cfg.name, **{key: cell[key] for key in ("value", "low", "high", "count")}}


def kernel_name(asked: str, attention: TrainedAttention) -> str:
    """The kernel asked for, or the one that the method computes where it has only another."""
    names = [kernel.__name__.lower() for kernel in attention.kernels]
    return names[0] if names and asked not in names else asked


def grid(cfg: DictConfig, length: int) -> list[Cell]:
    """Every approximation with every combination of its axes."""
    return [
        build_cell(cfg, name, {**plain(cfg.methods[name]), **setting})
        for name, axes in cfg.axes.items()
        for setting in expand_axes(plain(axes), length)
    ]


def build_cell(cfg: DictConfig, name: str, option: dict[str, Any]) -> Cell:
    """The cell of one configured method; layers of a random method get different seeds."""
    method = {key: value for key, value in option.items() if key != "card"}

    def build(layer: int) -> Any:
        seeded = {"seed": method["seed"] * SEEDS_PER_LAYER + layer} if "seed" in method else {}
        return instantiate(method | seeded)

    parameters = {key: value for key, value in method.items() if key not in ("_target_", "search")}
    return Cell(name, parameters, build)


def header(cfg: DictConfig, task: Task, exact: dict[str, Any]) -> dict[str, Any]:
    """What the numbers of a record are about and were made on."""
    norms = exact.get("unit_squared_norms")
    return {
        "model": cfg.name,
        "task": "causal" if task.metric == "perplexity" else "masked",
        "kernel": cfg.kernel,
        "length": task.length,
        "head_dim": task.head_dim,
        "metric": task.metric,
        "unit": task.unit,
        "scale": cfg.scale,
        "run_on": run_on()
        | {"engine": engine(own_device())}
        | ({"processes": processes()} if processes() > 1 else {})
        | {
            "data": cfg.data,
            "targets": exact["count"],
            "evaluation_units": len(exact["unit_counts"]),
        }
        | ({"recorded_units": len(norms[0])} if norms else {}),
    }


def row(cfg: DictConfig, record: dict[str, Any]) -> dict[str, Any]:
    """A cell as a line of the table that a multirun prints."""
    metric = {key: record[key] for key in ("value", "low", "high", "count")}
    return {
        "model": cfg.name,
        "approximation": record["approximation"],
        **record["parameters"],
        **metric,
        "relative_output_error": record["relative_output_error"],
    }


def summary(record: dict[str, Any]) -> dict[str, float]:
    """One number a cell, for `dvc metrics show` and `dvc metrics diff`."""
    return {
        "_".join([cell["approximation"], *map(str, cell["parameters"].values())]): cell["value"]
        for cell in record["cells"]
    }


def log_table(run: Any, cfg: DictConfig, record: dict[str, Any]) -> None:
    """The grid as a wandb.Table with a scatter of end metric against output error."""
    if run is None:
        return
    import wandb

    rows = [row(cfg, cell) for cell in record["cells"]]
    columns: list[Any] = list(dict.fromkeys(key for line in rows for key in line))
    data = [[line.get(column) for column in columns] for line in rows]
    table = wandb.Table(columns=columns, data=data)
    scatter = partial(wandb.plot.scatter, table, "relative_output_error", "value")
    run.log({"grid": table, "metric_against_output_error": scatter(title=cfg.name)})


if __name__ == "__main__":
    main()
