"""The one list of cache methods that drives every test of what all of them promise."""

from collections.abc import Callable

from value_aware_attention import caches, kernels
from value_aware_attention.caches import CacheMethod

KERNELS = {
    "exponential": kernels.Exponential(),
    "polynomial": kernels.Polynomial(),
    "elu": kernels.Elu(),
}

SCORING: dict[str, Callable[[int], CacheMethod]] = {
    "recent": caches.Recent,
    "observed_attention": caches.ObservedAttention,
    "observed_attention_pooled": lambda r: caches.ObservedAttention(r, pool=3),
    "observed_attention_max": lambda r: caches.ObservedAttention(r, aggregate="max"),
    "key_diff": caches.KeyDiff,
    "key_norm": caches.KeyNorm,
    "expected_attention": lambda r: caches.ExpectedAttention(r, horizon=8),
    "leave_one_out": caches.LeaveOneOut,
    "critical_values": lambda r: caches.CriticalValues(caches.ObservedAttention(r)),
}
"""Those that choose keys one by one, by what they see."""

SEARCHING: dict[str, Callable[[int], CacheMethod]] = {
    f"value_aware_{search}": lambda r, search=search: caches.ValueAware(r, search=search)
    for search in ("fast", "default", "best")
}

REFITTING: dict[str, Callable[[int], CacheMethod]] = {
    "attention_matching": caches.AttentionMatching,
    "attention_matching_of_keys": lambda r: caches.AttentionMatching(r, caches.KeyDiff(r)),
    "value_aware_refit": lambda r: caches.ValueAware(r, refit=True),
}

SEEING = SCORING | SEARCHING | REFITTING
"""Those whose choice for a cache depends on that cache alone."""

METHODS = {"random": lambda r: caches.Random(r, seed=0), **SEEING}


def refuses(method: CacheMethod, kernel: kernels.Kernel) -> bool:
    """Tells whether a method has no meaning for a kernel."""
    return bool(method.kernels) and not isinstance(kernel, method.kernels)
