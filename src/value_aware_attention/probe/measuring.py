"""Measures a trained model on windows of a text: the work of `probe`."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from value_aware_attention.approximations import (
    MeanValueSlot,
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
)
from value_aware_attention.arguments import check_at_least, check_choice, check_integers, check_seed
from value_aware_attention.caches import CacheMethod, LeaveOneOut, ObservedAttention, ValueAware
from value_aware_attention.hugging_face.layers import attends_causally, attention_layers
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.caches import cache_settings, measure_caches
from value_aware_attention.measurement.control import ZeroOutput, chance
from value_aware_attention.measurement.control import control as measure_control
from value_aware_attention.measurement.head_budgets import SINKS_AND_WINDOW, WINDOW, budget_settings
from value_aware_attention.measurement.measure import (
    LayerOptions,
    Method,
    Setting,
    measure,
    sizes_of,
)
from value_aware_attention.measurement.task import Task
from value_aware_attention.measurement.windows import TextWindows
from value_aware_attention.probe.loading import evaluating, window_task
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.headline import headline, keys_by_head, needed
from value_aware_attention.records.matching import SLOT
from value_aware_attention.records.record import AWARE, OBLIVIOUS, SHARES, WITH_MEAN, Record
from value_aware_attention.records.terminal import cache_table, tables


@dataclass(frozen=True)
class Report:
    """The results of a probe; `record.to_json()` saves the record.

    Attributes:
        caches: The loss with cache methods, if it was measured.
    """

    record: Record
    caches: CacheRecord | None = None

    @property
    def headline(self) -> str:
        """The finding in one sentence."""
        return headline(self.record)

    def keys_needed(self, share: float = 0.05, layer: int | None = None) -> dict[str, int | None]:
        """Returns, by method, the fewest keys with at most that relative output error.

        `share` is 0.01, 0.05 or 0.1; `layer` None pools all layers. None if all outputs of the
        layer are 0.
        """
        measured = self.record.attention[0].output_error
        check_choice([None, *range(measured.layers)], layer=layer)
        return {
            method: needed(measured, method, share=_measured(share), layer=layer).keys
            for method in (OBLIVIOUS, AWARE)
        }

    def keys_by_head(self, share: float = 0.05, method: str = OBLIVIOUS) -> list[list[int]]:
        """Lists, by layer and query head, the fewest keys with at most that output error.

        `share` is 0.01, 0.05 or 0.1; `method` is the choice of keys. For attention with these
        counts, see `measurement.head_budgets.HeadBudgets`.
        """
        check_choice((OBLIVIOUS, AWARE), method=method)
        return keys_by_head(self.record.attention[0].output_error, method, _measured(share))

    def tables(self) -> Iterator[str]:
        """Yields the lines of all tables."""
        yield from tables(self.record)
        if self.caches is not None:
            yield from ("", *cache_table(self.caches))

    def __str__(self) -> str:
        return "\n".join([*self.tables(), "", self.headline])


def _measured(share: float) -> float:
    """Returns the measured share that equals a number up to rounding, such as 1 - 0.95."""
    return check_choice(SHARES, share=next((x for x in SHARES if isclose(x, share)), share))


SINKS = 4
"""Most first tokens in a causal model's window (StreamingLLM, Xiao et al., 2024)"""


def default_methods(search: str = "default", *, causal: bool = False) -> dict[str, Method]:
    """Builds the methods whose end metric is measured at every number of keys.

    These are both optimal ones, the value-aware one with the mean as a candidate, the largest
    weights with a slot for the mean of the others, and a sliding window. In a `causal` model the
    window also has the first tokens, at most `SINKS` of its r keys.
    """
    sinks = SINKS if causal else 0
    return {
        OBLIVIOUS: lambda r, layer: OptimalValueOblivious(r),
        SLOT: lambda r, layer: MeanValueSlot(r),
        AWARE: lambda r, layer: OptimalValueAware(r, search),
        WITH_MEAN: lambda r, layer: OptimalValueAware(r, search, mean=True),
        SINKS_AND_WINDOW if causal else WINDOW: lambda r, layer: SlidingWindow(
            r, min(sinks, r - 1)
        ),
    }


FLOORS = (
    Setting("zero_output", {}, lambda layer: ZeroOutput()),
    Setting("mean_of_the_values", {}, lambda layer: MeanValueSlot(1)),
)
"""Methods without any choice of keys: what is left of a model, next to all methods"""


def probe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], *,
    windows: int | None = 8, length: int | None = None, rows: int = 32, search: str = "default",
    sizes: Sequence[int] | None = None, kernel: Kernel | None = None,
    methods: Mapping[str, Method] | None = None, seed: int = 0, draw: bool = False,
    name: str | None = None, cache: Path | str | None = None,
    show: Callable[[str], None] | None = None, kernels: Sequence[Kernel] = (),
    between: bool = False, skewness_gap: bool = False, control: bool = True, caches: bool = False,
) -> Report:  # fmt: skip
    """Measures the cost of attending to few keys in a trained model, on windows of a text.

    It measures three things, with 95% intervals over windows: the end metric (`metric_of`) with
    each of `methods` in all layers; ||o - o~||^2 / ||o||^2 of every layer and head, with the keys
    needed for 1%, 5% and 10% of it; and the end metric if each head gets the keys that it needs.
    Raises ValueError for an unfit model. A model with a head for labels is measured as an encoder.

    Args:
        model: Masked or causal language model, or encoder, on the device to use.
        tokenizer: The model's own.
        text: One text, or several, read one after the other.
        windows: Number of windows of the text to read. None: all.
        length: Tokens of a window, special ones included. None: 512, or all positions.
        rows: Queries of each window and head for measuring output errors.
        search: How hard to search for value-aware keys: "fast", "default" or "best".
        sizes: Numbers of keys r. None: powers of two up to head size + 1, and that.
        kernel: Replaces the model's similarity kernel, post hoc. None: the model's own.
        methods: Functions (r, layer) -> approximation by name. Both `FLOORS` are measured too.
            None: `default_methods`.
        seed: Draws masked tokens, the control's weights and, with `draw`, the windows.
        draw: True: windows are drawn at random. False: they are evenly spaced.
        name: The model's name in tables and headline. None: the name of its class.
        cache: Folder that keeps numbers for later runs. None: nothing is kept.
        show: Receives the lines of the tables; until then a terminal has a progress bar.
        kernels: More kernels on the model's queries, keys and values, in layers only.
        between: True: also measures each optimal choice of keys with the other's weights.
        skewness_gap: True: also measures how output errors depend on the skewness of attention.
        control: True: also measures the architecture with random weights, which doubles the time.
        caches: True: also measures what `probe_caches` does.
    """
    check_options(rows, search, sizes, methods, seed)
    layers = LayerOptions(rows, search, between, skewness_gap, tuple(kernels), seed, slots=True)
    with evaluating(model, tokenizer):
        task, read = window_task(
            model, tokenizer, text, windows=windows, length=length, kernel=kernel, seed=seed,
            draw=draw,
        )  # fmt: skip
        return _report(
            task, read, methods or default_methods(search, causal=task.metric == "perplexity"),
            sizes, layers, name=name, cache=cache, show=show, control=control, caches=caches,
        )  # fmt: skip


def _report(
    task: Task, read: TextWindows, methods: Mapping[str, Method], sizes: Sequence[int] | None,
    layers: LayerOptions, *, name: str | None, cache: Path | str | None,
    show: Callable[[str], None] | None, control: bool, caches: bool,
) -> Report:  # fmt: skip
    """Measures cache methods, the model, its heads with budgets, chance, and random weights."""
    progress = show is not None
    sizes = sizes_of(sizes, task.head_dim, task.length)
    losses = _cache_losses(task, name=name, progress=progress) if caches else None
    run = partial(measure, sizes=sizes, cache=cache, name=name, progress=progress)
    settings = [
        *(Setting(m, {"r": r}, partial(build, r)) for r in sizes for m, build in methods.items()),
        *FLOORS,
    ]
    record = run(task, settings, layers=layers)
    budgets = list(budget_settings(record.attention[0].output_error, methods))
    record = replace(
        record,
        budgets=run(task, budgets, layers=None, cell_errors=False).cells[1:],
        baselines=chance(task, record.cells[0]),
        text=read.described(record.text),
    )  # fmt: skip
    if control:
        plain = replace(layers, kernels=(), between=False, skewness_gap=False)
        record = replace(
            record,
            control=measure_control(
                task, partial(run, methods=settings, layers=plain), layers.seed
            ),
        )
    report = Report(record, losses and replace(losses, begins_with_bos=record.text.begins_with_bos))
    if show is not None:
        for line in report.tables():
            show(line)
    return report


def check_options(
    rows: int,
    search: str,
    sizes: Sequence[int] | None,
    methods: Mapping[str, Method] | None,
    seed: int,
) -> None:
    """Raises ValueError for options that no model allows."""
    OptimalValueAware(1, search)
    check_at_least(1, rows=rows)
    check_seed(seed)
    if sizes is not None and not check_integers(sizes=sizes):
        raise ValueError("sizes is empty; give at least one number of keys, or None")
    _check_methods(methods)


def _check_methods(methods: Collection[str] | None) -> None:
    if methods is not None and not methods:
        raise ValueError("methods is empty; give at least one, or None for the default ones")


GAPS_OF, JOINT = "SnapKV", "value-aware"


LAST = 32
"""Number of last queries that methods observe, like SnapKV"""


PROTECTED = 2 + 4
"""Number of first and last keys of a prefix that `AfterPrefix` always keeps"""


CacheMethods = Mapping[str, Callable[[int], CacheMethod]]


def default_cache_methods() -> dict[str, Callable[[int], CacheMethod]]:
    """Builds the methods that a probe compares: two scores, and joint sets."""
    return {
        GAPS_OF: lambda r: ObservedAttention(r, pool=5),
        "DropKV": LeaveOneOut,
        JOINT: ValueAware,
        "value-aware, refitted": lambda r: ValueAware(r, refit=True),
    }


def probe_caches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str], *,
    windows: int | None = 8, length: int | None = None, rows: int = 128,
    parts: Sequence[int] = (8, 4), methods: CacheMethods | None = None, seed: int = 0,
    draw: bool = False, name: str | None = None, progress: bool = False,
) -> CacheRecord:  # fmt: skip
    """Measures cache methods on windows of a text; for each of `parts`, one key in that many stays.

    The first half of a window is the prefix of a causal model. Methods observe the prefix's last
    `LAST` queries, then `rows` of all its queries, then `rows` of the prefix read a second time.
    For the last of these the joint set is also measured with one budget for the whole model. An
    encoder has no prefix; half of its queries are observed. Windows are read and checked as in
    `probe`. The record has the four gaps of SnapKV by layer and head. `methods` are functions of r.
    Raises ValueError if windows are so short that r is below the protected keys, and if a model's
    output is not a number.
    """
    if not parts or min(check_integers(parts=parts)) < 1:
        raise ValueError(f"parts is {parts}; it must be integers >= 1, at least one")
    _check_methods(methods)
    check_at_least(1, rows=rows)
    with evaluating(model, tokenizer):
        task, _ = window_task(
            model, tokenizer, text, windows=windows, length=length, seed=seed, draw=draw
        )
        return _cache_losses(
            task, rows=rows, parts=parts, methods=methods, name=name or type(model).__name__,
            progress=progress,
        )  # fmt: skip


def _cache_losses(
    task: Task, *, rows: int = 128, parts: Sequence[int] = (8, 4),
    methods: CacheMethods | None = None, name: str | None, progress: bool,
) -> CacheRecord:  # fmt: skip
    causal = attends_causally(attention_layers(task.model)[0])
    half = task.length // 2
    least = 2 * max(parts) * PROTECTED
    if causal and task.length < least:
        raise ValueError(
            f"length is {task.length}; caches that keep one key of {max(parts)} of half a window, "
            f"{PROTECTED} of them always, need a length of at least {least}"
        )
    task.layer_calls()  # rejects outputs that are not numbers
    prefix = half if causal else None
    past = [f"last {min(LAST, rows)}", "noncausal", "repeat"] if causal else ["noncausal"]
    settings = cache_settings(
        default_cache_methods() if methods is None else methods,
        sizes=[max(1, (prefix or task.length) // share) for share in parts],
        observed=[*past, "hindsight"],
        gaps_of=[GAPS_OF],
        pools={JOINT: {"model": ["repeat"]}} if causal else {},
        prefix=prefix,
        rows=rows if causal else half,
    )
    return measure_caches(
        task, settings, model_name=name or type(task.model).__name__, task_name="text",
        progress=progress,
    )  # fmt: skip
