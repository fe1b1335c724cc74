"""Training of the causal language model (A.2)."""

import math
from functools import partial

from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy
from torch.optim import AdamW

from value_aware_attention.models import CausalLanguageModel
from value_aware_study.training.flops import dense_parameters, training_flops
from value_aware_study.training.module import LanguageModeling, MakeOptimizer
from value_aware_study.training.schedules import Schedule

__all__ = ["CausalTraining"]

FAIRSEQ_ADAMW = partial(AdamW, lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, fused=True)

CHUNK = 2**21  # logits at a time: 8 MB, what a processor's cache holds


class CausalTraining(LanguageModeling):
    """Trains on next-token prediction; a batch is (batch, length + 1) tokens.

    By default with fairseq's AdamW: weight decay on every parameter, no clipping. The loss goes
    through the full vocabulary in chunks of tokens, so that the logits of a batch (of 70 GB at the
    paper's size) are never in memory at once.
    """

    model: CausalLanguageModel

    def __init__(
        self,
        model: CausalLanguageModel,
        *,
        schedule: Schedule,
        seed: int,
        optimizer: MakeOptimizer = FAIRSEQ_ADAMW,
    ) -> None:
        super().__init__(model, schedule=schedule, optimizer=optimizer, seed=seed)

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

    def tokens(self, batch: Int[Tensor, "batch N1"]) -> int:
        return self.count_targets(batch)

    def layers(self) -> list[nn.Module]:
        return list(self.model.layers)

    def flops(self, batch: Int[Tensor, "batch N1"], targets: float) -> float:
        weight, layers = self.model.embedding.weight, self.layers()
        return training_flops(
            self.tokens(batch),
            parameters=dense_parameters(layers) + weight.numel(),
            layers=len(layers),
            width=weight.shape[1],
            length=batch.shape[1] - 1,
        )

    def _cross_entropy(self, batch: Int[Tensor, "batch N1"], reduction: str) -> Tensor:
        weight = self.model.embedding.weight
        # torch's own choice is 2 rows at the paper's vocabulary, and 20 times slower than 128
        rows = max(128, CHUNK // len(weight))
        return linear_cross_entropy(
            self.model.hidden(batch[:, :-1]).flatten(0, 1),
            weight,
            batch[:, 1:].flatten(),
            reduction=reduction,
            options=LinearCrossEntropyOptions(batch_chunk_size=rows),
        )
