"""Describes a model's attention layer beside its queries, keys and values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

Rotary = Callable[[Tensor, Tensor], Tensor]
"""(queries (..., N, D), shift (N)) -> the queries rotated to positions `shift` later."""


@dataclass(frozen=True)
class Layer:
    """Holds facts about a layer that `hugging_face.replace_attention` finds for methods."""

    projection: Float[Tensor, "*heads V E"] | None = None
    """Output projection W_o of each query head, without bias"""
    rotary: Rotary | None = None
    """None: the model does not rotate queries by their positions."""
    repeated: tuple[Tensor, Tensor, Tensor] | None = None
    """Queries, keys and values (B, *heads, T, .) of the prefix read again, after itself."""
    number: int | None = None
    """Its place among the layers of the model; None: bare tensors"""
    kept: Any = None
    """`caches.KeptKeys` chosen together with those of the other layers"""
