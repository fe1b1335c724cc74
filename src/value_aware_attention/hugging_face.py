"""Swaps the attention of a trained Hugging Face model for an approximation, and back."""

import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from value_aware_attention.approximations import Exact
from value_aware_attention.kernels import Exponential, Kernel

__all__ = ["attention_layers", "replace_attention", "set_attention"]

OWN = "value_aware_attention"
"""The name under which transformers calls the attention that `set_attention` put into a model."""

REFUSED = ("softcap", "s_aux", "position_bias", "output_attentions")


@contextmanager
def replace_attention(
    model: PreTrainedModel,
    approximation: nn.Module | Callable[[int], nn.Module],
    *,
    kernel: Kernel | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
) -> Iterator[PreTrainedModel]:
    """Within the context, `model` computes its self-attention with `approximation`.

    `approximation` is a module, or a callable layer_index -> module. `kernel` None is the model's
    own: exponential with its scaling. `layers` and `heads` None are all of them; the rest stays
    exact. On exit, also after an exception, the model is as it was; contexts nest.
    Raises ValueError for a model without transformers' attention interface.
    """
    index = {layer: number for number, layer in enumerate(attention_layers(model))}
    chosen = set(index.values()) if layers is None else set(layers)
    if not chosen <= set(index.values()):
        raise ValueError(f"layers are {sorted(chosen)}; the model has layers 0 to {len(index) - 1}")
    methods = {
        layer: _method(approximation, number) if number in chosen else Exact()
        for layer, number in index.items()
    }
    name = f"value_aware_attention_{uuid.uuid4().hex}"
    function = _attention_function(methods, kernel, heads)
    before = model.config._attn_implementation
    AttentionInterface.register(name, function)
    # Without a mask function of the same name transformers passes no mask at all, silently.
    AttentionMaskInterface.register(name, eager_mask)
    try:
        model.config._attn_implementation = name
        yield model
    finally:
        model.config._attn_implementation = before
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def set_attention(
    model: PreTrainedModel,
    approximation: Callable[[int], nn.Module],
    *,
    kernel: Kernel | None = None,
) -> None:
    """From now on layer i of `model` attends with the module `approximation(i)`, to be trained.

    The modules become part of the model: `parameters()` and `state_dict()` have theirs. `kernel`
    None is the model's own, exponential with its scaling. `replace_attention` goes before it.
    Raises ValueError for a model without transformers' attention interface, or with attention
    dropout, which approximations do not have.
    """
    for number, layer in enumerate(attention_layers(model)):
        _refuse_unsupported(getattr(getattr(layer, "dropout", None), "p", 0.0), {})
        layer.approximation, layer.kernel = approximation(number), kernel  # type: ignore[assignment]
    AttentionInterface.register(OWN, _own_attention)
    AttentionMaskInterface.register(OWN, eager_mask)
    model.config._attn_implementation = OWN


def _own_attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
    methods: dict[nn.Module, Any] = {module: module.approximation}
    return _attention_function(methods, module.kernel, None)(module, *inputs, **options)  # type: ignore[arg-type]


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of a model that calls transformers' attention interface."""
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "scaling") and hasattr(module, "is_causal")
    ]
    if not layers or not getattr(model, "_supports_attention_backend", True):
        raise ValueError(
            f"{type(model).__name__} has no attention that transformers' AttentionInterface can "
            f"replace; models such as roberta, bert, gpt2 or llama have"
        )
    return layers


def _method(approximation: nn.Module | Callable[[int], nn.Module], layer: int) -> nn.Module:
    return approximation if isinstance(approximation, nn.Module) else approximation(layer)


def _attention_function(
    methods: dict[nn.Module, nn.Module], kernel: Kernel | None, heads: Collection[int] | None
) -> Callable[..., tuple[Tensor, None]]:
    """The function transformers calls: (B, H, N, D) in, (B, N, H, V) out."""

    def function(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        _refuse_unsupported(dropout, options)
        groups = query.shape[1] // key.shape[1]  # grouped-query attention shares key/value heads
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        method = methods[module]
        causal = bool(getattr(module, "is_causal", False)) and query.shape[2] == key.shape[2] > 1
        arguments = {
            "kernel": kernel or Exponential(scaling),
            "attn_mask": _visible(attention_mask, query, key),
            "is_causal": causal and getattr(method, "supports_causal", True),
        }
        output = method(query, key, value, **arguments)
        if heads is not None:
            exact = Exact()(query, key, value, **arguments)
            replaced = torch.zeros(query.shape[1], dtype=torch.bool, device=query.device)
            replaced[list(heads)] = True
            output = torch.where(replaced[:, None, None], output, exact)
        return output.transpose(1, 2).contiguous(), None

    return function


def _refuse_unsupported(dropout: float, options: dict[str, Any]) -> None:
    refused = [name for name in REFUSED if options.get(name) not in (None, False)]
    if refused:
        raise ValueError(f"the model passes {', '.join(refused)}; approximations cannot honour it")
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}; call model.eval() first, or train without it"
        )


def _visible(attention_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """transformers' additive mask as a boolean one, with one row where all rows agree."""
    if attention_mask is None:
        return None
    mask = attention_mask[..., : key.shape[2]]
    if mask.dtype != torch.bool:
        visible = mask == 0
        if not (visible | (mask < -1e4)).all():
            raise ValueError("the model adds a bias to its scores; approximations cannot honour it")
        mask = visible
    if mask.shape[-2] > 1 and bool((mask == mask[..., :1, :]).all()):
        mask = mask[..., :1, :]
    return mask
