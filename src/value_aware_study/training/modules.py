"""Lightning modules of the two trainings: losses, metrics, logs, learning curves (appendix A)."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, linear_cross_entropy
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, RobertaForMaskedLM

from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.models import CausalLanguageModel
from value_aware_study.data.batches import Batch, MicroBatch, row_count, rows_of
from value_aware_study.training.optimizers import Schedule

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]

CHUNK_LOGITS = 2**21
"""Logits that the causal loss computes at a time: 8 MB in fp32 fit a processor's cache."""
CHUNK_ON_GPU = 2**28
"""The same on a GPU: 0.5 GB in bf16."""


class LanguageModeling(LightningModule):
    """Trains a model. Subclasses define the loss and the metrics; `optimizer` takes the steps.

    `optimizer` builds an optimizer of parameter groups with lr = 1, multiplied by `schedule`. The
    groups are the 2-D parameters of the layers (`hidden` true), other matrices (`hidden` false),
    and vectors (`hidden` false).

    Every `log_every_n_steps` of the trainer it logs train/loss, train/learning_rate,
    train/gradient_norm (before any clipping), train/tokens_per_second and, if the peak speed of the
    device is known (`peak_flops`), train/model_flops_utilisation. Every evaluation logs
    evaluation/loss and the task's own metric. `curve` collects the evaluations, `latest` the last
    speed and the last value of each loss and metric. The dropout of step n depends on (seed, n,
    process, micro-batch) alone, so that a killed run continues as if it had not been killed.

    Each target of a step's batch has the same weight, however many processes and micro-batches
    share the batch; train/loss is the mean over all of them.

    Attributes:
        peak_flops: Most operations per second of one device.
        decays_vectors: Whether weight decay also shrinks biases and the weights of norms.
    """

    peak_flops: float | None = None
    decays_vectors = True

    def __init__(
        self, model: PreTrainedModel, *, schedule: Schedule, optimizer: MakeOptimizer, seed: int
    ) -> None:
        super().__init__()
        self.model, self.schedule, self.seed = model, schedule, seed
        self.make_optimizer = optimizer
        self.curve: list[dict[str, float]] = []
        self.latest: dict[str, float] = {}
        self._pending: dict[str, Tensor | float] = {}
        self._loss: Tensor | float = 0.0
        self._restart_clock()

    @abstractmethod
    def loss(self, batch: Batch, targets: float | None = None) -> Tensor:
        """Computes nats of the batch's targets divided by `targets` (None = their number)."""

    @staticmethod
    @abstractmethod
    def count_targets(batch: Batch) -> int:
        """Counts the tokens to predict."""

    @abstractmethod
    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Computes sums over the targets, to add up over batches."""

    @abstractmethod
    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Computes the evaluation's loss and metric from the sums over all its batches."""

    @abstractmethod
    def inputs(self, batch: Batch) -> Int[Tensor, "batch N"]:
        """Returns the tokens that the model reads."""

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Returns the layers that the model repeats."""

    @abstractmethod
    def output_parameters(self) -> int:
        """Counts the weights that multiply the hidden state of a target."""

    def compiled(self) -> list[nn.Module]:
        """Returns the modules that torch.compile speeds up."""
        return self.layers()

    def flops(self, batch: Batch, targets: float) -> float:
        """Counts operations of a forward and backward pass that predicts `targets` tokens.

        A token takes 6 N + 12 layers width length (Chowdhery et al. 2022, App. B), and a target 6 a
        weight of the output layer. A multiply-add is two operations, and the backward pass is twice
        the forward one. N are the weights that multiply every token; embeddings are looked up.
        Attention counts as exact and full, even if a causal mask hides half of it or an
        approximation leaves out more. Recomputed activations do not count.
        """
        layers, width = self.layers(), self.model.config.hidden_size
        inputs, weights = self.inputs(batch), dense_parameters(layers)
        body = 6.0 * weights + 12.0 * len(layers) * width * inputs.shape[1]
        return inputs.numel() * body + 6.0 * targets * self.output_parameters()

    def checkpoint_activations(self) -> None:
        """Makes the backward pass recompute the layers' activations."""
        self.model.activation_checkpointing_enable({"use_reentrant": False})

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Groups parameters: hidden matrices, other matrices and vectors, without empty groups."""
        hidden = [p for layer in self.layers() for p in layer.parameters() if p.ndim == 2]
        in_layers = set(hidden)  # tensors are hashed by identity
        others = [p for p in self.parameters() if p.ndim > 1 and p not in in_layers]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        undecayed = {} if self.decays_vectors else {"weight_decay": 0.0}
        groups: list[dict[str, Any]] = [
            {"params": hidden, "hidden": True},
            {"params": others, "hidden": False},
            {"params": vectors, "hidden": False} | undecayed,
        ]
        return [group for group in groups if group["params"]]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.make_optimizer(self.parameter_groups())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self.schedule), "interval": "step"},
        }

    def on_before_batch_transfer(
        self, batch: Batch | MicroBatch, dataloader_idx: int
    ) -> Batch | MicroBatch:
        """Takes this process's share of the rows, as `validation_step` does."""
        if not isinstance(batch, MicroBatch):
            return batch
        return batch._replace(rows=self._share(batch.rows))

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        entropy = (self.seed, self.trainer.global_step, self.trainer.global_rank, batch.position)
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        accumulate = self.trainer.accumulate_grad_batches
        passes = accumulate * self.trainer.world_size
        # the trainer averages over micro-batches and processes: turn this into a mean over targets
        loss = self.loss(batch.rows, batch.targets / passes if passes > 1 else None)
        if self._is_due(self.trainer.global_step + 1):
            self._loss = (self._loss if batch.position else 0.0) + loss.detach() / accumulate
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self._is_due(self.trainer.global_step + 1):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self._pending["train/loss"] = self.trainer.strategy.reduce(self._loss)
            self._pending["train/gradient_norm"] = get_total_norm(gradients)
            self._pending["train/learning_rate"] = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, outputs: object, batch: MicroBatch, batch_idx: int) -> None:
        accumulate, processes = self.trainer.accumulate_grad_batches, self.trainer.world_size
        self._tokens += self.inputs(batch.rows).numel() * processes
        self._flops += self.flops(batch.rows, batch.targets / accumulate / processes)
        if batch.position + 1 < accumulate or not self._is_due(self.trainer.global_step):
            return
        values = {name: float(value) for name, value in self._pending.items()}
        seconds = time.perf_counter() - self._since
        values["train/tokens_per_second"] = self._tokens / seconds
        if self.peak_flops:
            values["train/model_flops_utilisation"] = self._flops / seconds / self.peak_flops
        self._log_values(values)
        self._restart_clock()

    def on_validation_epoch_start(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        share = self._share(batch)
        idle = row_count(share) == 0  # the last batch may have fewer rows than processes
        for name, value in self.totals(rows_of(batch, slice(1)) if idle else share).items():
            self._totals[name] = self._totals.get(name, 0) + value.double() * (not idle)

    def on_validation_epoch_end(self) -> None:
        metrics = self.metrics(
            {
                name: float(self.trainer.strategy.reduce(value, reduce_op="sum"))
                for name, value in self._totals.items()
            }
        )
        self.curve.append({"step": self.trainer.global_step, **metrics})
        self._log_values({f"evaluation/{name}": value for name, value in metrics.items()})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["curve"] = self.curve

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.curve = checkpoint["curve"]

    def _restart_clock(self) -> None:
        self._tokens, self._flops, self._since = 0, 0.0, time.perf_counter()

    on_train_start = on_validation_end = _restart_clock  # evaluation is not training time

    def _share(self, batch: Batch) -> Batch:
        rank, processes = self.trainer.global_rank, self.trainer.world_size
        return batch if processes == 1 else rows_of(batch, slice(rank, None, processes))

    def _is_due(self, step: int) -> bool:
        return step % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]

    def _log_values(self, values: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log_metrics(values, step=self.trainer.global_step)
        ends = ("/loss", "/perplexity", "/error", "/tokens_per_second")  # kinds of progress numbers
        self.latest |= {name: value for name, value in values.items() if name.endswith(ends)}


class CausalTraining(LanguageModeling):
    """Trains on next-token prediction (A.2); a batch is (batch, length + 1) tokens.

    The loss covers the full vocabulary in chunks of tokens, so that the logits of a batch (70 GB at
    the paper's size) are never in memory at once.
    """

    model: CausalLanguageModel

    def __init__(self, model: CausalLanguageModel, **options: Any) -> None:
        super().__init__(model, **options)
        self.summed = SummedCrossEntropy()

    def loss(self, batch: Int[Tensor, "batch N1"], targets: float | None = None) -> Tensor:
        if targets is None:
            return self._cross_entropy(batch, "mean")
        return self._cross_entropy(batch, "sum") / targets

    @staticmethod
    def count_targets(batch: Int[Tensor, "batch N1"]) -> int:
        return batch[:, 1:].numel()

    def totals(self, batch: Int[Tensor, "batch N1"]) -> dict[str, Tensor]:
        nats = self._cross_entropy(batch, "sum")
        return {"nats": nats, "targets": nats.new_tensor(self.count_targets(batch))}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        loss = totals["nats"] / totals["targets"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def inputs(self, batch: Int[Tensor, "batch N1"]) -> Int[Tensor, "batch N"]:
        return batch[:, :-1]

    def layers(self) -> list[nn.Module]:
        return list(self.model.layers)

    def compiled(self) -> list[nn.Module]:
        return [*self.layers(), self.summed]

    def output_parameters(self) -> int:
        return self.model.embedding.weight.numel()

    def _cross_entropy(self, batch: Int[Tensor, "batch N1"], reduction: str) -> Tensor:
        weight, targets = self.model.embedding.weight, batch[:, 1:].flatten()
        hidden = self.model.hidden(self.inputs(batch)).flatten(0, 1)
        if hidden.is_cuda:  # autocast leaves torch's linear_cross_entropy in fp32
            rows = max(1, CHUNK_ON_GPU // len(weight))
            nats = chunked_cross_entropy(self.summed, rows, hidden, weight, targets)
            return nats / len(targets) if reduction == "mean" else nats
        # torch's default is 2 rows at the paper's vocabulary, 20 times slower than 128
        rows = max(128, CHUNK_LOGITS // len(weight))
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            reduction=reduction,
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=rows),
        )


class MaskedTraining(LanguageModeling):
    """Trains on masked-token prediction (A.1): a batch has input_ids and labels, -100 = no target.

    The output layer computes only the positions with a target: the loss is the same and much
    cheaper. Biases and norms do not decay, as in BERT's code. The metric is the error of Table 1:
    percent of masked tokens predicted wrongly.
    """

    model: RobertaForMaskedLM
    decays_vectors = False

    def loss(self, batch: dict[str, Tensor], targets: float | None = None) -> Tensor:
        return cross_entropy(*self.predictions(batch), reduction="sum") / (
            self.count_targets(batch) if targets is None else targets
        )

    def predictions(
        self, batch: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "targets vocabulary"], Int[Tensor, " targets"]]:
        """Computes the logits of the positions with a target, and returns their labels."""
        labelled = batch["labels"] != IGNORED
        hidden = self.model.base_model(batch["input_ids"], use_cache=False).last_hidden_state
        return self.model.lm_head(hidden[labelled]), batch["labels"][labelled]

    @staticmethod
    def count_targets(batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def inputs(self, batch: dict[str, Tensor]) -> Int[Tensor, "batch N"]:
        return batch["input_ids"]

    def output_parameters(self) -> int:
        return dense_parameters([self.model.lm_head])

    def totals(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits, labels = self.predictions(batch)
        return {
            "nats": cross_entropy(logits, labels, reduction="sum"),
            "wrong": (logits.argmax(-1) != labels).sum(),
            "targets": labels.new_tensor(len(labels)),
        }

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        return {
            "loss": totals["nats"] / totals["targets"],
            # DVC could not read the file with a key `error`
            "error_percent": 100.0 * totals["wrong"] / totals["targets"],
        }

    def layers(self) -> list[nn.Module]:
        return list(self.model.roberta.encoder.layer)


def dense_parameters(modules: Iterable[nn.Module]) -> int:
    """Counts the weights of all linear layers, without biases."""
    return sum(
        layer.weight.numel()
        for module in modules
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    )


class SummedCrossEntropy(nn.Module):
    """Computes nats of the targets from hidden states, with the logits in autocast's precision.

    It is a module, so that torch.compile can fuse the passes over the logits.
    """

    def forward(
        self,
        hidden: Float[Tensor, "N width"],
        weight: Float[Tensor, "vocabulary width"],
        targets: Int[Tensor, " N"],
    ) -> Float[Tensor, ""]:
        return cross_entropy(linear(hidden, weight).float(), targets, reduction="sum")


def chunked_cross_entropy(
    summed: nn.Module,
    rows: int,
    hidden: Float[Tensor, "N width"],
    weight: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, " N"],
) -> Float[Tensor, ""]:
    """Computes nats of the targets, with the logits of at most `rows` of them in memory.

    `summed` is a `SummedCrossEntropy`. torch.nn.functional.linear_cross_entropy does the same in
    the precision of its arguments; autocast does not lower it.
    """
    if torch.is_grad_enabled():
        return _Chunked.apply(summed, rows, hidden, weight, targets)
    return torch.stack(
        [
            summed(part, weight, wanted)
            for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
    ).sum()


class _Chunked(Function):
    """Computes a chunk's gradients right after its logits, so that no logits are computed twice."""

    @staticmethod
    def forward(
        ctx: Any, summed: nn.Module, rows: int, hidden: Tensor, weight: Tensor, targets: Tensor
    ) -> Tensor:
        nats, of_hidden, of_weight = [], [], torch.zeros_like(weight, dtype=torch.float32)
        leaf = weight.detach().requires_grad_()
        for chunk, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
            states = chunk.detach().requires_grad_()
            with torch.enable_grad():
                part = summed(states, leaf, wanted)
            gradients = torch.autograd.grad(part, (states, leaf))
            nats.append(part.detach())
            of_hidden.append(gradients[0])
            of_weight += gradients[1]
        ctx.save_for_backward(torch.cat(of_hidden), of_weight.to(weight.dtype))
        return torch.stack(nats).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return None, None, of_hidden * scale, of_weight * scale, None
