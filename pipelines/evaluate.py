"""Stage evaluate: a trained model with its attention replaced, over a grid of approximations.

The grid of a model:   python -m pipelines.evaluate model=masked length=long
On eight GPUs:         torchrun --nproc-per-node 8 -m pipelines.evaluate kernel=elu
One cell:              python -m pipelines.evaluate kernel=elu approximation=sliding_window
Its own attention:     python -m pipelines.evaluate model=masked attention=sliding_window
A sweep with a table:  python -m pipelines.evaluate -m kernel=exponential,polynomial,elu \\
                           approximation=optimal_v_oblivious approximation.r=1,4,16,65
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers.utils.logging import disable_progress_bar

from pipelines.app import app, plain, write_json
from pipelines.checkpoint import check_checkpoint
from pipelines.provenance import file_hash
from pipelines.summary import SHORT, row, summary
from pipelines.tracking import log_record, tracked
from value_aware_attention.approximations import (
    Approximation,
    LeaveOneOutKeys,
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
)
from value_aware_attention.call import chunked, max_elements_within
from value_aware_attention.distributed import (
    is_first,
    own_device,
    started_processes,
)
from value_aware_attention.hugging_face.saved import saved_tokenizer
from value_aware_attention.measurement import Record, Setting, Task, measure
from value_aware_attention.measurement.cells import end_metric
from value_aware_attention.measurement.measure import measure_own
from value_aware_attention.measurement.record import Baseline, Cell, read
from value_aware_attention.measurement.record_cache import RecordCache
from value_aware_attention.measurement.source import source_hash
from value_aware_attention.measurement.tasks import UnitSums
from value_aware_attention.models.trained_attention import SEEDS_PER_LAYER, TrainedAttention
from value_aware_attention.storage import with_checksum, write_text
from value_aware_study.data.token_arrays import AGAIN
from value_aware_study.paths import inside
from value_aware_study.tasks.exploration import Exploration
from value_aware_study.tasks.explorer import explored_model

EXPLORED = {
    "chosen by weight (OVO)": OptimalValueOblivious,
    "chosen for the output (OVA)": OptimalValueAware,
    "leave one out": LeaveOneOutKeys,
    "sliding window": SlidingWindow,
}
"""The methods of the token explorer"""


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
        inside(cfg.records, cfg.name)
        check_checkpoint(cfg)
        if cfg.get("approximation") is None:  # one that cannot be read would be found at the end
            saved_tokenizer(cfg.tokenizer, AGAIN)
        if not (is_first() and sys.stderr.isatty()):
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's or this machine's memory ended; torch has no class for the latter."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "DefaultCPUAllocator" in str(error)


def evaluate(cfg: DictConfig, device: str) -> dict[str, Any]:
    """The model's grid, its one cell, or what it scores with the attention it was trained with."""
    task = instantiate(cfg.task, device=device)
    options: dict[str, Any] = {"name": cfg.name, "description": cfg.data}
    if attention := TrainedAttention.of(task.model.config):
        return own_attention(cfg, measure_own(task, **options), attention)
    hashes = hashes_of(cfg)
    options |= {"cache": cfg.cache, "weights": hashes["checkpoint"]}
    if cfg.approximation is not None:
        chosen = setting(cfg.choice, plain(cfg.approximation))
        with tracked_by_first(cfg, "evaluate", hashes) as run:
            record = measure(task, [chosen], layers=None, **options)
            log_record(run, record)
        return row(record, record.cells[-1])
    with tracked_by_first(cfg, "evaluate", hashes) as run:
        record = measure(task, grid(cfg, task.length), **options)
        beside = count_models(cfg, task, record.cells[0]) | longer_text(cfg, task)
        record = replace(record, scale=cfg.scale, hashes=hashes, baselines=beside)
        explored = with_checksum(exploration(cfg, task))
        write_text(inside(cfg.explored.folder, cfg.name, ".json"), explored)
        write_summary(cfg, record)
        write(cfg, cfg.records, record)  # last: a record has everything that belongs to it
        log_record(run, record)
    return {}


def hashes_of(cfg: DictConfig) -> dict[str, str]:
    """sha256 of the checkpoint and of the tokens."""
    return {"checkpoint": file_hash([cfg.checkpoint]), "data": file_hash([cfg.tokens])}


def count_models(cfg: DictConfig, task: Task, exact: Cell) -> dict[str, Baseline]:
    """What counts of the training tokens score on the same targets."""
    counted = instantiate(cfg.count_models)
    sums = UnitSums(np.array(exact.unit_totals), np.array(exact.unit_counts))
    key = {
        "count_models": plain(cfg.count_models),
        "training": file_hash([cfg.training]),
        "source": source_hash(type(counted).__module__),
        "text": task.digest(0),
        "exact": exact.unit_totals,
    }

    def compute() -> dict[str, Any]:
        return {name: asdict(model) for name, model in counted(task, sums).items()}

    found = RecordCache(cfg.cache, {}).get(key, compute)
    return {name: read(Baseline, model) for name, model in found.items()}


def longer_text(cfg: DictConfig, task: Any) -> dict[str, Baseline]:
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
    return {"longer_text": Baseline(length=length, **end_metric(sums, sums, task.metric))}


def tracked_by_first(
    cfg: DictConfig, stage: str, hashes: dict[str, str]
) -> AbstractContextManager[Any]:
    """The stage's W&B run in the first process, None in the others."""
    return tracked(cfg, stage, cfg.name, **hashes) if is_first() else nullcontext()


def write(cfg: DictConfig, folder: str, record: Record) -> None:
    """The record, by the first process."""
    if is_first():
        write_text(inside(folder, cfg.name, ".json"), with_checksum(record.to_json()))


def write_summary(cfg: DictConfig, record: Record) -> None:
    """What `dvc metrics show` compares, and the curves that `dvc plots show` draws."""
    if is_first():
        write_json(inside(cfg.metrics, cfg.name, ".json"), summary(record))
        write_text(inside(cfg.plots, cfg.name, ".csv"), curves(record))


def curves(record: Record) -> str:
    """The end metric of the two optimal choices against r, as CSV, where both were measured."""
    cells = [cell for cell in record.cells if cell.approximation in SHORT]
    values = {(cell.parameters["r"], SHORT[cell.approximation]): cell.value for cell in cells}
    names = list(SHORT.values())
    both = (r for r in sorted({r for r, _ in values}) if all((r, name) in values for name in names))
    rows = [",".join(map(str, [r, *(values[r, name] for name in names)])) for r in both]
    return "\n".join([f"r,{','.join(names)}", *rows]) + "\n"


def exploration(cfg: DictConfig, task: Task) -> str:
    """What every head keeps of a text's first tokens, for the token explorer.

    Of the recorded texts the one that reads most like words.
    """
    tokenizer = saved_tokenizer(cfg.tokenizer, AGAIN)
    calls = task.layer_calls()
    texts = [
        [str(tokenizer.decode([token])) for token in task.first_tokens(cfg.explored.tokens, unit)]
        for unit in range(len(calls[0].query))
    ]
    unit = max(range(len(texts)), key=lambda unit: sum(t.strip().isalpha() for t in texts[unit]))
    shown = [call.unit(unit) for call in calls]
    model = explored_model(cfg.name, shown, texts[unit], EXPLORED, cfg.explored.sizes)
    return Exploration(tuple(cfg.explored.sizes), tuple(EXPLORED), (model,)).to_json()


def own_attention(cfg: DictConfig, record: Record, attention: TrainedAttention) -> dict[str, Any]:
    """Writes <trained>/<model>.json: a model with the attention it was trained with, no grid."""
    if cfg.approximation is not None:
        raise ValueError(
            f"{cfg.name} was trained with {attention}; {cfg.choice} can approximate the attention "
            f"of models trained with exact attention only"
        )
    record = replace(
        record,
        kernel=None if attention.is_mixing else kernel_name(cfg.kernel, attention),
        scale=cfg.scale,
        hashes=hashes_of(cfg),
        trained_with=attention.name,
        arguments=dict(attention.arguments),
    )
    write(cfg, cfg.trained, record)
    return row(record, record.cells[0])


def kernel_name(asked: str, attention: TrainedAttention) -> str:
    """The kernel asked for, or the one that the method computes where it has only another."""
    names = [kernel.__name__.lower() for kernel in attention.kernels]
    return names[0] if names and asked not in names else asked


def grid(cfg: DictConfig, length: int) -> list[Setting]:
    """Every approximation with every combination of its axes."""
    return [
        setting(name, {**plain(cfg.methods[name]), **parameters})
        for name, axes in cfg.axes.items()
        for parameters in expand_axes(plain(axes), length)
    ]


def expand_axes(axes: Mapping[str, Sequence[Any]], length: int) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' values; "all" is `length` and larger budgets are left out."""
    values = [
        dict.fromkeys(length if value == "all" else value for value in axis)
        for axis in axes.values()
    ]
    for combination in product(*values):
        cell = dict(zip(axes, combination, strict=True))
        if cell.get("r", 0) <= length:
            yield cell


def setting(name: str, option: dict[str, Any]) -> Setting:
    """One configured method; layers of a random one get different seeds."""
    method = {key: value for key, value in option.items() if key != "card"}

    def build(layer: int) -> Any:
        seeded = {"seed": method["seed"] * SEEDS_PER_LAYER + layer} if "seed" in method else {}
        built = instantiate(method | seeded)
        if not isinstance(built, Approximation):
            raise ValueError(f"{name}: {method['_target_']} makes no approximation of attention")
        return built

    parameters = {key: value for key, value in method.items() if key not in ("_target_", "search")}
    return Setting(name, parameters, build)


if __name__ == "__main__":
    main()
