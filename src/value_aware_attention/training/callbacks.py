"""What happens around the steps of a run: checkpoints that it can continue from, a progress bar."""

import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback
from tqdm import tqdm

__all__ = ["ResumableCheckpoint", "StepProgress"]


class ResumableCheckpoint(Callback):
    """Writes the whole state every so many steps, after the evaluation where one is due.

    Lightning's own callback saves before or after evaluations but not both, so that a run which is
    continued would skip or repeat one. The file is replaced as a whole or not at all.
    """

    def __init__(self, path: Path, *, fingerprint: str, every: int) -> None:
        self.path, self.fingerprint, self.every = path, fingerprint, every

    def steps_taken(self) -> int:
        """By the run that the checkpoint can continue; 0 where there is none."""
        if not self.path.is_file():
            return 0
        saved = torch.load(self.path, map_location="meta", weights_only=True)
        state = saved["callbacks"].get(self.state_key, {})
        return int(saved["global_step"]) if state.get("fingerprint") == self.fingerprint else 0

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step % int(trainer.val_check_interval or 1):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn == "fit":
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step % self.every or trainer.global_step == trainer.max_steps:
            return
        unfinished = self.path.with_suffix(".partial")
        trainer.save_checkpoint(unfinished)
        if trainer.is_global_zero:
            os.replace(unfinished, self.path)


class StepProgress(Callback):
    """One bar over all steps of the run, with the latest loss and metric.

    Lightning's bars count epochs, and lose the total when a run continues.
    """

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            desc="training",
            unit="step",
            mininterval=0.5,
            disable=not trainer.is_global_zero,
        )

    def on_train_batch_end(self, trainer: Trainer, module: Any, *arguments: Any) -> None:
        self.bar.set_postfix(module.latest, refresh=False)
        self.bar.update()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.bar.close()

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        if hasattr(self, "bar"):
            self.bar.close()
