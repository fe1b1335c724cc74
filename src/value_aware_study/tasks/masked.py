"""Masked-token error: the percentage of masked tokens that a masked LM predicts wrongly."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import RobertaForMaskedLM

from value_aware_attention.measurement.recorded import evenly_spaced
from value_aware_attention.measurement.tasks import Task, Text
from value_aware_study.data.batches import MaskedSequences

__all__ = ["masked_task"]


def masked_task(
    *,
    model: RobertaForMaskedLM,
    sequences: MaskedSequences,
    seed: int,
    units: int | None,
    batch_size: int,
    recorded_units: int,
    device: str,
    piece: int | None = None,
) -> Task:
    """Scores a masked LM on evaluation sequences; sequence i is masked from (seed, i) alone.

    `units` None = all of them; fewer are taken evenly spaced over all sources. With `piece` each
    sequence, masked as a whole, is read in parts of that many tokens, each by itself: a model of
    shorter sequences is asked for the same tokens. Raises ValueError where the model has another
    vocabulary or fewer positions than what it reads needs, where sequences cannot be cut so, and
    where no token at all is masked.
    """
    whole = sequences.tokens([0]).shape[1]
    length = piece or whole
    if whole % length:
        raise ValueError(f"piece is {piece}; it must divide the sequences' {whole} tokens")
    _check_fit(model, sequences.vocabulary_size, length)
    chosen = evenly_spaced(len(sequences), units)
    rows = [sequences.masked(sequences.tokens([index]), seed, index) for index in chosen]
    inputs, labels = (
        torch.cat([row[name] for row in rows]).view(-1, length) for name in ("input_ids", "labels")
    )
    if not (labels >= 0).any():
        raise ValueError(
            f"no masked token in {len(rows)} sequences; masked.fraction is "
            f"{sequences.fraction:g}, raise it or take more sequences"
        )
    model.to(device)  # type: ignore[arg-type]
    return Task(
        model, [Text(inputs, labels, whole // length)], "error", unit="sequence", read=_logits,
        batch_size=batch_size, recorded_units=recorded_units, scored_rows=True,
        head_dim=model.config.hidden_size // model.config.num_attention_heads,
    )  # fmt: skip


def _logits(
    model: RobertaForMaskedLM, tokens: Int[Tensor, "B L"], asked: Bool[Tensor, "B L"]
) -> Float[Tensor, "S vocabulary"]:
    """Applies the output layer to the masked positions alone."""
    logits: Tensor = model.lm_head(model.roberta(tokens).last_hidden_state[asked])
    return logits


def _check_fit(model: RobertaForMaskedLM, vocabulary_size: int, length: int) -> None:
    # RoBERTa counts positions from pad_token_id + 1
    positions = model.config.max_position_embeddings - (model.config.pad_token_id or 0) - 1
    if model.config.vocab_size != vocabulary_size:
        raise ValueError(
            f"the model has a vocabulary of {model.config.vocab_size}, the tokens of "
            f"{vocabulary_size}; evaluate it on tokens made with its own tokenizer"
        )
    if positions < length:
        raise ValueError(f"sequences of {length} tokens; the model has {positions} positions")
