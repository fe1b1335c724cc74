"""Refuses by name options that approximations cannot honour, at once where the model tells."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from value_aware_attention.arguments import check_integers, described
from value_aware_attention.caches import CacheMethod
from value_aware_attention.hugging_face.layers import attends_causally, attention_layers

ATTRIBUTES = {
    "attn_logit_softcapping": "caps its attention scores (logit soft-capping)",
    "has_relative_attention_bias": "adds a position bias to its attention scores",
    "sinks": "has attention sinks",
}
"""Attributes of attention modules, each with its effect on a model that sets it"""

OPTIONS = {
    "cache": "a paged cache",
    "head_mask": "a head_mask",
    "output_attentions": "output_attentions",
    "position_bias": "a position bias",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "logit soft-capping",
}
"""Arguments of attention functions that change the result, each by its name in an error"""

WEIGHTS = "output_attentions cannot be honoured: approximations do not keep the attention weights"


def check_model(model: nn.Module) -> None:
    """Raises ValueError where the model itself tells that its attention cannot be replaced."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}; it must be a transformers PreTrainedModel"
        )
    for layer in attention_layers(model):
        for name, does in ATTRIBUTES.items():
            if not _is_absent(getattr(layer, name, None)):
                raise ValueError(f"{type(model).__name__} {does}: {_CANNOT}")
    if getattr(model.config, "output_attentions", False):
        raise ValueError(f"{WEIGHTS}; set model.config.output_attentions = False")


def check_method(**arguments: object) -> nn.Module:
    """Returns the one argument given, if it is a module that can be attention; else ValueError."""
    ((name, given),) = arguments.items()
    if isinstance(given, CacheMethod):
        method = type(given).__name__
        raise ValueError(
            f"{name} is the cache method {method}; it must be an approximation, such as "
            f"caches.AfterPrefix({method}(...), prefix=...)"
        )
    if isinstance(given, type):
        raise ValueError(
            f"{name} is {described(given)}; it must be an instance, {given.__name__}(...), or a "
            f"function from a layer's number to one"
        )
    if not isinstance(given, nn.Module):
        raise ValueError(f"{name} is {described(given)}; it must be a module, such as Exact()")
    return given


def check_methods(model: nn.Module, methods: Mapping[nn.Module, nn.Module]) -> None:
    """Raises ValueError where a causal layer would get a method that needs to see the future."""
    for layer, method in methods.items():
        if attends_causally(layer) and not getattr(method, "supports_causal", True):
            raise ValueError(
                f"{type(method).__name__} does not support causal attention (its choice of keys "
                f"would leak the future), and {type(model).__name__} is causal"
            )


def check_heads(heads: Collection[int] | None, available: int | None) -> None:
    """Raises ValueError for a head that a layer of `available` heads lacks; None = not known."""
    if heads is None or not isinstance(available, int):  # some configs have a list, layer by layer
        return
    heads = check_integers(heads=heads)
    if bad := sorted(set(heads) - set(range(available))):
        raise ValueError(
            f"heads are {sorted(heads)}; the model has heads 0 to {available - 1}, "
            f"not {', '.join(map(str, bad))}"
        )


def check_call(dropout: float, options: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments of an attention call that nothing here would honour."""
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}; call model.eval() first, or train without it"
        )
    for name, value in options.items():
        if _is_absent(value):
            continue
        if name in OPTIONS:
            raise ValueError(f"the model passes {OPTIONS[name]}: {_CANNOT}")
        if _may_change_scores(value):
            raise ValueError(f"the model passes {name}, which is not known here: {_CANNOT}")


def refuse_weights(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuses, before `forward`, to return weights: transformers would give None for them."""
    if options.get("output_attentions"):
        raise ValueError(WEIGHTS)


def _is_absent(value: object) -> bool:
    return value is None or value is False


def _may_change_scores(value: object) -> bool:
    """Tells masks and biases, which are floats or booleans, from positions and lengths."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.dtype == torch.bool
    return isinstance(value, float)


_CANNOT = "approximations cannot honour it"
