"""Training that can be killed: `fit` continues from the last checkpoint, bit by bit."""

import logging
import os
import pickle
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile, ZipFile

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from value_aware_attention.files import held, new_file
from value_aware_study.data.batches import Batch, MicroBatch, MicroBatches, check_micro_batches
from value_aware_study.training.modules import LanguageModeling

UNHELPFUL = "|".join(
    (
        r".*does not have many workers.*",
        r".*is smaller than the logging interval.*",
        r".*your dataloader is not resumable.*",  # `_Items` starts after the steps taken
        r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    )
)
"""Warnings that no user can act on."""

LOG_EVERY = 60.0
"""Seconds between two lines of the log."""

PEAKS = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Peak bf16 and fp16 operations a second, by a part of torch's device name, longer names first.

From NVIDIA's data sheets, without sparsity. Lightning has such a table too, but it counts sparsity
for some GPUs and not for others, and does not find an H200 by the name torch gives.
"""

LOGGER = logging.getLogger(__name__)
Save = Callable[[list[dict[str, float]]], None]


def fit(
    module: LanguageModeling,
    train_batches: Dataset[Batch],
    evaluation_batches: Dataset[Batch],
    *,
    evaluate_every: int,
    checkpoint_every: int,
    checkpoint_folder: Path,
    fingerprint: str,
    workers: int,
    compile: bool,
    checkpoint_activations: bool,
    peak_flops: float | None,
    save: Save = lambda curve: None,
    **trainer: Any,
) -> list[dict[str, float]]:
    """Takes an optimizer step on every one of `train_batches`; returns the learning curve.

    The curve has an entry {"step", "loss", "perplexity" or "error_percent"} for every
    `evaluate_every` steps and for the last. The first process gives it to `save`, which writes the
    model, and removes the checkpoints after that, so that a finished training is never lost.
    `trainer` are arguments of Lightning's Trainer; its num_nodes and accumulate_grad_batches are
    `nodes` and `accumulate`. Each of `devices` on every node takes its share of a batch's rows, in
    `accumulate` micro-batches; the step is the same. `workers` processes read batches ahead.
    `_prepare` describes the other options.

    A run that was killed continues, bit by bit (`ResumableCheckpoint`). SIGTERM ends the process
    with exit code 143. Raises ValueError for settings without a step, a batch that does not divide,
    a missing device or compiler, a folder that another run holds, and an argument of the Trainer
    that ended the training before its last step.
    """
    check_micro_batches(trainer["devices"] * trainer["nodes"], trainer["accumulate"])
    steps = len(train_batches)  # type: ignore[arg-type]
    if min(steps, evaluate_every, checkpoint_every) < 1:
        raise ValueError(
            f"steps {steps}, evaluate_every {evaluate_every} and checkpoint_every "
            f"{checkpoint_every} must be at least 1"
        )
    checkpoint = ResumableCheckpoint(
        CheckpointFiles(checkpoint_folder),
        fingerprint=f"{fingerprint}, {trainer['accumulate']} micro-batches",
        every=checkpoint_every,
        evaluate_every=evaluate_every,
    )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), logging_redirect_tqdm():
        warnings.filterwarnings("ignore", message=UNHELPFUL)
        lightning = _trainer(checkpoint, steps, **trainer)
        _prepare(module, lightning, compile, checkpoint_activations, peak_flops)
        _run(lightning, module, checkpoint, train_batches, evaluation_batches, workers, save)
    return module.curve


def _trainer(
    checkpoint: "ResumableCheckpoint", steps: int, *, nodes: int, accumulate: int, **options: Any
) -> Trainer:
    """Builds Lightning's Trainer, without what this module does itself.

    Raises ValueError for an argument that it lacks or that users may not set, and for missing
    devices.
    """
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    bar = (
        [StepProgress(checkpoint.files.folder.name)]
        if options.pop("enable_progress_bar", True)
        else []
    )
    logger = options.pop("logger", None) or False  # Lightning takes None for a logger of its own
    plugins: list[Any] = [checkpoint.files]
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        # Lightning would queue the job again and continue from its own file, without comparing step
        # and settings; here a restarted run finds its last checkpoint
        plugins.append(SLURMEnvironment(auto_requeue=False))
    try:
        lightning = Trainer(
            **options,
            max_steps=steps,
            num_nodes=nodes,
            logger=logger,
            accumulate_grad_batches=accumulate,
            val_check_interval=checkpoint.evaluate_every * accumulate,
            callbacks=[checkpoint, *bar],
            plugins=plugins,
            default_root_dir=checkpoint.files.folder,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
        )
    except (MisconfigurationException, TypeError, ImportError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if options.get("precision") in ("16-mixed", "16") and lightning.precision == "bf16-mixed":
        raise ValueError(f"precision is {options['precision']}; a CPU has bf16-mixed in its place")
    return lightning


def _prepare(
    module: LanguageModeling,
    trainer: Trainer,
    compile: bool,
    checkpoint_activations: bool,
    peak_flops: float | None,
) -> None:
    """Sets options that change the cost of a step and none of its numbers.

    `compile` compiles every layer with torch.compile, on first use, and the causal loss of a GPU:
    layers share one short compilation, and no name of a weight changes. Each shape is compiled by
    itself, so that an evaluation's last batch slows no training step. `checkpoint_activations`
    computes the layers' activations again in the backward pass instead of keeping them.
    `peak_flops`, operations a second of one device, is for the log of utilisation; None = that of
    the GPU, if its name and the precision are known.
    """
    device = trainer.strategy.root_device
    if peak_flops is None and device.type == "cuda":
        peak_flops = peak_flops_of(torch.cuda.get_device_name(device), trainer.precision)
    module.peak_flops = peak_flops
    if checkpoint_activations:
        module.checkpoint_activations()
    if compile and (reason := missing_compiler(device.type)):
        raise ValueError(f"compile is true, but {reason}")
    for part in module.compiled() if compile else ():
        part.compile(dynamic=False)


@cache
def missing_compiler(device: str) -> str | None:
    """Names what torch.compile lacks on a cpu or cuda device of this machine; None if nothing."""
    if device == "cuda":
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        is_complete = compiler and find_spec("triton")
        return None if is_complete else "it needs Triton and a C compiler on CUDA"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return None if compiler else "it needs a C++ compiler on the CPU"


def _run(
    trainer: Trainer,
    module: LanguageModeling,
    checkpoint: "ResumableCheckpoint",
    train_batches: Dataset[Batch],
    evaluation_batches: Dataset[Batch],
    workers: int,
    save: Save,
) -> None:
    """Trains from the newest checkpoint to the last step; saves, then removes the checkpoints."""
    accumulate = trainer.accumulate_grad_batches
    loader = partial(
        DataLoader,
        batch_size=None,
        num_workers=workers,
        pin_memory=trainer.strategy.root_device.type == "cuda",
    )
    micro_batches = MicroBatches(
        train_batches,
        accumulate=accumulate,
        world_size=trainer.world_size,
        count_targets=type(module).count_targets,
    )
    with checkpoint.files.held() if trainer.is_global_zero else nullcontext():
        taken, resume = checkpoint.newest()
        left = _Items(taken * accumulate, trainer.max_steps * accumulate)
        training, evaluation = loader(micro_batches, sampler=left), loader(evaluation_batches)
        module.train()
        try:
            trainer.fit(module, training, evaluation, ckpt_path=resume, weights_only=True)
        except SIGTERMException as stop:
            stop.code = 128 + signal.SIGTERM  # Lightning's own is 0, as if all had been done
            raise
        if trainer.max_steps % checkpoint.evaluate_every:
            trainer.validate(module, evaluation, verbose=False)
        steps = len(train_batches)  # type: ignore[arg-type]
        if trainer.global_step != steps or not module.curve:
            raise ValueError(
                f"the training ended after {trainer.global_step} of {steps} steps with "
                f"{len(module.curve)} evaluations: an argument of the trainer has cut it short"
            )
        if trainer.is_global_zero:
            save(module.curve)
            checkpoint.files.remove()


def peak_flops_of(device_name: str, precision: str) -> float | None:
    """Looks up a named GPU's peak operations a second; None if unknown.

    `precision` is Lightning's: known are those whose products are bf16 or fp16.
    """
    if not precision.startswith(("bf16", "16")):
        return None
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


class CheckpointFiles(TorchCheckpointIO):
    """Keeps last.ckpt and its predecessor, previous.ckpt, in the folder of one run.

    Lightning's own files go through the machine's temporary folder, where a kill leaves them
    behind. It does not flush them to disk before they replace older ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last, self.previous = folder / "last.ckpt", folder / "previous.ckpt"

    def held(self) -> AbstractContextManager[None]:
        """Keeps other runs out of the folder until the process ends, even by a kill.

        Raises ValueError if another run holds the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        return held(self.folder, "a training run", "train in another folder")

    def whole(self) -> Iterator[Path]:
        """Yields the undamaged checkpoints, newest first; warns of the others."""
        for path in (self.last, self.previous):
            if _is_whole(path):
                yield path
            elif path.is_file():
                LOGGER.warning(
                    "%s is damaged: the run continues from the one before it, if any", path
                )

    def remove(self) -> None:
        for path in (self.last, self.previous):
            path.unlink(missing_ok=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path | str, storage_options: object = None
    ) -> None:
        """Writes so that one name is always a whole checkpoint, even after a power cut."""
        with new_file(self.last) as unfinished:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
            if self.last.exists():
                os.replace(self.last, self.previous)

    def load_checkpoint(self, path: Path, *options: object, **named: object) -> dict[str, Any]:  # type: ignore[override]
        """Reads a checkpoint to the CPU as `read_checkpoint` does, whatever the options."""
        return read_checkpoint(path, "cpu")


class ResumableCheckpoint(Callback):
    """Writes the whole training state every `every` steps, after the evaluation if one is due.

    A run continues from its newest undamaged checkpoint. `fingerprint` is any text that identifies
    the run's settings; checkpoints with another one are ignored. The last step is written too, so
    that nothing is trained again if writing the model fails.

    Lightning's own callback saves either before or after evaluations, so a continued run would skip
    or repeat one. On SIGTERM, a run of one process saves its current step. If an evaluation is due
    after this step, the run neither finishes it nor saves.
    """

    def __init__(
        self, files: CheckpointFiles, *, fingerprint: str, every: int, evaluate_every: int
    ) -> None:
        self.files, self.fingerprint = files, fingerprint
        self.every, self.evaluate_every = every, evaluate_every

    def newest(self) -> tuple[int, Path | None]:
        """Finds the newest whole checkpoint that this run can continue: steps taken, and file."""
        for path in self.files.whole():
            checkpoint = read_checkpoint(path, "meta")
            state = checkpoint["callbacks"].get(self.state_key, {})
            if state.get("fingerprint") == self.fingerprint:
                return int(checkpoint["global_step"]), path
        return 0, None

    def state_dict(self) -> dict[str, str]:
        return {"fingerprint": self.fingerprint}

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: object,
        batch: MicroBatch,
        batch_idx: int,
    ) -> None:
        is_last = batch.position + 1 == trainer.accumulate_grad_batches
        if is_last and trainer.global_step % self.evaluate_every:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        is_due = trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps
        if is_due or (trainer.received_sigterm and trainer.world_size == 1):
            trainer.save_checkpoint(self.files.last)


def read_checkpoint(path: Path, device: str) -> dict[str, Any]:
    """Reads tensors and plain values. Raises ValueError for other pickles, without running them."""
    try:
        loaded: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} is no checkpoint of this program: it holds more than weights, and was not "
            f"read; remove it to start anew"
        ) from None
    return loaded


def _is_whole(path: Path) -> bool:
    # torch does not notice flipped bits; the checksums of its archive do
    try:
        with ZipFile(path) as archive:
            return archive.testzip() is None
    except (BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError):
        return False


class StepProgress(Callback):
    """Draws one progress bar over all steps of the run, and logs a line a minute.

    Both have the latest loss, metric and speed. Lightning's bars count epochs, and lose the total
    when a run continues.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.began, self.first = time.monotonic(), trainer.global_step
        self.logged = self.began
        self.bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            desc="training",
            unit="step",
            mininterval=0.5,
            disable=None if trainer.is_global_zero else True,  # None: drawn on a terminal alone
        )

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, *arguments: object
    ) -> None:
        self.bar.set_postfix(module.latest, refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)
        if trainer.is_global_zero and time.monotonic() - self.logged >= LOG_EVERY:
            self._log(trainer.global_step, trainer.max_steps, cast("LanguageModeling", module))

    def _log(self, step: int, steps: int, module: LanguageModeling) -> None:
        self.logged = time.monotonic()
        left = (self.logged - self.began) * (steps - step) / max(1, step - self.first)
        values = ", ".join(f"{name} {value:,.6g}" for name, value in module.latest.items())
        LOGGER.info(
            "%s: step %d of %d, %s, %s left",
            *(self.name, step, steps, values, tqdm.format_interval(left)),
        )

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.bar.close()

    def on_exception(
        self, trainer: Trainer, module: LightningModule, exception: BaseException
    ) -> None:
        if hasattr(self, "bar"):
            self.bar.close()


class _Items(Sampler[int]):
    """Samples the items still to be read; its length is that of the whole run, for Lightning."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop
