"""Attention approximations judged by the attention output, values included.

The first open implementation of *Value-aware Approximate Attention* (Gupta & Berant, EMNLP 2021).
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from value_aware_attention import approximations, error, kernels
from value_aware_attention.attention import attention

if TYPE_CHECKING:
    from value_aware_attention import hugging_face

__all__ = ["approximations", "attention", "error", "hugging_face", "kernels"]


def __getattr__(name: str) -> ModuleType:
    """Imports the adapter, and with it transformers, only when it is asked for."""
    if name == "hugging_face":
        return import_module("value_aware_attention.hugging_face")
    raise AttributeError(f"module 'value_aware_attention' has no attribute {name!r}")
