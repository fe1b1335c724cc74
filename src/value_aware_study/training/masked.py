"""Training of the masked language model (A.1)."""

from functools import partial

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import RobertaForMaskedLM

from value_aware_attention.measurement.masking import IGNORED
from value_aware_study.training.bert_adam import BertAdam
from value_aware_study.training.flops import dense_parameters, training_flops
from value_aware_study.training.module import LanguageModeling, MakeOptimizer
from value_aware_study.training.schedules import Schedule

__all__ = ["MaskedTraining"]

BERT_ADAM = partial(BertAdam, lr=1.0, betas=(0.9, 0.98), weight_decay=0.01, max_grad_norm=5.0)


class MaskedTraining(LanguageModeling):
    """Trains on masked-token prediction; a batch has input_ids and labels, -100 = not asked.

    The output layer sees the masked positions only: the same loss as on all of them, much cheaper.
    By default with Table 4's BertAdam; biases and norms do not decay, as in BERT's code. The metric
    is the error of Table 1: percent of masked tokens predicted wrongly.
    """

    model: RobertaForMaskedLM
    decays_vectors = False

    def __init__(
        self,
        model: RobertaForMaskedLM,
        *,
        schedule: Schedule,
        seed: int,
        optimizer: MakeOptimizer = BERT_ADAM,
    ) -> None:
        super().__init__(model, schedule=schedule, optimizer=optimizer, seed=seed)

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

    def _masked_positions(
        self, batch: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "targets vocabulary"], Int[Tensor, " targets"]]:
        asked = batch["labels"] != IGNORED
        hidden = self.model.roberta(batch["input_ids"], use_cache=False).last_hidden_state
        return self.model.lm_head(hidden[asked]), batch["labels"][asked]
