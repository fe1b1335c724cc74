"""Attention approximations judged by the attention output, values included.

The first open implementation of *Value-aware Approximate Attention* (Gupta & Berant, EMNLP 2021).
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from value_aware_attention import approximations, caches, error, kernels
from value_aware_attention.attention import attention

if TYPE_CHECKING:
    from value_aware_attention import hugging_face, measurement, probe

__all__ = [
    "approximations",
    "attention",
    "caches",
    "error",
    "hugging_face",
    "kernels",
    "measurement",
    "probe",
]


def __getattr__(name: str) -> ModuleType:
    """Imports what needs transformers only when it is asked for."""
    if name in ("hugging_face", "measurement", "probe"):
        return import_module(f"value_aware_attention.{name}")
    raise AttributeError(f"module 'value_aware_attention' has no attribute {name!r}")
