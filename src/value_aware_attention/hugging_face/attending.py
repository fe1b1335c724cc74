"""Defines the attention function that transformers calls instead of a model's own.

Models are also trained with it, so it does not depend on caches: changes there do not affect
trained models.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from value_aware_attention.approximations import Exact
from value_aware_attention.arguments import described
from value_aware_attention.call import Call
from value_aware_attention.hugging_face.layers import (
    attends_causally,
    attention_layers,
    check_call,
    check_heads,
    check_method,
    check_methods,
    check_model,
    layer_kernel,
    refuse_weights,
)
from value_aware_attention.hugging_face.masks import (
    additive_mask,
    causal_pairs,
    positions_in_texts,
    split_mask,
    trim,
)
from value_aware_attention.kernels import Kernel, check_kernel

OWN = "value_aware_attention"
"""Name of the attention of `set_attention` in transformers"""
PATTERN_ROWS = 128
"""Rows of a pattern evaluated at once, if texts have different positions"""


def set_attention(
    model: PreTrainedModel,
    approximation: Callable[[int], nn.Module],
    *,
    kernel: Kernel | None = None,
) -> None:
    """Gives layer i of `model` the trainable attention module `approximation(i)`.

    The modules become part of the model's `parameters()` and `state_dict()`. `kernel` None is the
    model's own, as in `replace_attention`, which takes precedence. Raises ValueError for a model
    that `replace_attention` refuses, or with attention dropout, which approximations do not
    support.
    """
    check_model(model)
    layers = attention_layers(model)
    for layer in layers:
        check_call(getattr(getattr(layer, "dropout", None), "p", 0.0), {})
    if kernel is not None:
        check_kernel(kernel)
    if isinstance(approximation, nn.Module | type) or not callable(approximation):
        raise ValueError(
            f"approximation is {described(approximation)}; it must be a function from a layer's "
            f"number to a module"
        )
    methods = {layer: method_of(approximation, number) for number, layer in enumerate(layers)}
    check_methods(model, methods)
    if any(getattr(method, "shares_keys", False) for method in methods.values()):
        raise ValueError("AfterPrefix is not trained with; replace_attention measures it")
    for layer, method in methods.items():
        layer.approximation = method
        if kernel is not None:
            layer.kernel = kernel  # type: ignore[assignment]
    register(OWN, own_attention)
    hooks(model)
    set_implementation(model, OWN)


def own_attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
    """Computes attention outside `replace_attention`: the module's `approximation` or Exact."""
    method = getattr(module, "approximation", None) or Exact()
    return attend({module: method}, None, None, module, *inputs, **options)


def method_of(approximation: nn.Module | Callable[[int], nn.Module], layer: int) -> nn.Module:
    """Returns a layer's method: the module itself, or the function's result for this layer."""
    if isinstance(approximation, nn.Module | type) or not callable(approximation):
        return check_method(approximation=approximation)
    return check_method(**{f"approximation({layer})": approximation(layer)})


def exact(call: Call) -> Float[Tensor, "*batch N V"]:
    """Computes exact attention, like the model."""
    arguments = call.arguments()
    for name in ("key", "value"):
        arguments[name] = arguments[name].expand(*call.batch, -1, -1)
    return Exact()(**arguments)


def attend(
    methods: Mapping[nn.Module, Callable[..., Tensor]],
    kernel: Kernel | None,
    heads: Collection[int] | None,
    module: nn.Module,
    /,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch N heads V"], None]:
    """Calls the module's method with transformers' arguments; tensors are (batch, heads, N, D)."""
    check_call(dropout, options)
    check_heads(heads, query.shape[1])
    positions = getattr(attention_mask, "positions", None)
    key, value, attention_mask = trim(key, value, attention_mask, query.shape[2])
    attends = attends_causally(module) if is_causal is None else is_causal
    attn_mask, is_causal = split_mask(attention_mask, query, key, is_causal=attends)
    method = methods[module]
    if attends or getattr(module, "is_decoder", False):  # some decoders do not set is_causal
        method, is_causal = _in_its_text(method, positions, attn_mask, is_causal, query, key)
    options = {
        "kernel": kernel or layer_kernel(module, scaling),
        "attn_mask": attn_mask,
        "is_causal": is_causal,
    }
    if getattr(method, "shares_keys", False):
        output = method(query, key, value, heads, **options)
    else:
        output = _in_heads(method, (query, *repeated(query, key, value)), heads, **options)
    return output.transpose(1, 2).contiguous(), None


def _in_its_text(
    method: Callable[..., Tensor],
    positions: Int[Tensor, "... m"] | None,
    attn_mask: Bool[Tensor, "*batch #N M"] | None,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
) -> tuple[Callable[..., Tensor], bool]:
    """Returns the method and `is_causal` of a causal layer for one call in a pass over texts.

    A pattern keeps the same pairs as in one pass over each text alone, even if texts are split into
    calls, padded or packed. A mask that hides more than the future also counts as causal. Raises
    ValueError if the positions of keys in their texts (None: derived from the mask) are ambiguous.
    """
    queries, keys = query.shape[2], key.shape[2]
    pattern_of, is_whole = getattr(method, "pattern", None), queries == keys
    if (is_whole and attn_mask is None) or (pattern_of is None and (is_causal or not is_whole)):
        return method, is_causal
    past, shown = causal_pairs(queries, keys, query.device), attn_mask is None or attn_mask
    visible = past & shown
    shows_later = not is_causal and bool((~past & shown).any())
    if pattern_of is None or (is_whole and shows_later):
        return method, not shows_later
    place = positions_in_texts(visible) if positions is None else positions[..., :keys]
    last = place.where(visible, 0).amax(dim=-1, keepdim=True)  # the query's position
    is_counted = is_whole or positions is not None
    is_told = visible.sum(dim=-1, keepdim=True) <= last + 1 if is_counted else visible == past
    if shows_later or not is_told.all():
        raise ValueError(
            f"the attention mask does not tell the positions within texts, by which "
            f"{type(method).__name__} chooses keys: give the model a mask (batch, tokens)"
        )
    stands = (place == torch.arange(keys, device=place.device)) | ~visible.any(dim=-2, keepdim=True)
    if is_whole and bool(stands.all()):  # each visible key's index is its position in the text
        return method, True
    pattern = pattern_of(int(last.max()) + 1, is_causal=True)
    pairs = {
        "attn_mask": visible
        & torch.cat([pattern(x, place) for x in last.split(PATTERN_ROWS, dim=-2)], dim=-2),
        "is_causal": False,
    }
    return lambda *inputs, **options: Exact()(*inputs, **options | pairs), is_causal


def _in_heads(
    method: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    heads: Collection[int] | None,
    **options: Any,
) -> Float[Tensor, "batch heads N V"]:
    """Uses the method's output in `heads` and the exact output in the others."""
    if heads is None or isinstance(method, Exact):
        return method(*inputs, **options)
    output = Exact()(*inputs, **options)
    if not heads:
        return output
    chosen = torch.tensor(sorted(set(heads)), device=output.device)
    mask = options["attn_mask"]
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        options["attn_mask"] = mask.index_select(-3, chosen)
    return output.index_copy(
        1, chosen, method(*(x.index_select(1, chosen) for x in inputs), **options).to(output.dtype)
    )


def hooks(model: PreTrainedModel) -> list[RemovableHandle]:
    """Makes a model refuse to return weights; returns the handles of the hooks."""
    return [
        module.register_forward_pre_hook(refuse_weights, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ]


def register(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Registers an attention function and its mask function in transformers."""
    AttentionInterface.register(name, function)
    # Without a mask function of the same name, transformers silently passes no mask.
    AttentionMaskInterface.register(name, additive_mask)


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Sets the attention function of a model; ValueError if the model does not support this."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # transformers only logs that it cannot
        raise ValueError(f"{type(model).__name__} does not let its attention function be chosen")


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values for every query head of grouped-query attention."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
