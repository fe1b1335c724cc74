"""Perplexity of a causal LM with a context window: every target is scored exactly once."""

from collections.abc import Iterator
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from value_aware_attention.distributed import shared_map
from value_aware_attention.hugging_face import own_kernel, replace_attention
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.tasks import (
    LayerCall,
    LayerRecorder,
    Layerwise,
    UnitSums,
    evenly_spaced,
)
from value_aware_attention.models.causal_lm import CausalLanguageModel
from value_aware_study.data.tokens import read_tokens
from value_aware_study.tasks.scored_rows import ScoredRows

__all__ = ["CausalTask", "context_windows"]


def context_windows(targets: int, length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Lists (start, first scored, end) of each window over a stream of `targets` predictions.

    A window holds at most `length` inputs; it scores the predictions first..end-1 and reads the up
    to `context` inputs before them, as fairseq does; the first windows have less. Raises ValueError
    unless 0 <= context < length.
    """
    if not 0 <= context < length:
        raise ValueError(f"context is {context}; it must be at least 0 and below length, {length}")
    for first in range(0, targets, length - context):
        yield max(0, first - context), first, min(first + length - context, targets)


class CausalTask:
    """Scores a causal LM on a stream of tokens, read in windows; `units` None = all of them.

    Fewer are taken evenly spaced, so that they sample the whole stream. Raises ValueError for a
    stream no longer than `length`, or with tokens that the model does not have, and for a model
    that was not trained with `kernel`; None = any.
    """

    metric = "perplexity"
    unit = "window"
    parts = 1

    def __init__(
        self,
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
    ) -> None:
        if kernel is not None and kernel != own_kernel(model):
            raise ValueError(f"the model was trained with {own_kernel(model)}, not with {kernel}")
        stream = read_tokens(tokens, dimensions=1)
        if len(stream) <= length:
            raise ValueError(
                f"the evaluation stream has {len(stream)} tokens; it needs more than one sequence "
                f"of {length}"
            )
        for token in (stream.min(), stream.max()):
            if not 0 <= token < model.config.vocabulary_size:
                raise ValueError(
                    f"the evaluation stream has the token {token}, the model a vocabulary of "
                    f"{model.config.vocabulary_size}; evaluate it on tokens made with its own "
                    f"tokenizer"
                )
        self.model = model.to(device).eval()  # type: ignore[arg-type]
        self.length, self.context = length, context
        self.head_dim = model.config.width // model.config.heads
        self.batch_size, self.recorded_units = batch_size, recorded_units
        self.device, self.kernel = device, own_kernel(model)
        windows = list(context_windows(len(stream) - 1, length, context))
        self.windows = [windows[index] for index in evenly_spaced(len(windows), units)]
        self.stream = stream

    def run(self, method: Layerwise | None, part: int = 0) -> UnitSums:
        batches = list(_same_length(self.windows, self.batch_size))
        totals = np.zeros(len(self.windows))
        scored = ScoredRows()
        layers = len(self.model.layers)
        replaced = (
            replace_attention(self.model, scored.in_last_layer(method, layers))
            if method
            else nullcontext()
        )

        def losses_of(batch: list[int]) -> NDArray[np.float64]:
            windows = [self.windows[index] for index in batch]
            scored.asked = self._asked(windows)
            return self._losses(windows)

        with torch.inference_mode(), replaced:
            losses = shared_map(losses_of, batches)
        for batch, summed in zip(batches, losses, strict=True):
            totals[batch] = summed
        counts = np.array([end - first for _, first, end in self.windows], dtype=np.float64)
        return UnitSums(totals, counts)

    def _asked(self, windows: list[tuple[int, int, int]]) -> Bool[Tensor, "batch N"]:
        """The positions that predict a target of these windows, all of the same shape."""
        start, first, end = windows[0]
        asked = torch.arange(end - start, device=self.device) >= first - start
        return asked.expand(len(windows), -1)

    def _losses(self, windows: list[tuple[int, int, int]]) -> NDArray[np.float64]:
        """Sums nats over the scored targets of each window; all windows of the same shape."""
        return self.target_losses(windows).double().sum(dim=1).cpu().numpy()

    def target_losses(self, windows: list[tuple[int, int, int]]) -> Float[Tensor, "batch scored"]:
        """Computes the nats of every scored target; all windows of the same shape."""
        context = windows[0][1] - windows[0][0]
        rows = torch.from_numpy(
            np.stack([self.stream[start : end + 1] for start, _, end in windows]).astype(np.int64)
        ).to(self.device)
        hidden = self.model.hidden(rows[:, :-1])[:, context:]
        logits = linear(hidden, self.model.embedding.weight).flatten(0, 1).float()
        losses = cross_entropy(logits, rows[:, context + 1 :].flatten(), reduction="none")
        return losses.view(len(windows), -1)

    def first_tokens(self, count: int, unit: int = 0) -> list[int]:
        start = self.recorded_windows()[unit][0]
        return [int(token) for token in self.stream[start : start + count]]

    def recorded_windows(self) -> list[tuple[int, int, int]]:
        """Selects the full windows that `layer_calls` records, evenly spaced over all."""
        full = [window for window in self.windows if window[2] - window[0] == self.length]
        if not full:
            raise ValueError(
                f"none of the {len(self.windows)} windows has {self.length} tokens, as the layers "
                f"need that are recorded; take more (evaluation.causal_units)"
            )
        return [full[index] for index in evenly_spaced(len(full), self.recorded_units)]

    def layer_calls(self, part: int = 0) -> list[LayerCall]:
        recorders = [LayerRecorder() for _ in self.model.layers]
        with torch.inference_mode(), replace_attention(self.model, recorders.__getitem__):
            for window in self.recorded_windows():
                self._losses([window])
        return [recorder.joined(first_row=self.context) for recorder in recorders]

    def digest(self, part: int) -> str:
        digest = sha256(f"{self.windows} {self.recorded_units}".encode())
        for start, _, end in self.windows:
            digest.update(self.stream[start : end + 1].tobytes())
        return digest.hexdigest()


def _same_length(windows: list[tuple[int, int, int]], batch_size: int) -> Iterator[list[int]]:
    """Groups indices of windows into batches of one shape (inputs and scored targets)."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, (start, first, end) in enumerate(windows):
        shapes.setdefault((first - start, end - start), []).append(index)
    for indices in shapes.values():
        for position in range(0, len(indices), batch_size):
            yield indices[position : position + batch_size]
