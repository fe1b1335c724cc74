"""Cache methods measured on a trained model and a text."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from value_aware_attention.caches import (
    CacheMethod,
    LeaveOneOut,
    ObservedAttention,
    ValueAware,
)
from value_aware_attention.hugging_face.layers import attends_causally, attention_layers
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_attention.measurement.measure_caches import cache_settings, measure_caches
from value_aware_attention.probe.report import window_task

__all__ = ["default_cache_methods", "probe_caches"]

GAPS_OF = "SnapKV"
PROTECTED = 2 + 4
"""Number of first and last keys of a prefix that `AfterPrefix` always keeps"""


def default_cache_methods() -> dict[str, Callable[[int], CacheMethod]]:
    """Builds the methods that a probe compares: two scores, and joint sets."""
    return {
        GAPS_OF: lambda r: ObservedAttention(r, pool=5),
        "DropKV": LeaveOneOut,
        "value-aware": ValueAware,
        "value-aware, refitted": lambda r: ValueAware(r, refit=True),
    }


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

    The first half of a window is the prefix of a causal model; an encoder has none, and half of its
    queries are observed. Windows are read as `probe` reads them, and refused alike. The record has
    the four gaps of SnapKV by layer and head; the other methods are those of `methods`, functions
    of r. Raises ValueError for windows so short that r is below the protected keys, and for a model
    whose output is not a number.
    """
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
        observed=["last", "noncausal", "hindsight"] if causal else ["noncausal", "hindsight"],
        gaps_of=[GAPS_OF],
        prefix=half if causal else None,
        rows=rows if causal else half,
    )
    return measure_caches(
        task, settings, model_name=name or type(model).__name__, task_name="text",
        progress=progress,
    )  # fmt: skip
