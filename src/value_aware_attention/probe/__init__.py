"""Counts the keys that a trained model's attention needs on a text, by layer and head.

    report = probe.probe(model, tokenizer, text)
    print(report.headline)

`docs/probe.md` explains what is measured and how.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from value_aware_attention.probe.loading import loaded, window_task
    from value_aware_attention.probe.measuring import (
        Report,
        default_cache_methods,
        default_methods,
        probe,
        probe_caches,
    )

__all__ = [
    "Report",
    "default_cache_methods",
    "default_methods",
    "loaded",
    "probe",
    "probe_caches",
    "window_task",
]


def __getattr__(name: str) -> object:
    """Imports a name on first use, so that the command's help needs no torch."""
    if name in __all__:
        home = "loading" if name in ("loaded", "window_task") else "measuring"
        return getattr(import_module(f"value_aware_attention.probe.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
