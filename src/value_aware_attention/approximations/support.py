"""Reads from its class which kernels, masks and gradients a method supports."""

from inspect import isabstract
from typing import NamedTuple

from value_aware_attention import approximations
from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.kernels import KERNELS


class Support(NamedTuple):
    """Tells which options a method supports; the others raise ValueError, except gradients."""

    kernels: tuple[type, ...]
    """Similarity kernels it computes or approximates."""
    causal: bool
    """Whether `is_causal=True` is supported"""
    padding: bool
    """Whether an `attn_mask` that hides the same keys from every query is supported"""
    any_mask: bool
    """Whether any other `attn_mask` is supported"""
    gradients: bool
    """Whether query and key are given gradients; `value` always is."""


def support(method: type[Approximation]) -> Support:
    """Reads the options that a method supports from its class."""
    return Support(
        kernels=method.kernels or KERNELS,
        causal=method.supports_causal,
        padding=True,
        any_mask=not method.needs_shared_keys,
        gradients=method.differentiable_weights,
    )


def methods() -> dict[str, type[Approximation]]:
    """Returns every public method by name."""
    public = {name: getattr(approximations, name) for name in approximations.__all__}
    return {
        name: item
        for name, item in public.items()
        if isinstance(item, type) and issubclass(item, Approximation) and not isabstract(item)
    }
