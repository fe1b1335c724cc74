"""Checkpoints. A run killed at any moment continues from them bit by bit."""

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import TorchCheckpointIO

from value_aware_attention.files import held, new_file
from value_aware_study.data.batches import MicroBatch

LOG = logging.getLogger(__name__)


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
                LOG.warning("%s is damaged: the run continues from the one before it, if any", path)

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
        last = batch.position + 1 == trainer.accumulate_grad_batches
        if last and trainer.global_step % self.evaluate_every:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        ending = trainer.received_sigterm and trainer.world_size == 1
        due = trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps
        if due or ending:
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
