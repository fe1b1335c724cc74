"""Models with the texts that cache methods are measured on, three draws of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from value_aware_attention.hugging_face.checkpoints import load_model, load_tokenizer
from value_aware_attention.measurement.measure_caches import CacheBatch, Ends
from value_aware_attention.measurement.text_windows import text_windows
from value_aware_study.data.in_context import InContextBatches, InContextTask
from value_aware_study.data.packaged_weights import weights_folder
from value_aware_study.data.text import Document
from value_aware_study.data.tokens import read_tokens

__all__ = ["CacheTexts", "encoder_texts", "in_context_texts", "stream_texts"]


@dataclass(frozen=True)
class CacheTexts:
    """Holds a model, its texts in a batch a seed, and what is measured of its output."""

    model: PreTrainedModel
    batches: Sequence[CacheBatch]
    prefix: int | None
    ends: Ends | None = None


def in_context_texts(
    *, task: InContextTask, checkpoint: Path | str, seeds: Sequence[int], units: int
) -> CacheTexts:
    """Draws `units` rows a seed of a task that the model in `checkpoint` was trained on."""
    model = load_model(str(checkpoint))
    batches = []
    for seed in seeds:
        rows = InContextBatches(task, batch_size=units, steps=1, seed=seed, split="evaluation")[0]
        inputs = {"input_ids": rows["input_ids"], "use_cache": False}
        batches.append(CacheBatch(inputs, rest=rows, seed=seed))
    return CacheTexts(model, batches, task.prefix, task.metrics)


def stream_texts(
    *, checkpoint: Path | str, tokens: Path | str, length: int, seeds: Sequence[int], units: int
) -> CacheTexts:
    """Takes `units` windows a seed of a stream of tokens, evenly spaced; half of each is prefix.

    Raises ValueError for a stream too short for them.
    """
    stream = read_tokens(tokens, dimensions=1)
    wanted = units * len(seeds)
    if len(stream) < wanted * length:
        raise ValueError(
            f"the stream has {len(stream)} tokens; {wanted} windows of {length} need "
            f"{wanted * length}"
        )
    step = len(stream) // wanted
    windows = np.stack([stream[i * step : i * step + length] for i in range(wanted)])
    every = torch.from_numpy(windows.astype(np.int64))
    model = load_model(str(checkpoint))
    return CacheTexts(model, _by_seed(every, seeds), length // 2)


def encoder_texts(
    *, requirement: str, package: str, folder: str, texts: Mapping[str, Iterable[Document]],
    length: int, seeds: Sequence[int], units: int,
) -> CacheTexts:  # fmt: skip
    """Takes `units` windows a seed of texts for an encoder whose weights come with a package."""
    found = str(weights_folder(requirement=requirement, package=package, folder=folder))
    read = [document.text for corpus in texts.values() for document in corpus]
    windows = text_windows(read, load_tokenizer(found), length=length, windows=units * len(seeds))
    return CacheTexts(load_model(found).eval(), _by_seed(windows.tokens, seeds), None)


def _by_seed(windows: Int[Tensor, "W L"], seeds: Sequence[int]) -> list[CacheBatch]:
    """Every draw gets windows from the whole text: they take turns."""
    return [
        CacheBatch({"input_ids": windows[i :: len(seeds)]}, seed=seed)
        for i, seed in enumerate(seeds)
    ]
