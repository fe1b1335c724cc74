"""Finds the self-attention and cross-attention modules of a Hugging Face model."""

from collections.abc import Callable, Collection
from inspect import unwrap

from torch import nn

from value_aware_attention.arguments import check_integers
from value_aware_attention.kernels import Exponential, Kernel

__all__ = [
    "attends_causally",
    "attention_layers",
    "chosen_layers",
    "cross_attention_layers",
    "layer_kernel",
    "own_kernel",
]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Global in which transformers' modelling code looks the attention function up"""

CROSS_ATTENTION = ("cross", "encoder_attn", "encdec")
"""Words in transformers' names of modules that attend to another sequence"""


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Lists the self-attention modules that call transformers' AttentionInterface, in model order.

    Layer i of `replace_attention` is the i-th of them. A module that a forward pass calls several
    times (albert shares one between all its layers) is one layer; layers without such attention
    (recurrent ones of hybrid models) are not counted; an encoder's come before its decoder's.
    Raises ValueError for a model that has none.
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

    Raises ValueError where the model has no such layer.
    """
    available = attention_layers(model)
    if layers is None:
        return {module: number for number, module in enumerate(available)}
    layers = check_integers(layers=layers)
    if bad := sorted(set(layers) - set(range(len(available)))):
        raise ValueError(
            f"layers are {sorted(layers)}; the model has layers 0 to {len(available) - 1}, "
            f"not {', '.join(map(str, bad))}"
        )
    return {available[number]: number for number in sorted(set(layers))}


def layer_kernel(layer: nn.Module, scaling: float | None = None) -> Kernel:
    """Returns the kernel of an attention module: its `kernel`, else exp(scaling <q, k>).

    Attention modules of transformers have no `kernel`; those of this library's models have.
    """
    return getattr(layer, "kernel", None) or Exponential(scaling)


def own_kernel(model: nn.Module) -> Kernel:
    """Returns the kernel that a model was trained with, of any scale: that of its first layer."""
    return layer_kernel(attention_layers(model)[0])


def attends_causally(module: nn.Module) -> bool:
    """Tells whether a query of this layer sees only its past, as far as module and config tell."""
    bidirectional = getattr(getattr(module, "config", None), "is_causal", True) is False
    return bool(getattr(module, "is_causal", False)) and not bidirectional


def _callers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Finds the modules whose `forward` calls the attention function, with their paths."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if INTERFACE in _names_used(type(module).forward)
    ]


def _names_used(function: Callable[..., object]) -> tuple[str, ...]:
    code = getattr(unwrap(function), "__code__", None)
    return code.co_names if code else ()


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    # bert: layer.0.crossattention.self, gpt2: h.0.crossattention, bart: layers.0.encoder_attn
    words = ".".join([*name.split(".")[-2:], type(module).__name__]).lower()
    return any(word in words for word in CROSS_ATTENTION)
