"""Loads a model of a folder, a package or the hub, and cuts texts into its windows."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from value_aware_attention.arguments import check_at_least, described
from value_aware_attention.hugging_face.layers import positions
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.measurement.task import Task
from value_aware_attention.measurement.windows import (
    TextWindows,
    metric_of,
    text_windows,
    vocabulary_size,
    windows_task,
)
from value_aware_attention.models.checkpoints import load_model, load_tokenizer

DEFAULT_LENGTH = 512


def loaded(
    model: str, *, tokenizer: str | None = None, dtype: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model, onto the GPU if there is one, and its tokenizer, by folder or hub name.

    `tokenizer` names another folder; `dtype` names a torch type that replaces the checkpoint's.
    Raises what `load_model` and `load_tokenizer` raise.
    """
    disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; we report one line
    its_tokenizer = load_tokenizer(tokenizer or model)
    its_model = load_model(model, dtype=getattr(torch, dtype) if dtype else None)
    its_model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    return its_model, its_tokenizer


@contextmanager
def evaluating(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Sets a model to evaluation mode, and later restores the mode of every module.

    Raises ValueError unless it gets a transformers model and a tokenizer.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}; give a model that transformers loaded"
        )
    if not callable(tokenizer):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}; give the model's")
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def window_task(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], *,
    windows: int | None, length: int | None, seed: int, kernel: Kernel | None = None,
    draw: bool = False, context: int = 0,
) -> tuple[Task, TextWindows]:  # fmt: skip
    """Returns the task that fits a model, and the windows read. Raises ValueError if none fits.

    `context` is that of `windows_task`.
    """
    weights = next(model.parameters())
    if weights.dtype == torch.float16 and weights.device.type == "cpu":
        raise ValueError("the model is float16 on a CPU; give it as float32 or bfloat16")
    if metric_of(model) == "cosine" and isinstance(model.base_model, PreTrainedModel):
        model = model.base_model  # a head for labels does not output hidden states
    metric, vocabulary = metric_of(model), vocabulary_size(model)
    read = text_windows(
        _texts(text), tokenizer, length=_length(model, length), windows=windows,
        seed=seed if draw else None, closed=metric != "perplexity",
    )  # fmt: skip
    mask = tokenizer.mask_token_id if metric == "error" else None
    if (largest := max(int(read.tokens.max()), mask or 0)) >= vocabulary:
        raise ValueError(
            f"the tokenizer gives token {largest}, the model knows {vocabulary}: it is another "
            f"model's"
        )
    task = windows_task(model, tokenizer, read, seed=seed, kernel=kernel, context=context)
    if not any((labels != IGNORED).any() for window in task.texts for labels in window.labels):
        raise ValueError(
            "no token of the text can be hidden and predicted, because the tokenizer knows none of "
            "its words; give the model's tokenizer, or another text"
        )
    return task, read


def _texts(text: str | Iterable[str]) -> list[str]:
    """Lists the texts. Raises ValueError for anything else."""
    if isinstance(text, bytes | Path) or not isinstance(text, Iterable):
        raise ValueError(f"text is {described(text)}; give a string, or several: what files hold")
    texts = [text] if isinstance(text, str) else list(text)
    if others := [item for item in texts if not isinstance(item, str)]:
        raise ValueError(f"text holds one {described(others[0])}; give strings: what files hold")
    return texts


def _length(model: PreTrainedModel, length: int | None) -> int:
    """Returns the tokens of a window: for None 512, or the model's positions if there are fewer."""
    limit, metric = positions(model), metric_of(model)
    if length is None:
        length = min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    check_at_least(1, length=length)
    if limit is not None and length > limit:
        raise ValueError(f"length is {length}; the model has {limit} positions")
    if metric == "perplexity" and length < 2:
        raise ValueError(
            f"length is {length}; a causal model predicts from the second token on, so it must be "
            f"at least 2"
        )
    return length
