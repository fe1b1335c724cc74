"""Masked-token error: the percentage of masked tokens that a masked LM predicts wrongly."""

from contextlib import nullcontext
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor
from transformers import RobertaForMaskedLM

from value_aware_attention.call import Call
from value_aware_attention.distributed import shared_map
from value_aware_attention.hugging_face import own_kernel, replace_attention
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.recorded import evenly_spaced, recording
from value_aware_attention.measurement.tasks import Layerwise, UnitSums
from value_aware_study.data.batches import MaskedSequences
from value_aware_study.tasks.scored_rows import ScoredRows

__all__ = ["MaskedTask"]


class MaskedTask:
    """Scores a masked LM on evaluation sequences; sequence i is masked from (seed, i) alone.

    `units` None = all of them; fewer are taken evenly spaced over all sources. With `piece` each
    sequence, masked as a whole, is read in parts of that many tokens, each by itself: a model of
    shorter sequences is asked for the same tokens. Raises ValueError where the model has another
    vocabulary or fewer positions than what it reads needs, where sequences cannot be cut so, and
    where no token at all is masked.
    """

    metric = "error"
    unit = "sequence"
    parts = 1

    def __init__(
        self,
        *,
        model: RobertaForMaskedLM,
        sequences: MaskedSequences,
        seed: int,
        units: int | None,
        batch_size: int,
        recorded_units: int,
        device: str,
        piece: int | None = None,
    ) -> None:
        length = sequences.tokens([0]).shape[1]
        self.length = piece or length
        if length % self.length:
            raise ValueError(f"piece is {piece}; it must divide the sequences' {length} tokens")
        _check_fit(model, sequences.vocabulary_size, self.length)
        self.model = model.to(device).eval()  # type: ignore[arg-type]
        chosen = evenly_spaced(len(sequences), units)
        rows = [sequences.masked(sequences.tokens([index]), seed, index) for index in chosen]
        self.pieces = length // self.length
        self.inputs = torch.cat([row["input_ids"] for row in rows]).view(-1, self.length)
        self.labels = torch.cat([row["labels"] for row in rows]).view(-1, self.length)
        if not (self.labels >= 0).any():
            raise ValueError(
                f"no masked token in {len(rows)} sequences; masked.fraction is "
                f"{sequences.fraction:g}, raise it or take more sequences"
            )
        self.head_dim = model.config.hidden_size // model.config.num_attention_heads
        self.batch_size, self.recorded_units = batch_size, recorded_units
        self.device = device

    def run(self, method: Layerwise | None, part: int = 0) -> UnitSums:
        starts = range(0, len(self.inputs), self.batch_size)
        scored = ScoredRows()
        layers = self.model.config.num_hidden_layers
        replaced = (
            replace_attention(self.model, scored.in_last_layer(method, layers))
            if method
            else nullcontext()
        )

        def wrong_of(start: int) -> Tensor:
            rows = slice(start, start + self.batch_size)
            scored.asked = (self.labels[rows] >= 0).to(self.device)
            return self._wrong(rows)

        with torch.inference_mode(), replaced:
            wrong = shared_map(wrong_of, starts)
        of_pieces = torch.cat(wrong), (self.labels >= 0).sum(dim=1).double()
        totals, counts = (sums.view(-1, self.pieces).sum(dim=1) for sums in of_pieces)
        return UnitSums(totals.numpy(), counts.numpy())

    def _wrong(self, rows: slice) -> Tensor:
        """Counts wrong predictions per sequence; the output layer reads masked positions alone."""
        labels = self.labels[rows].to(self.device)
        hidden = self.model.roberta(self.inputs[rows].to(self.device)).last_hidden_state
        masked = labels >= 0
        predicted = self.model.lm_head(hidden[masked]).argmax(dim=-1)
        wrong = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        wrong[masked] = (predicted != labels[masked]).double()
        return wrong.sum(dim=1).cpu()

    def first_tokens(self, count: int, unit: int = 0) -> list[int]:
        recorded = evenly_spaced(len(self.inputs), self.recorded_units)
        return self.inputs[recorded[unit], :count].tolist()

    @cached_property
    def kernel(self) -> Kernel:
        return own_kernel(self.model)

    def layer_calls(self, part: int = 0) -> list[Call]:
        layers = []
        for row in evenly_spaced(len(self.inputs), self.recorded_units):
            with torch.inference_mode(), recording(self.model) as calls:
                self._wrong(slice(row, row + 1))
            layers.append(calls)
        return list(map(Call.joined, zip(*layers, strict=True)))

    def digest(self, part: int) -> str:
        read = self.inputs.numpy().tobytes() + self.labels.numpy().tobytes()
        return sha256(f"{self.length} {self.recorded_units} ".encode() + read).hexdigest()


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
