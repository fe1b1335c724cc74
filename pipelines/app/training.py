"""Trains a model from its module and batches: checks, fit, the saved folder and its metrics."""

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from pytorch_lightning import seed_everything
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import Dataset

from pipelines.app.hydra_app import file_hash, plain, write_json
from pipelines.app.tracking import link, tracked
from value_aware_attention.files import CARD, check_replaceable, new_folder
from value_aware_attention.models.trained_attention import TrainedAttention
from value_aware_study.safe_text import check_apart, inside
from value_aware_study.training.fit import fit
from value_aware_study.training.model_card import model_card
from value_aware_study.training.modules import LanguageModeling

COSTS = ("accelerator", "devices", "nodes", "strategy", "accumulate", "workers", "compile",
         "checkpoint_activations", "peak_flops")  # fmt: skip
"""Arguments of the trainer that change the cost of a step and not its result."""

CPU_SPEED = 1e11
"""Assumed fp32 operations a second of a processor with a few cores, for an estimate of hours."""


def trained_attention(cfg: DictConfig) -> TrainedAttention | None:
    """Returns the attention that the option `attention` names; None = exact attention."""
    method = plain(cfg.attention)["method"]
    return TrainedAttention(method.pop("_target_"), method) if method else None


def train(
    cfg: DictConfig,
    build: Callable[[], LanguageModeling],
    batches: Dataset,
    held_out: Dataset,
    *,
    save: Callable[[Any, Path], None],
    facts: Mapping[str, object],
) -> None:
    """Trains what `build` makes, writes the model's folder and its metrics.

    `facts` belong to the hyper-parameters. A killed run continues if nothing that determines it has
    changed. Only the first of several processes writes.
    """
    check_trainer(cfg)
    first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
    data = file_hash([cfg.tokens])
    seed_everything(cfg.seed, verbose=False)
    module = build()
    operations = cfg.fit.steps * module.flops(batches[0], module.count_targets(batches[0]))
    check_gpu(cfg, cfg.name, lambda: operations)

    def write(curve: list[dict[str, float]]) -> None:
        check_finite(cfg.name, module.model, curve)
        write_model(cfg, module.model, save, metrics(cfg, module.model, curve, facts))

    with tracked(cfg, "train", cfg.name, data=data) if first else nullcontext() as run:
        try:
            fit(
                module,
                batches,
                held_out,
                evaluate_every=cfg.training.evaluate_every,
                checkpoint_every=cfg.training.checkpoint_every,
                log_every_n_steps=cfg.training.log_every,
                checkpoint_folder=inside(cfg.checkpoints, cfg.name),
                fingerprint=fingerprint(cfg, data),
                save=write,
                logger=StepLogger(experiment=run) if run else None,
                **cfg.trainer,
            )
        except torch.OutOfMemoryError:
            raise ValueError(
                f"out of GPU memory while training {cfg.name}: a batch_size of "
                f"{cfg.batches.batch_size} was taken in {cfg.trainer.accumulate} micro-batches; a "
                f"larger trainer.accumulate takes the same steps in less memory, and so does "
                f"trainer.checkpoint_activations=true"
            ) from None
        if run:
            link(run, "log_artifact", "checkpoint", file_hash([inside(cfg.models, cfg.name)]))


def fingerprint(cfg: DictConfig, data: str) -> str:
    """Computes the sha256 of everything that determines a training: its config and its tokens."""
    changes_nothing = ("run", "trainer", "data", "card")
    settings = {key: value for key, value in plain(cfg).items() if key not in changes_nothing}
    return sha256(repr((settings, numerics(cfg), data)).encode()).hexdigest()


def numerics(cfg: DictConfig) -> dict[str, object]:
    """Returns the trainer's arguments that may change a step's result, added ones too."""
    return {key: value for key, value in plain(cfg.trainer).items() if key not in COSTS}


class StepLogger(WandbLogger):
    """Logs the optimizer step as W&B's own step, the x axis in every reader of its files."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=step)


def check_finite(name: str, model: nn.Module, curve: Sequence[Mapping[str, float]]) -> None:
    """Refuses a model that learned nothing, before it takes the place of a good one."""
    if not all(math.isfinite(point["loss"]) for point in curve):
        raise ValueError(f"the loss of {name} is not finite; try a lower learning rate")
    for parameter, weights in model.named_parameters():
        if not weights.isfinite().all():
            raise ValueError(f"{parameter} of {name} is not finite; try a lower learning rate")


def write_model(
    cfg: DictConfig, model: nn.Module, save: Callable[..., None], record: dict[str, object]
) -> None:
    """Writes the model's folder, whole or not at all, and its metrics.

    It also has the tokenizer and the model's card, so that the folder is complete.
    """
    with new_folder(inside(cfg.models, cfg.name)) as folder:
        save(model, folder)
        copytree(Path(cfg.tokens) / "tokenizer", folder, dirs_exist_ok=True)
        (folder / CARD).write_text(model_card(record, **cfg.card), encoding="utf-8")
    write_json(inside(cfg.metrics, cfg.name, ".json"), record, checksum=True)


def check_trainer(cfg: DictConfig) -> None:
    """Raises ValueError for folders and devices that a training cannot use, before any work."""
    inside(cfg.models, cfg.attention.name)  # paths contain it too
    model = inside(cfg.models, cfg.name)
    check_replaceable(model)
    check_apart(model, Path(cfg.tokens))
    devices = cfg.trainer.devices * cfg.trainer.nodes
    shares = devices * cfg.trainer.accumulate
    if cfg.batches.batch_size % shares:  # before other processes are started
        raise ValueError(
            f"the batch_size of {cfg.name} is {cfg.batches.batch_size}; trainer.devices x "
            f"trainer.nodes x trainer.accumulate, which is {shares}, must divide it"
        )
    started_by_another = {"LOCAL_RANK", "SLURM_PROCID"} & set(os.environ)
    if devices > 1 and HydraConfig.get().mode == RunMode.MULTIRUN and not started_by_another:
        raise ValueError(
            "each process that training on several devices starts would run the whole sweep again: "
            "use hydra/launcher=submitit_slurm, or trainer.devices=1"
        )


def check_gpu(cfg: DictConfig, name: str, training: Callable[[], float]) -> None:
    """Raises ValueError for a training meant for GPUs if there is none, with its hours on a CPU.

    `training` counts the operations of the whole training.
    """
    if cfg.trainer.accelerator != "gpu" or torch.accelerator.is_available():
        return
    operations = training()
    hours = operations / CPU_SPEED / 3600
    time = f"{hours / 24:,.0f} days" if hours > 48 else f"{max(1, round(hours))} hours"
    raise ValueError(
        f"{name} is meant for a GPU and there is none: {operations:.1e} operations of training "
        f"would take a CPU of {CPU_SPEED:.0e} operations a second {time}; "
        f"trainer.accelerator=auto runs all the same"
    )


def metrics(
    cfg: DictConfig, model: nn.Module, curve: list[dict[str, float]], facts: Mapping[str, object]
) -> dict[str, Any]:
    """Collects the learning curve, its last point, Table 4's hyper-parameters, the device."""
    on_gpu = torch.cuda.is_available() and cfg.trainer.accelerator != "cpu"
    device = torch.cuda.get_device_name() if on_gpu else f"CPU ({platform.machine()})"
    module = plain(cfg.module)
    schedule, optimizer = module.pop("schedule"), module.pop("optimizer")
    left_out = ("_target_", "_partial_", "lr", "eps", "fused", "betas")  # or under other names
    sizes = {**cfg.get("model", {}), **cfg.get("layers", {}), **cfg.get("positions", {})}
    hyperparameters = {
        **{key: value for key, value in sizes.items() if key not in ("_target_", "kernel")},
        **cfg.batches,
        **cfg.fit,
        **{key: value for key, value in module.items() if key != "_target_"},
        "learning_rate": schedule["peak"],
        "warmup_steps": schedule.get("warmup_steps"),
        "warmup_proportion": schedule.get("warmup_proportion"),
        "schedule": schedule["_target_"].rpartition(".")[2],
        "optimizer": optimizer["_target_"].rpartition(".")[2],
        # keys of every optimizer; null if it has none
        **dict.fromkeys(("weight_decay", "adamw_rate", "momentum", "max_grad_norm")),
        **{key: value for key, value in optimizer.items() if key not in left_out},
        "gradient_accumulation": cfg.trainer.accumulate,
        **dict(zip(("beta_1", "beta_2"), optimizer.get("betas", (None, None)), strict=True)),
        **numerics(cfg),
        **facts,
    }
    return {
        "model": cfg.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": cfg.fit.steps,
        "tokens": cfg.fit.steps * cfg.batches.batch_size * hyperparameters["length"],
        "curve": curve,
        "hyperparameters": hyperparameters,
        "trained_on": f"{device}, torch {torch.__version__}",
        **{key: value for key, value in curve[-1].items() if key != "step"},
    }
