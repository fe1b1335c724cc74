"""Training of the masked language model (A.1)."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from transformers import RobertaForMaskedLM

from value_aware_attention.data.masking import IGNORED
from value_aware_attention.training.bert_adam import BertAdam
from value_aware_attention.training.flops import dense_parameters, training_flops
from value_aware_attention.training.module import LanguageModeling
from value_aware_attention.training.schedules import Schedule

__all__ = ["MaskedTraining"]


class MaskedTraining(LanguageModeling):
    """Masked-token prediction; a batch has input_ids and labels, -100 where nothing is asked.

    The output layer sees the masked positions only: the same loss as on all of them, much cheaper.
    BertAdam, without decay of biases and norms as in BERT's code. The metric is the error of Table
    1: percent of masked tokens predicted wrongly.
    """

    model: RobertaForMaskedLM

    def __init__(
        self,
        model: RobertaForMaskedLM,
        *,
        schedule: Schedule,
        weight_decay: float,
        max_grad_norm: float,
        seed: int,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
    ) -> None:
        super().__init__(model, schedule=schedule, seed=seed)
        self.weight_decay, self.max_grad_norm = weight_decay, max_grad_norm
        self.betas, self.eps = (betas[0], betas[1]), eps

    def loss(self, batch: dict[str, Tensor], targets: float | None = None) -> Tensor:
        logits, labels = self._masked_positions(batch)
        if targets is None:
            return cross_entropy(logits, labels)
        return cross_entropy(logits, labels, reduction="sum") / targets

    @staticmethod
    def count_targets(batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def totals(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits, labels = self._masked_positions(batch)
        return {
            "nats": cross_entropy(logits, labels, reduction="sum"),
            "wrong": (logits.argmax(-1) != labels).sum(),
            "targets": labels.new_tensor(len(labels)),
        }

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        return {
            "loss": totals["nats"] / totals["targets"],
            "error": 100.0 * totals["wrong"] / totals["targets"],
        }

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return batch["input_ids"].numel()

    def layers(self) -> list[nn.Module]:
        return list(self.model.roberta.encoder.layer)

    def checkpoint_activations(self) -> None:
        # transformers 5.23 renamed it
        newer = getattr(self.model, "activation_checkpointing_enable", None)
        (newer or self.model.gradient_checkpointing_enable)({"use_reentrant": False})

    def flops(self, batch: dict[str, Tensor], targets: float) -> float:
        layers = self.layers()
        body = training_flops(
            self.tokens(batch),
            parameters=dense_parameters(layers),
            layers=len(layers),
            width=self.model.config.hidden_size,
            length=batch["input_ids"].shape[1],
        )
        return body + 6.0 * targets * dense_parameters([self.model.lm_head])

    def optimizer(self) -> Optimizer:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return BertAdam(
            groups,
            lr=1.0,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def _masked_positions(
        self, batch: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "targets vocabulary"], Int[Tensor, " targets"]]:
        asked = batch["labels"] != IGNORED
        hidden = self.model.roberta(batch["input_ids"], use_cache=False).last_hidden_state
        return self.model.lm_head(hidden[asked]), batch["labels"][asked]
