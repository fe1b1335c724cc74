"""Counts the keys that a trained model's attention needs on a text, by layer and head.

    report = probe.probe(model, tokenizer, text)
    print(report.headline)

`docs/probe.md` says what is measured and how.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from math import isclose
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from value_aware_attention.approximations import (
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
)
from value_aware_attention.arguments import (
    check_at_least,
    check_choice,
    check_integers,
    check_seed,
    described,
)
from value_aware_attention.caches import CacheMethod, LeaveOneOut, ObservedAttention, ValueAware
from value_aware_attention.hugging_face.layers import (
    attends_causally,
    attention_layers,
    positions,
)
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_attention.measurement.caches import cache_settings, measure_caches
from value_aware_attention.measurement.control import chance
from value_aware_attention.measurement.control import control as measure_control
from value_aware_attention.measurement.foretold import Cost, foretold
from value_aware_attention.measurement.head_budgets import budget_settings
from value_aware_attention.measurement.headline import headline, keys_by_head, needed
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.measurement.measure import LayerOptions, Method, measure
from value_aware_attention.measurement.record import AWARE, OBLIVIOUS, SHARES, Record
from value_aware_attention.measurement.task import Task
from value_aware_attention.measurement.terminal import tables
from value_aware_attention.measurement.windows import (
    TextWindows,
    metric_of,
    text_windows,
    vocabulary_size,
    windows_task,
)

__all__ = [
    "Cost", "Report", "default_cache_methods", "default_methods", "estimate", "probe",
    "probe_caches",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class Report:
    """Holds the record of a probe; `record.to_json()` keeps it."""

    record: Record

    @property
    def headline(self) -> str:
        """The finding in one sentence."""
        return headline(self.record)

    def keys_needed(self, share: float = 0.05, layer: int | None = None) -> dict[str, int | None]:
        """Gives, by method, the fewest keys with at most that relative output error.

        `share` is one of 0.01, 0.05 and 0.1; `layer` None pools all layers. None where every output
        of the layer is 0.
        """
        measured = self.record.attention[0].output_error
        check_choice([None, *range(measured.layers)], layer=layer)
        return {
            method: needed(measured, method, share=_measured(share), layer=layer).keys
            for method in (OBLIVIOUS, AWARE)
        }

    def keys_by_head(self, share: float = 0.05, method: str = OBLIVIOUS) -> list[list[int]]:
        """Lists, by layer and query head, the fewest keys with at most that output error.

        `share` is one of 0.01, 0.05 and 0.1, `method` the choice of keys.
        `measurement.head_budgets.HeadBudgets` attends with them.
        """
        check_choice((OBLIVIOUS, AWARE), method=method)
        return keys_by_head(self.record.attention[0].output_error, method, _measured(share))

    def __str__(self) -> str:
        return "\n".join([*tables(self.record), "", self.headline])


def _measured(share: float) -> float:
    """Returns the measured share that a number equals but for rounding, such as 1 - 0.95."""
    near = (one for one in SHARES if isclose(one, share))
    return check_choice(SHARES, share=next(near, share))


def default_methods(search: str = "default") -> dict[str, Method]:
    """Builds the methods whose end metric is measured: both optimal ones and a sliding window."""
    return {
        OBLIVIOUS: lambda r, layer: OptimalValueOblivious(r),
        AWARE: lambda r, layer: OptimalValueAware(r, search),
        "sliding_window": lambda r, layer: SlidingWindow(r),
    }


def restores_mode(function: F) -> F:
    """Lets a function put the model, its first argument, into evaluation mode for its time alone.

    Every module is given back in the mode that it came in, after an error too.
    """

    @wraps(function)
    def restoring(model: PreTrainedModel, *inputs: Any, **options: Any) -> Any:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        modes = {module: module.training for module in modules}
        try:
            return function(model, *inputs, **options)
        finally:
            for module, mode in modes.items():
                module.training = mode

    return cast(F, restoring)


@restores_mode
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
    methods: Mapping[str, Method] | None = None,
    seed: int = 0,
    draw: bool = False,
    name: str | None = None,
    cache: Path | str | None = None,
    show: Callable[[str], None] | None = None,
    kernels: Sequence[Kernel] = (),
    between: bool = False,
    skewness_gap: bool = False,
    control: bool = True,
) -> Report:
    """Measures the cost of attending to few keys in a trained model, on windows of a text.

    Three things are measured, with 95% intervals over windows: the end metric of
    `measurement.windows.metric_of` with each of `methods` in all layers; ||o - o~||^2 / ||o||^2 of
    every layer and head, with the keys needed for 1%, 5% and 10% of it; and the end metric where
    every head gets the keys that it needs (`record.budgets`). Raises ValueError, before any work,
    for an unfit model.

    Args:
        model: Masked or causal language model, or encoder, on the device where it is to run. It is
            measured in evaluation mode. Of one with a head for labels the encoder is measured.
        tokenizer: The model's own.
        text: One text, or several that are read one after the other.
        windows: Number of windows of the text that are read. None: all.
        length: Tokens of a window, special ones included. None: 512, or as many as the model has
            positions.
        rows: Queries of each window and head on which output errors are measured.
        search: How hard value-aware keys are searched: "fast", "default" or "best".
        sizes: Numbers of keys r. None: powers of two up to head size + 1, and that.
        kernel: Replaces the model's similarity kernel, post hoc. None: the model's own.
        methods: Functions (r, layer) -> approximation whose end metric is measured, by name.
            None: those of `default_methods`.
        seed: Draws masked tokens, the control's weights and, with `draw`, the windows.
        draw: True: windows are drawn at random. False: they are evenly spaced.
        name: What tables and headline call the model. None: the name of its class.
        cache: Folder in which numbers are kept for later runs. None: nothing is kept.
        show: Is given a line with the time and memory to expect, then those of the tables. None:
            nothing is shown.
        kernels: More kernels that are tried on the model's queries, keys and values, in layers
            alone.
        between: True: also measures the two choices between the optimal ones (the keys of one
            with the weights of the other).
        skewness_gap: True: also measures how output errors depend on the skewness of attention,
            with flatter and more skewed kernels in the place of the model's.
        control: True: also measures the same architecture with random weights (`record.control`),
            which says what of a number is not due to training. It doubles the time.
    """
    check_options(rows, search, sizes, seed)
    check_given(methods)
    task, read = window_task(
        model, tokenizer, text, windows=windows, length=length, kernel=kernel, seed=seed, draw=draw
    )
    layers = LayerOptions(
        rows=rows, search=search, between=between, skewness_gap=skewness_gap,
        kernels=tuple(kernels), seed=seed,
    )  # fmt: skip
    chosen = default_methods(search) if methods is None else methods
    if show is not None:
        show(str(foretold(task, chosen, sizes=sizes, layers=layers, control=control)))
    found = partial(measure, sizes=sizes, cache=cache, name=name, progress=show is not None)
    record = found(task, chosen, layers=layers)
    budgets = list(budget_settings(record.attention[0].output_error, chosen))
    record = replace(
        record,
        budgets=found(task, budgets, layers=None, cell_errors=False).cells[1:],
        baselines=chance(task, record.cells[0]),
    )
    if control:
        own = replace(layers, kernels=(), between=False, skewness_gap=False)
        measured = partial(found, methods=chosen, layers=own)
        record = replace(record, control=measure_control(task, measured, seed))
    if show is not None:
        for line in tables(record):
            show(line)
    measured_on = replace(
        record.text,
        available_units=read.available,
        tokens=read.text_tokens,
        share_read=read.share_read,
    )
    return Report(replace(record, text=measured_on))


@restores_mode
def estimate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    *,
    windows: int | None = 8,
    length: int | None = None,
    rows: int = 32,
    search: str = "default",
    sizes: Sequence[int] | None = None,
    control: bool = True,
) -> Cost:
    """Foretells seconds and bytes of `probe` with these arguments, from a part of one window.

    `str` of it is one line. Raises ValueError as `probe` does.
    """
    check_options(rows, search, sizes)
    task, _ = window_task(
        model, tokenizer, text, windows=windows, length=length, kernel=None, seed=0, draw=False
    )
    layers = LayerOptions(rows=rows, search=search, between=False, skewness_gap=False)
    chosen = default_methods(search)
    return foretold(task, chosen, sizes=sizes, layers=layers, control=control)


def check_options(rows: int, search: str, sizes: Sequence[int] | None, seed: int = 0) -> None:
    """Raises ValueError for options that fit no model."""
    OptimalValueAware(1, search)
    check_at_least(1, rows=rows)
    check_seed(seed)
    if sizes is not None and not check_integers(sizes=sizes):
        raise ValueError("sizes is empty; give at least one number of keys, or None")


def check_given(methods: Mapping[str, Any] | None) -> None:
    if methods is not None and not methods:
        raise ValueError("methods is empty; give at least one, or None for the default ones")


def window_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    *,
    windows: int | None,
    length: int | None,
    kernel: Kernel | None,
    seed: int,
    draw: bool,
) -> tuple[Task, TextWindows]:
    """Returns the task that fits a model, and the windows read; ValueError where none does."""
    _check_model(model, tokenizer)
    if windows is not None:
        check_at_least(1, windows=windows)
    if metric_of(model) == "cosine" and isinstance(model.base_model, PreTrainedModel):
        model = model.base_model  # a head for labels has other outputs than hidden states
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
    task = windows_task(model, tokenizer, read, seed=seed, kernel=kernel)
    if not any((labels != IGNORED).any() for one in task.texts for labels in one.labels):
        raise ValueError(
            "no token of the text can be hidden and predicted, because the tokenizer knows none of "
            "its words; give the model's tokenizer, or another text"
        )
    return task, read


def _check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}; give a model that transformers loaded"
        )
    if not callable(tokenizer):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}; give the model's")
    weights = next(model.parameters())
    if weights.dtype == torch.float16 and weights.device.type == "cpu":
        raise ValueError("the model is float16 on a CPU; give it as float32 or bfloat16")


def _texts(text: str | Iterable[str]) -> list[str]:
    """Lists the texts. Raises ValueError for what is no text."""
    if isinstance(text, bytes | Path) or not isinstance(text, Iterable):
        raise ValueError(f"text is {described(text)}; give a string, or several: what files hold")
    texts = [text] if isinstance(text, str) else list(text)
    if others := [one for one in texts if not isinstance(one, str)]:
        raise ValueError(f"text holds one {described(others[0])}; give strings: what files hold")
    return texts


def _length(model: PreTrainedModel, length: int | None) -> int:
    """Returns the tokens of a window: 512 for None, or as many as the model has positions."""
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


GAPS_OF, JOINT = "SnapKV", "value-aware"
LAST = 32
"""Number of last queries that methods observe, as SnapKV does"""
PROTECTED = 2 + 4
"""Number of first and last keys of a prefix that `AfterPrefix` always keeps"""


def default_cache_methods() -> dict[str, Callable[[int], CacheMethod]]:
    """Builds the methods that a probe compares: two scores, and joint sets."""
    return {
        GAPS_OF: lambda r: ObservedAttention(r, pool=5),
        "DropKV": LeaveOneOut,
        JOINT: ValueAware,
        "value-aware, refitted": lambda r: ValueAware(r, refit=True),
    }


@restores_mode
def probe_caches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    *,
    windows: int | None = 8,
    length: int | None = None,
    rows: int = 128,
    parts: Sequence[int] = (8, 4),
    methods: Mapping[str, Callable[[int], CacheMethod]] | None = None,
    seed: int = 0,
    draw: bool = False,
    name: str | None = None,
    progress: bool = False,
) -> CacheRecord:
    """Measures cache methods on windows of a text: one key of each of `parts` is kept.

    The first half of a window is the prefix of a causal model, of which the last `LAST` queries are
    observed, then `rows` of all, then of the prefix read once more; with these the joint set is
    measured with one budget for the model too. An encoder has no prefix, and half of its queries
    are observed. Windows are read as `probe` reads them, and refused alike. The record has the four
    gaps of SnapKV by layer and head; the other methods are those of `methods`, functions of r.
    Raises ValueError for windows so short that r is below the protected keys, and for a model whose
    output is not a number.
    """
    if not parts or min(check_integers(parts=parts)) < 1:
        raise ValueError(f"parts is {parts}; it must be integers >= 1, at least one")
    check_given(methods)
    check_at_least(1, rows=rows)
    task, _ = window_task(
        model, tokenizer, text, windows=windows, length=length, kernel=None, seed=seed, draw=draw
    )
    causal = attends_causally(attention_layers(model)[0])
    half = task.length // 2
    keys = half if causal else task.length
    least = 2 * max(parts) * PROTECTED
    if causal and task.length < least:
        raise ValueError(
            f"length is {task.length}; caches that keep one key of {max(parts)} of half a window, "
            f"{PROTECTED} of them always, need a length of at least {least}"
        )
    task.layer_calls()  # refuses what is not a number
    settings = cache_settings(
        default_cache_methods() if methods is None else methods,
        sizes=[max(1, keys // part) for part in parts],
        observed=[f"last {min(LAST, rows)}", "noncausal", "repeat", "hindsight"]
        if causal
        else ["noncausal", "hindsight"],
        gaps_of=[GAPS_OF],
        pools={JOINT: {"model": ["repeat"]}} if causal else {},
        prefix=half if causal else None,
        rows=rows if causal else half,
    )
    return measure_caches(
        task, settings, model_name=name or type(model).__name__, task_name="text",
        progress=progress,
    )  # fmt: skip


if __name__ == "__main__":
    from value_aware_attention.probe_command import main

    main()
