"""What happens around the steps of a run: checkpoints that it can continue from, a progress bar."""

import logging
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback
from tqdm import tqdm

from value_aware_study.training.checkpoint_files import CheckpointFiles, read_checkpoint
from value_aware_study.training.micro_batches import MicroBatch

__all__ = ["ResumableCheckpoint", "StepProgress"]

LOG = logging.getLogger(__name__)


class ResumableCheckpoint(Callback):
    """Writes the whole state every so many steps, after the evaluation where one is due.

    A run continues from the newest whole one with its `fingerprint`, anything that identifies its
    settings, or from the one before it where that file is damaged. The last step is written too,
    so that nothing is trained again where writing the model fails.
    Lightning's own callback saves before or after evaluations but not both, so that a run which is
    continued would skip or repeat one. A run of one process that is asked to end (SIGTERM) saves
    the step it is at; an evaluation due after it is not finished, and nothing is saved then.
    """

    def __init__(
        self, files: CheckpointFiles, *, fingerprint: str, every: int, evaluate_every: int
    ) -> None:
        self.files, self.fingerprint = files, fingerprint
        self.every, self.evaluate_every = every, evaluate_every

    def newest(self) -> tuple[int, Path | None]:
        """Finds the newest whole checkpoint this run can continue: steps taken, and file."""
        for path, whole in self.files.newest_first():
            if not whole:
                LOG.warning("%s is damaged: the run continues from the one before it, if any", path)
                continue
            saved = read_checkpoint(path, "meta")
            state = saved["callbacks"].get(self.state_key, {})
            if state.get("fingerprint") == self.fingerprint:
                return int(saved["global_step"]), path
        return 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: MicroBatch, batch_idx: int
    ) -> None:
        last = batch.position + 1 == trainer.accumulate_grad_batches
        if last and trainer.global_step % self.evaluate_every:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn == "fit":
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        ending = trainer.received_sigterm and trainer.world_size == 1
        due = trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps
        if due or ending:
            trainer.save_checkpoint(self.files.last)


class StepProgress(Callback):
    """Draws one progress bar over all steps of the run, with the latest loss and metric.

    Lightning's bars count epochs, and lose the total when a run continues.
    """

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            desc="training",
            unit="step",
            mininterval=0.5,
            disable=None if trainer.is_global_zero else True,  # None: drawn on a terminal alone
        )

    def on_train_batch_end(self, trainer: Trainer, module: Any, *arguments: Any) -> None:
        self.bar.set_postfix(module.latest, refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.bar.close()

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        if hasattr(self, "bar"):
            self.bar.close()
