"""Chooses which keys of a cache to keep: one set per key-value head, for all later queries.

    method = caches.AfterPrefix(caches.ValueAware(64), prefix=256, observed="noncausal")
    with hugging_face.replace_attention(model, method):
        logits = model(**batch).logits  # rows from 256 on see 64 keys of the prefix

A method is a small class with `scores` or `keep`; `AfterPrefix` turns it into an approximation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from value_aware_attention.caches.baselines import KeyDiff, KeyNorm, Random, Recent
from value_aware_attention.caches.critical_values import CriticalValues, DefensiveKV, LaProx
from value_aware_attention.caches.expected_attention import CapKV, ExpectedAttention
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.caches.layer_budgets import AdaKV, Cake, Lava, PyramidKV
from value_aware_attention.caches.leave_one_out import LeaveOneOut, OBCache
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import RKV, AnDPro, ObservedAttention, VaSE
from value_aware_attention.caches.optimum import OptimalSet, optimal_set
from value_aware_attention.caches.refit import AttentionMatching
from value_aware_attention.caches.value_aware import ValueAware

if TYPE_CHECKING:  # from `decoding`, which imports this package
    from value_aware_attention.decoding.after_prefix import AfterPrefix

__all__ = [
    "RKV",
    "AdaKV",
    "AfterPrefix",
    "AnDPro",
    "AttentionMatching",
    "CacheMethod",
    "Cake",
    "CapKV",
    "CriticalValues",
    "DefensiveKV",
    "ExpectedAttention",
    "KeptKeys",
    "KeyDiff",
    "KeyNorm",
    "LaProx",
    "Lava",
    "LeaveOneOut",
    "OBCache",
    "Observed",
    "ObservedAttention",
    "OptimalSet",
    "PyramidKV",
    "Random",
    "Recent",
    "VaSE",
    "ValueAware",
    "optimal_set",
]

_OWN_SCORE = "a score of your own is a CacheMethod with `scores` (docs/your-cache-method.md)"
_POOL = "pool='model' shares one budget among all heads by what their loss costs (docs/caches.md)"
_REMOVED = {
    "Press": _OWN_SCORE, "as_press": _OWN_SCORE, "CacheProfile": _POOL, "profile": _POOL,
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports names of `decoding` on first access; for removed names, reports the replacement."""
    if name == "AfterPrefix":
        return import_module("value_aware_attention.decoding.after_prefix").AfterPrefix
    if name in _REMOVED:  # `from caches import` would replace the line of an AttributeError
        raise ImportError(f"caches.{name} was removed in 1.1: {_REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
