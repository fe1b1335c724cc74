"""Attention approximations judged by the attention output, values included.

The first open implementation of *Value-aware Approximate Attention* (Gupta & Berant, EMNLP 2021).
"""

import sys
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from value_aware_attention import (
        approximations,
        caches,
        error,
        hugging_face,
        kernels,
        measurement,
        probe,
        texts,
    )
    from value_aware_attention.attention import attention

__all__ = [
    "approximations",
    "attention",
    "caches",
    "error",
    "hugging_face",
    "kernels",
    "measurement",
    "probe",
    "texts",
]


def __getattr__(name: str) -> Any:
    """Imports a submodule on first access, so that `files` needs no torch."""
    if name == "__version__":
        return version("value-aware-attention")
    if name in __all__:
        return import_module(f"value_aware_attention.{name}")
    raise AttributeError(f"module 'value_aware_attention' has no attribute {name!r}")


class _Package(ModuleType):
    @property
    def attention(self) -> Any:
        """Returns the function; importing the module would replace it by the module."""
        return import_module("value_aware_attention.attention").attention

    @attention.setter
    def attention(self, module: ModuleType) -> None: ...


sys.modules[__name__].__class__ = _Package
