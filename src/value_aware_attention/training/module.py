"""What both language-modelling tasks share: steps, schedules, logs and learning curves."""

import time
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from value_aware_attention.training.schedules import Schedule

__all__ = ["LanguageModeling"]

SHOWN = ("/loss", "/perplexity", "/error")  # in the progress bar

Batch = Any  # a tensor, or a dictionary of tensors whose first dimension is the batch


class LanguageModeling(LightningModule):
    """A model in training; subclasses say what the loss is and which optimizer takes the steps.

    Every `log_every_n_steps` of the trainer it logs train/loss, train/learning_rate,
    train/gradient_norm (before any clipping) and train/tokens_per_second, at every evaluation
    evaluation/loss and the task's own metric. `curve` collects the evaluations, `latest` the last
    value of each loss and metric. Step n draws its dropout from (seed, n) alone, so that a run that
    was killed continues as if it had not been.
    """

    def __init__(self, model: nn.Module, *, schedule: Schedule, seed: int) -> None:
        super().__init__()
        self.model, self.schedule, self.seed = model, schedule, seed
        self.curve: list[dict[str, float]] = []
        self.latest: dict[str, float] = {}
        self._totals: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor | float] = {}
        self._tokens, self._since = 0, time.perf_counter()

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Mean negative log-likelihood of the targets, in nats."""

    @abstractmethod
    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Sums over the targets, to be added up over batches."""

    @abstractmethod
    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """The evaluation's loss and metric, from the sums over all its batches."""

    @abstractmethod
    def tokens(self, batch: Batch) -> int:
        """How many tokens the model reads."""

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """With lr = 1: the schedule multiplies it."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        scheduler = LambdaLR(optimizer, self.schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Each process of a distributed run takes its share of the rows."""
        rank, processes = self.trainer.global_rank, self.trainer.world_size
        if processes == 1:
            return batch
        if isinstance(batch, Tensor):
            return batch[rank::processes]
        return {name: rows[rank::processes] for name, rows in batch.items()}

    def on_train_start(self) -> None:
        self._tokens, self._since = 0, time.perf_counter()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        entropy = (self.seed, self.trainer.global_step, self.trainer.global_rank)
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self._is_due(self.trainer.global_step + 1):
            self._pending["train/loss"] = loss.detach()
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self._is_due(self.trainer.global_step + 1):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self._pending["train/gradient_norm"] = get_total_norm(gradients)
            self._pending["train/learning_rate"] = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self._tokens += self.tokens(batch) * self.trainer.world_size
        if not self._is_due(self.trainer.global_step):
            return
        values = {name: float(value) for name, value in self._pending.items()}
        seconds = time.perf_counter() - self._since
        self._log_values({**values, "train/tokens_per_second": self._tokens / seconds})
        self._tokens, self._since = 0, time.perf_counter()

    def on_validation_epoch_start(self) -> None:
        self._totals = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        for name, value in self.totals(batch).items():
            self._totals[name] = self._totals.get(name, 0) + value.double()

    def on_validation_epoch_end(self) -> None:
        sums = {
            name: float(self.trainer.strategy.reduce(value, reduce_op="sum"))
            for name, value in self._totals.items()
        }
        metrics = self.metrics(sums)
        self.curve.append({"step": self.trainer.global_step, **metrics})
        self._log_values({f"evaluation/{name}": value for name, value in metrics.items()})

    def on_validation_end(self) -> None:
        self._tokens, self._since = 0, time.perf_counter()  # evaluation is no training time

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["curve"] = self.curve

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.curve = checkpoint["curve"]

    def _is_due(self, step: int) -> bool:
        return step % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]

    def _log_values(self, values: dict[str, float]) -> None:
        """To every logger, at the number of steps taken."""
        for logger in self.loggers:
            logger.log_metrics(values, step=self.trainer.global_step)
        shown = {name: value for name, value in values.items() if name.endswith(SHOWN)}
        self.latest.update(shown)
