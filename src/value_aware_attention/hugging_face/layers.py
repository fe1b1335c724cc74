"""Finds the attention modules of a model, and refuses options that methods do not support."""

from collections.abc import Collection, Mapping
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from value_aware_attention.arguments import check_integers, described
from value_aware_attention.call import Arguments
from value_aware_attention.kernels import Exponential, Kernel

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Global where transformers' modelling code looks up the attention function"""


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Lists the self-attention modules that call transformers' AttentionInterface, in model order.

    Layer i of `replace_attention` is the i-th of them. A module that is called several times per
    forward pass (albert shares one between all layers) is one layer. Layers without such attention
    (recurrent layers of hybrid models) are not counted. Encoder layers come before decoder layers.
    Raises ValueError for a model without any.
    """
    layers = [module for name, module in _callers(model) if not _is_cross_attention(name, module)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention that transformers' AttentionInterface can "
            f"replace; models such as roberta, bert, gpt2 or llama have"
        )
    return layers


def cross_attention_layers(model: nn.Module) -> list[nn.Module]:
    """Lists the modules that attend to another sequence; `replace_attention` leaves them exact."""
    return [module for name, module in _callers(model) if _is_cross_attention(name, module)]


def chosen_layers(model: nn.Module, layers: Collection[int] | None) -> dict[nn.Module, int]:
    """Selects the self-attention modules that `layers` names, with their numbers; None = all.

    Raises ValueError if the model has no such layer.
    """
    available = attention_layers(model)
    if layers is None:
        return {module: number for number, module in enumerate(available)}
    return {available[number]: number for number in _existing(len(available), layers=layers)}


def layer_kernel(layer: nn.Module, scaling: float | None = None) -> Kernel:
    """Returns the kernel of an attention module: its `kernel`, else exp(scaling <q, k>).

    Attention modules of transformers have no `kernel`; those of this library's models have.
    """
    return getattr(layer, "kernel", None) or Exponential(scaling)


def own_kernel(model: nn.Module) -> Kernel:
    """Returns the kernel of a model's first layer: the one it was trained with, at any scale."""
    return layer_kernel(attention_layers(model)[0])


CLASSES = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForMaskedLM: MODEL_FOR_MASKED_LM_MAPPING,
}
"""Kinds of models and transformers' classes of each kind, by config"""


def auto_class(config: PreTrainedConfig, architecture: str) -> Any:
    """Returns the AutoModel class for which transformers lists this architecture."""
    return next(
        (kind for kind, mapping in CLASSES.items() if architecture in class_names(mapping, config)),
        AutoModel,
    )


def class_names(mapping: Any, config: PreTrainedConfig) -> list[str]:
    """Lists the names of the classes for a config in one of transformers' mappings."""
    listed = mapping.get(type(config), ())
    return [model.__name__ for model in (listed if isinstance(listed, tuple) else (listed,))]


def positions(model: PreTrainedModel) -> int | None:
    """Returns the longest sequence of a model, including special tokens; None = unknown."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if limit is not None and padding is not None and hasattr(module, "position_embeddings"):
            return limit - padding - 1  # RoBERTa-like models count from padding_idx + 1
    return limit


def attends_causally(module: nn.Module) -> bool:
    """Returns whether queries of this layer see only their past, according to module and config."""
    bidirectional = getattr(getattr(module, "config", None), "is_causal", True) is False
    return bool(getattr(module, "is_causal", False)) and not bidirectional


def _callers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Finds the modules whose `forward` calls the attention function, with their paths."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if (code := getattr(unwrap(type(module).forward), "__code__", None))
        and INTERFACE in code.co_names
    ]


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    # bert: layer.0.crossattention.self, gpt2: h.0.crossattention, bart: layers.0.encoder_attn
    words = ".".join([*name.split(".")[-2:], type(module).__name__]).lower()
    return any(word in words for word in ("cross", "encoder_attn", "encdec"))


ATTRIBUTES = {
    "attn_logit_softcapping": "caps its attention scores (logit soft-capping)",
    "has_relative_attention_bias": "adds a position bias to its attention scores",
    "sinks": "has attention sinks",
}
"""Attributes of attention modules -> their effect if set"""

OPTIONS = {
    "cache": "a paged cache",
    "head_mask": "a head_mask",
    "output_attentions": "output_attentions",
    "position_bias": "a position bias",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "logit soft-capping",
}
"""Arguments of attention functions that change the result -> their names in an error"""

NO_WEIGHTS = (
    "output_attentions cannot be honoured: approximations do not keep the attention weights"
)


def check_model(model: nn.Module) -> None:
    """Raises ValueError if the model declares that its attention cannot be replaced."""
    if not isinstance(model, PreTrainedModel):
        base = "; give its get_base_model()" if hasattr(model, "get_base_model") else ""
        raise ValueError(
            f"model is a {type(model).__name__}; it must be a transformers PreTrainedModel{base}"
        )
    for layer in attention_layers(model):
        for name, does in ATTRIBUTES.items():
            if not _is_absent(getattr(layer, name, None)):
                raise ValueError(f"{type(model).__name__} {does}: {_CANNOT}")
    if getattr(model.config, "output_attentions", False):
        raise ValueError(f"{NO_WEIGHTS}; set model.config.output_attentions = False")


def check_method(**arguments: object) -> nn.Module:
    """Returns the only argument, if it is a module that can be attention; ValueError otherwise."""
    ((name, argument),) = arguments.items()
    if callable(getattr(argument, "keep", None)):  # a cache method; no import here
        method = type(argument).__name__
        raise ValueError(
            f"{name} is the cache method {method}; it must be an approximation, such as "
            f"caches.AfterPrefix({method}(...), prefix=...)"
        )
    if isinstance(argument, type):
        raise ValueError(
            f"{name} is {described(argument)}; it must be an instance, {argument.__name__}(...), "
            f"or a function from a layer's number to one"
        )
    if not isinstance(argument, nn.Module):
        raise ValueError(f"{name} is {described(argument)}; it must be a module, such as Exact()")
    return argument


def check_methods(model: nn.Module, methods: Mapping[nn.Module, nn.Module]) -> None:
    """Raises ValueError if a causal layer would get a method that needs the future."""
    for layer, method in methods.items():
        if attends_causally(layer) and not getattr(method, "supports_causal", True):
            raise ValueError(
                f"{type(method).__name__} does not support causal attention (its choice of keys "
                f"would leak the future), and {type(model).__name__} is causal"
            )


def check_heads(heads: Collection[int] | None, available: int | None) -> None:
    """Raises ValueError for a head number not below `available`; None = unknown."""
    if heads is not None and isinstance(available, int):  # some configs have one per layer
        _existing(available, heads=heads)


def _existing(available: int, **arguments: Collection[int]) -> list[int]:
    """Returns the numbers in the only argument, sorted; ValueError for one that does not exist."""
    (name,), numbers = arguments, check_integers(**arguments)
    if bad := sorted(set(numbers) - set(range(available))):
        raise ValueError(
            f"{name} are {sorted(numbers)}; the model has {name} 0 to {available - 1}, "
            f"not {', '.join(map(str, bad))}"
        )
    return sorted(set(numbers))


def check_call(dropout: float, options: Mapping[str, object]) -> None:
    """Raises ValueError for arguments of an attention call that would be ignored here."""
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}; call model.eval() first, or train without it"
        )
    for name, value in options.items():
        if name in OPTIONS and not _is_absent(value):
            raise ValueError(f"the model passes {OPTIONS[name]}: {_CANNOT}")
        if _may_change_scores(value):
            raise ValueError(f"the model passes {name}, which is not known here: {_CANNOT}")


def refuse_weights(module: nn.Module, inputs: tuple[object, ...], options: Arguments) -> None:
    """Refuses to return weights before `forward`: transformers would return None for them."""
    if options.get("output_attentions"):
        raise ValueError(NO_WEIGHTS)


def _is_absent(value: object) -> bool:
    return value is None or value is False


def _may_change_scores(value: object) -> bool:
    """Returns whether a value may be a mask or bias: floats or booleans, not integers."""
    return isinstance(value, float) or (
        isinstance(value, Tensor) and (value.is_floating_point() or value.dtype == torch.bool)
    )


_CANNOT = "approximations and compressed caches cannot honour it"
