"""Training of small decoders on tasks whose answers stand in the context."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from value_aware_attention.measurement.masking import IGNORED
from value_aware_study.data.in_context import InContextTask
from value_aware_study.training.flops import dense_parameters, training_flops
from value_aware_study.training.module import LanguageModeling, MakeOptimizer
from value_aware_study.training.schedules import Schedule

__all__ = ["InContextTraining", "build_decoder", "sharpest_weights"]


def build_decoder(
    *,
    vocabulary_size: int,
    length: int,
    layers: int,
    width: int,
    heads: int,
    key_value_heads: int,
    feedforward: int,
    initializer_range: float,
) -> LlamaForCausalLM:
    """Builds a Llama with random weights: rotary positions, grouped queries.

    `initializer_range` is the standard deviation of the weights. At Llama's 0.02 a query first
    weighs all keys of a small model alike. Embeddings and output weights are two matrices: with one
    for both, tokens that the first rows of a curriculum lack are all pushed the same way, and some
    of them stay alike for good.
    Raises ValueError unless the query heads divide evenly over the width and the key-value heads.
    """
    if width % (2 * heads) or heads % key_value_heads:
        raise ValueError(
            f"width {width} must be a multiple of 2 heads = {2 * heads}, and heads = {heads} one "
            f"of key_value_heads = {key_value_heads}"
        )
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        max_position_embeddings=length,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=feedforward,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,  # every token is the task's
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


class InContextTraining(LanguageModeling):
    """Trains on every answer of a row; a batch has input_ids and labels, -100 = not asked.

    Evaluations are the task's metrics, its nats as the loss: of the answers after the prefix only.
    """

    model: LlamaForCausalLM

    def __init__(
        self,
        model: LlamaForCausalLM,
        *,
        task: InContextTask,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        seed: int,
    ) -> None:
        super().__init__(model, schedule=schedule, optimizer=optimizer, seed=seed)
        self.task = task

    def loss(self, batch: dict[str, Tensor], targets: float | None = None) -> Tensor:
        asked = batch["labels"] != IGNORED
        hidden = self.model.model(batch["input_ids"], use_cache=False).last_hidden_state
        nats = cross_entropy(
            self.model.lm_head(hidden[asked]), batch["labels"][asked], reduction="sum"
        )
        return nats / (self.count_targets(batch) if targets is None else targets)

    @staticmethod
    def count_targets(batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def totals(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.model(batch["input_ids"], use_cache=False).logits
        sums = {name: rows.sum() for name, rows in self.task.metrics(logits, batch).items()}
        return sums | {"rows": logits.new_tensor(len(logits))}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        means = {name: total / totals["rows"] for name, total in totals.items() if name != "rows"}
        return {"loss": means.pop("nats")} | means

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return batch["input_ids"].numel()

    def layers(self) -> list[nn.Module]:
        return list(self.model.model.layers)

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


@torch.no_grad()
def sharpest_weights(
    model: LlamaForCausalLM, batch: dict[str, Tensor], prefix: int
) -> list[list[float]]:
    """Measures each layer's heads: a query's largest attention weight, 1 = one key, 1/n = n alike.

    The mean over the queries from `prefix` on whose answer is scored.
    """
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that returns its weights
    try:
        inputs = batch["input_ids"].to(model.device)
        layers = model(inputs, use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(attention)
    scored = (batch["labels"] != IGNORED).to(model.device)
    scored[:, :prefix] = False
    means = [layer.amax(-1).mT[scored].mean(0) for layer in layers]
    return [[round(weight, 4) for weight in heads.tolist()] for heads in means]
