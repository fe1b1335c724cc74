"""Training that can be killed: `fit` continues where the last checkpoint left off."""

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader, Dataset, Sampler

from value_aware_attention.flex import missing_compiler
from value_aware_attention.training.callbacks import ResumableCheckpoint, StepProgress
from value_aware_attention.training.checkpoint_files import CheckpointFiles
from value_aware_attention.training.flops import peak_flops as peak_flops_of
from value_aware_attention.training.module import LanguageModeling
from value_aware_attention.training.parts import Parts, check_parts

__all__ = ["fit"]

UNHELPFUL = (
    r".*does not have many workers.*",
    r".*is smaller than the logging interval.*",
    r".*your dataloader is not resumable.*",  # it is: `_Items` starts after the steps taken
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
)

LIGHTNING = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")


def fit(
    module: LanguageModeling,
    train_batches: Dataset[Any],
    evaluation_batches: Dataset[Any],
    *,
    steps: int,
    evaluate_every: int,
    checkpoint_every: int,
    checkpoint_folder: Path,
    fingerprint: str,
    log_every: int = 10,
    logger: Logger | None = None,
    accelerator: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    strategy: str = "auto",
    accumulate: int = 1,
    precision: str = "32-true",
    progress_bar: bool = True,
    workers: int = 0,
    compile: bool = False,
    checkpoint_activations: bool = False,
    peak_flops: float | None = None,
) -> list[dict[str, float]]:
    """Takes `steps` optimizer steps, step s on train_batches[s]; returns the learning curve.

    The curve has an entry {"step", "loss", "perplexity" or "error"} for every `evaluate_every`
    steps and for the last. With `devices` on each of `nodes` machines every device takes its share
    of a batch's rows, in `accumulate` micro-batches one after the other; the step is the same.

    A run that was killed continues, bit by bit, from `checkpoint_folder`/last.ckpt, if that was
    written with the same `fingerprint` (anything that identifies the settings) and `accumulate`, or
    from the one before it where that file is damaged; both are gone when fit returns. SIGTERM ends
    the process with exit code 143; where it is the only one, it saves the step it is at, unless an
    evaluation is due after it.

    `workers` processes read batches ahead. `compile` compiles every layer with torch.compile, on
    first use, `checkpoint_activations` computes the layers' activations again in the backward pass
    instead of keeping them: the same step with other costs. `peak_flops`, of one device, is for the
    log of utilisation; None = that of the GPU, if its name and `precision` are known.

    Raises ValueError for settings that leave nothing to do, a batch that does not divide, devices
    that are not there, a compiler that is not there, and a folder in which another run is going.
    """
    check_parts(devices * nodes, accumulate)
    _check(train_batches, steps, evaluate_every, checkpoint_every)
    files = CheckpointFiles(checkpoint_folder)
    checkpoint = ResumableCheckpoint(
        files,
        fingerprint=f"{fingerprint}, {accumulate} micro-batches",
        every=checkpoint_every,
        evaluate_every=evaluate_every,
    )
    with _quiet(), torch.random.fork_rng(devices=[]):
        trainer = _trainer(
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=strategy,
            accumulate_grad_batches=accumulate,
            precision=precision,
            logger=logger or False,
            log_every_n_steps=log_every,
            max_steps=steps,
            val_check_interval=evaluate_every * accumulate,
            callbacks=[checkpoint, StepProgress()] if progress_bar else [checkpoint],
            plugins=_plugins(files),
            default_root_dir=checkpoint_folder,
        )
        device = trainer.strategy.root_device
        module.peak_flops = peak_flops or _known_peak(device, precision)
        if checkpoint_activations:
            module.checkpoint_activations()
        if compile:
            _compile_layers(module, device)
        loader = partial(
            DataLoader, batch_size=None, num_workers=workers, pin_memory=device.type == "cuda"
        )
        with files.held() if trainer.is_global_zero else nullcontext():
            taken, resume = checkpoint.newest()
            evaluation = loader(evaluation_batches)
            parts = Parts(
                train_batches,
                accumulate=accumulate,
                processes=trainer.world_size,
                count_targets=type(module).count_targets,
            )
            sampler = _Items(taken * accumulate, steps * accumulate)
            training = loader(parts, sampler=sampler)
            module.train()
            try:
                trainer.fit(module, training, evaluation, ckpt_path=resume, weights_only=True)
            except SIGTERMException as stop:
                stop.code = 128 + signal.SIGTERM  # Lightning's own is 0, as if all had been done
                raise
            if steps % evaluate_every:
                trainer.validate(module, evaluation, verbose=False)
            if trainer.is_global_zero:
                files.remove()
    return module.curve


def _trainer(**arguments: Any) -> Trainer:
    """Without what this module does itself; devices that are not there are a ValueError."""
    try:
        return Trainer(
            **arguments,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
        )
    except MisconfigurationException as error:
        raise ValueError(" ".join(str(error).split())) from None


def _known_peak(device: torch.device, precision: str) -> float | None:
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device), precision)


def _compile_layers(module: LanguageModeling, device: torch.device) -> None:
    """Layer by layer: they share one short compilation, and no name of a weight changes.

    Each shape is compiled by itself, so that an evaluation's last batch slows no training step.
    """
    if reason := missing_compiler(device.type):
        raise ValueError(f"compile is true, but {reason}")
    for layer in module.layers():
        layer.compile(dynamic=False)


def _plugins(files: CheckpointFiles) -> list[Any]:
    """Lightning on Slurm would requeue a job by itself and continue it from a file of its own,
    whose step and settings nobody compares; here a started-again run finds its last checkpoint."""
    on_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return [files, SLURMEnvironment(auto_requeue=False)] if on_slurm else [files]


class _Items(Sampler[int]):
    """What is still to be read; the length is that of the whole run, which Lightning counts."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop


def _check(batches: Any, steps: int, evaluate_every: int, checkpoint_every: int) -> None:
    if min(steps, evaluate_every, checkpoint_every) < 1:
        raise ValueError(
            f"steps {steps}, evaluate_every {evaluate_every} and checkpoint_every "
            f"{checkpoint_every} must be at least 1"
        )
    if len(batches) < steps:
        raise ValueError(f"{len(batches)} training batches are too few for {steps} steps")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's notices about hardware, and warnings that no user can act on."""
    loggers = [logging.getLogger(name) for name in LIGHTNING]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in UNHELPFUL:
            warnings.filterwarnings("ignore", message=message)
        try:
            for logger in loggers:
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
