"""What every method supports, read from its class."""

from inspect import isabstract
from typing import NamedTuple

from value_aware_attention import approximations
from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.kernels import KERNELS


class Support(NamedTuple):
    """Tells what a method supports; what it does not raises ValueError, except gradients."""

    kernels: tuple[type, ...]
    """Similarity kernels it computes or approximates."""
    causal: bool
    """`is_causal=True`."""
    padding: bool
    """An `attn_mask` that hides the same keys from every query."""
    any_mask: bool
    """Any other `attn_mask`."""
    gradients: bool
    """Gradients to query and key; `value` always has one."""


def support(method: type[Approximation]) -> Support:
    """Reads from its class what a method supports."""
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
