"""Tasks of the study: trained models with their evaluation texts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import RobertaForMaskedLM

from value_aware_attention.hugging_face import own_kernel
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.measurement.recorded import evenly_spaced
from value_aware_attention.measurement.task import Task, Text
from value_aware_attention.models.causal_lm import CausalLanguageModel
from value_aware_study.data.batches import MaskedSequences
from value_aware_study.data.tokens import check_vocabulary, read_tokens


def context_windows(targets: int, length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Lists (start, first scored, end) of each window over a stream of `targets` predictions.

    A window has at most `length` inputs. It scores the predictions first..end-1 and reads up to
    `context` inputs before them, as fairseq does; the first windows have fewer. Raises ValueError
    unless 0 <= context < length.
    """
    if not 0 <= context < length:
        raise ValueError(f"context is {context}; it must be at least 0 and below length, {length}")
    for first in range(0, targets, length - context):
        yield max(0, first - context), first, min(first + length - context, targets)


def causal_task(
    *,
    model: CausalLanguageModel,
    tokens: Path | str,
    length: int,
    context: int,
    units: int | None,
    batch_size: int,
    recorded_units: int,
    device: str,
    kernel: Kernel | None = None,
) -> Task:
    """Scores a causal LM on a stream of tokens, read in windows; `units` None = all of them.

    Fewer windows are evenly spaced, so that they sample the whole stream. Raises ValueError for a
    stream no longer than `length`, for tokens outside the model's vocabulary, and for a model that
    was not trained with `kernel` (None = any).
    """
    if kernel is not None and kernel != own_kernel(model):
        raise ValueError(f"the model was trained with {own_kernel(model)}, not with {kernel}")
    if len(stream := read_tokens(tokens, dimensions=1)) <= length:
        raise ValueError(
            f"the evaluation stream has {len(stream)} tokens; it needs more than one sequence "
            f"of {length}"
        )
    check_vocabulary(tokens, stream, model.config.vocabulary_size)
    windows = list(context_windows(len(stream) - 1, length, context))
    inputs, labels = [], []
    for start, first, end in (windows[index] for index in evenly_spaced(len(windows), units)):
        row = torch.from_numpy(stream[start : end + 1].astype(np.int64))
        inputs.append(row[:-1])
        labels.append(row[1:].clone())
        labels[-1][: first - start] = IGNORED
    model.to(device)  # type: ignore[arg-type]
    return Task(
        model, [Text(inputs, labels)], "perplexity", batch_size=batch_size,
        # run the output layer on the scored positions only
        read=lambda model, tokens, asked: linear(
            model.hidden(tokens)[asked], model.embedding.weight
        ),
        recorded_units=recorded_units, first_row=context, length=length, scored_rows=True,
        head_dim=model.config.width // model.config.heads,
    )  # fmt: skip


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
    """Scores a masked LM on evaluation sequences; sequence i's mask depends on (seed, i) alone.

    `units` None = all; fewer are evenly spaced over all sources. With `piece`, each sequence is
    masked as a whole and read in separate parts of that many tokens: a model of shorter sequences
    predicts the same tokens. Raises ValueError if the model has another vocabulary or too few
    positions, if sequences cannot be cut like this, or if no token is masked.
    """
    whole = sequences.tokens([0]).shape[1]
    length = piece or whole
    if whole % length:
        raise ValueError(f"piece is {piece}; it must divide the sequences' {whole} tokens")
    _check_fit(model, sequences.vocabulary_size, length)
    rows = [
        sequences.masked(sequences.tokens([index]), seed, index)
        for index in evenly_spaced(len(sequences), units)
    ]
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
        model, [Text(inputs, labels, whole // length)], "error", unit="sequence",
        batch_size=batch_size, recorded_units=recorded_units, scored_rows=True,
        # run the output layer on the masked positions only
        read=lambda model, tokens, asked: model.lm_head(
            model.roberta(tokens).last_hidden_state[asked]
        ),
        head_dim=model.config.hidden_size // model.config.num_attention_heads,
    )  # fmt: skip


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
