"""How many keys the attention of a trained model needs, layer by layer and head by head.

`probe` puts any masked or causal language model, or an encoder without a head, over a text and
measures how far attention to few keys is from exact: chosen by weight (optimal-v-oblivious, Eq. 2)
and for the output (optimal-v-aware, section 3).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from value_aware_attention.approximations import (
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
)
from value_aware_attention.kernels import Kernel
from value_aware_attention.probe.language_models import (
    WindowTask,
    positions,
    task_class,
    vocabulary_size,
)
from value_aware_attention.probe.layer_errors import AWARE, OBLIVIOUS
from value_aware_attention.probe.lines import all_lines
from value_aware_attention.probe.run import Build, ProbeRun, Show
from value_aware_attention.probe.text_windows import TextWindows, text_windows

__all__ = ["Report", "default_methods", "probe"]

DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class Report:
    """What a probe measured: `record` is plain data, ready for JSON."""

    record: dict[str, Any]

    @property
    def headline(self) -> str:
        """The finding in one sentence."""
        return self.record["headline"]

    def keys_needed(self, share: float = 0.05, layer: int | None = None) -> dict[str, int]:
        """By method, the fewest keys with at most that relative output error (0.01, 0.05, 0.1).

        `layer` None pools all layers.
        """
        return {
            row["method"]: row["keys"]
            for row in self.record["keys_needed"]
            if (row["share"], row["layer"], row["head"]) == (share, layer, None)
        }

    def __str__(self) -> str:
        return "\n".join([*all_lines(self.record), "", self.headline])


def default_methods(search: str = "default") -> dict[str, Build]:
    """The methods whose end metric is measured: the two optimal ones and a sliding window."""
    return {
        OBLIVIOUS: lambda r, layer: OptimalValueOblivious(r),
        AWARE: lambda r, layer: OptimalValueAware(r, search),
        "sliding_window": lambda r, layer: SlidingWindow(r),
    }


def probe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    *,
    windows: int | None = 8,
    length: int | None = None,
    rows: int = 32,
    search: str = "default",
    sizes: Sequence[int] | None = None,
    kernel: Kernel | None = None,
    methods: Mapping[str, Build] | None = None,
    seed: int = 0,
    draw: bool = False,
    name: str | None = None,
    cache: Path | str | None = None,
    show: Show | None = None,
) -> Report:
    """Measures a trained model on windows of a text, and what few keys cost it.

    Reads `windows` windows of `length` tokens (None: all of them; 512, or as many as the model has
    positions), evenly spaced or, with `draw`, drawn by `seed`. Measured are, with 95% intervals
    over windows: the end metric (error on 15% hidden tokens in percent, perplexity, or the cosine
    of the last hidden states to the exact ones) with every method of `methods` in all layers, at
    `sizes` keys (None: powers of two to head size + 1, and that); ||o - o~||^2 / ||o||^2 of every
    layer and head on `rows` queries of each window; and the keys needed for 1%, 5% and 10% of it.

    `kernel` None is the model's own; another is put into it post hoc. With `cache`, a folder, what
    was computed before is found again. `show` gets lines of text as results come in, and with it a
    progress bar is drawn. Raises ValueError, before any work, for what cannot be measured.
    """
    OptimalValueAware(1, search)
    task = _task(model, tokenizer, text, windows=windows, length=length, kernel=kernel, seed=seed,
                 draw=draw)  # fmt: skip
    head_dim = task.head_dim
    run = ProbeRun(
        task=task,
        rows=_at_least_one("rows", rows),
        search=search,
        sizes=_sizes(sizes, head_dim, task.length),
        methods=default_methods(search) if methods is None else methods,
        name=name or type(model).__name__,
        cache=cache,
        show=show,
    )
    return Report(run.record())


def _task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    *,
    windows: int | None,
    length: int | None,
    kernel: Kernel | None,
    seed: int,
    draw: bool,
) -> WindowTask:
    build, limit = task_class(model), positions(model)
    weights = next(model.parameters())
    if weights.dtype == torch.float16 and weights.device.type == "cpu":
        raise ValueError("the model is float16 on a CPU; give it as float32 or bfloat16")
    length = length or min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    if limit is not None and length > limit:
        raise ValueError(f"length is {length}; the model has {limit} positions")
    read = text_windows(
        text, tokenizer, length=length, windows=windows, seed=seed if draw else None,
        closed=not build.reads_on,
    )  # fmt: skip
    _check_vocabulary(read, vocabulary_size(model))
    return build(model=model, tokenizer=tokenizer, windows=read, seed=seed, kernel=kernel)


def _check_vocabulary(read: TextWindows, size: int) -> None:
    largest = int(read.tokens.max())
    if largest >= size:
        raise ValueError(
            f"the tokenizer gives token {largest}, the model knows {size}: it is another model's"
        )


def _sizes(sizes: Sequence[int] | None, head_dim: int, length: int) -> list[int]:
    """The numbers of keys to measure, in order."""
    if sizes is None:
        powers = {1 << power for power in range((head_dim + 1).bit_length())}
        return sorted(size for size in powers | {head_dim + 1} if size <= length)
    for size in sizes:
        if not 1 <= size <= length:
            raise ValueError(f"sizes has {size}; it must lie between 1 and the length, {length}")
    return sorted(set(sizes))


def _at_least_one(name: str, number: int) -> int:
    if number < 1:
        raise ValueError(f"{name} is {number}; it must be at least 1")
    return number
