"""Tasks on which cache methods are measured: a model, and a part of text for every seed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from value_aware_attention.hugging_face.checkpoints import load_model, load_tokenizer
from value_aware_attention.measurement.tasks import Task, Text
from value_aware_attention.measurement.text_windows import text_windows
from value_aware_study.data.corpora import Document
from value_aware_study.data.in_context import InContextBatches, InContextTask
from value_aware_study.data.packaged_weights import weights_folder
from value_aware_study.data.token_arrays import read_tokens

__all__ = ["encoder_texts", "in_context_texts", "stream_texts"]


def in_context_texts(
    *, task: InContextTask, checkpoint: Path | str, seeds: Sequence[int], units: int
) -> Task:
    """Draws `units` rows a seed of a task that the model in `checkpoint` was trained on."""
    texts = []
    for seed in seeds:
        rows = InContextBatches(task, batch_size=units, steps=1, seed=seed, split="evaluation")[0]
        texts.append(Text(rows["input_ids"], rows["labels"], seed=seed))

    def ends(output: Tensor, text: Text) -> Mapping[str, Tensor]:
        inputs, labels = text.take(range(len(text.inputs)))
        return task.metrics(output, {"input_ids": inputs, "labels": labels})

    model = load_model(str(checkpoint))
    return Task(model, texts, "perplexity", first_row=task.prefix, ends=ends)


def stream_texts(
    *, checkpoint: Path | str, tokens: Path | str, length: int, seeds: Sequence[int], units: int
) -> Task:
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
    texts = [Text.of_tokens(rows, seed) for rows, seed in _by_seed(every, seeds)]
    return Task(load_model(str(checkpoint)), texts, "perplexity", first_row=length // 2)


def encoder_texts(
    *, requirement: str, package: str, folder: str, texts: Mapping[str, Iterable[Document]],
    length: int, seeds: Sequence[int], units: int,
) -> Task:  # fmt: skip
    """Takes `units` windows a seed of texts for an encoder whose weights come with a package."""
    found = str(weights_folder(requirement=requirement, package=package, folder=folder))
    read = [document.text for corpus in texts.values() for document in corpus]
    windows = text_windows(read, load_tokenizer(found), length=length, windows=units * len(seeds))
    parts = [Text(rows, rows, seed=seed) for rows, seed in _by_seed(windows.tokens, seeds)]
    return Task(load_model(found), parts, "cosine")


def _by_seed(
    windows: Int[Tensor, "W L"], seeds: Sequence[int]
) -> Iterator[tuple[Int[Tensor, "U L"], int]]:
    """Deals the windows in turn, so that each seed has some of the whole text."""
    for i, seed in enumerate(seeds):
        yield windows[i :: len(seeds)], seed
