"""Swaps the attention of a trained Hugging Face model for an approximation, and back."""

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread, current_thread
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from value_aware_attention.approximations import Exact
from value_aware_attention.arguments import described
from value_aware_attention.hugging_face.cache_layers import (
    FirstReadings,
    SharedKeys,
    repeated,
    rotary_of,
)
from value_aware_attention.hugging_face.layers import (
    attends_causally,
    attention_layers,
    check_call,
    check_heads,
    check_method,
    check_methods,
    check_model,
    check_pooled,
    chosen_layers,
    cross_attention_layers,
    layer_kernel,
    refuse_weights,
)
from value_aware_attention.hugging_face.masks import additive_mask, split_mask, trim
from value_aware_attention.kernels import Kernel, check_kernel

OWN = "value_aware_attention"
"""Name under which transformers calls the attention that `set_attention` put into a model"""


@dataclass(eq=False)
class _Context:
    """Holds an open `replace_attention`: its thread, and the attention each config named before.

    Contexts of a config are a chain: it names the innermost, and each has the name of the next.
    """

    name: str
    before: list[tuple[Any, str | None]]
    thread: Thread = field(default_factory=current_thread)


_OPEN: list[_Context] = []
_LOCK = Lock()
"""Held while `_OPEN` changes"""


@contextmanager
def replace_attention(
    model: PreTrainedModel,
    approximation: nn.Module | Callable[[int], nn.Module],
    *,
    kernel: Kernel | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
) -> Iterator[PreTrainedModel]:
    """Replaces the self-attention of `model` with `approximation` within the context.

    `approximation` is a module, or a callable layer_index -> module, for the modules that
    `attention_layers` lists. `kernel` None is the model's own: `kernel` of its attention modules,
    else the exponential with its scaling. `layers` and `heads` None are all of them; other layers
    and heads, and attention to another sequence, stay exact. `caches.AfterPrefix` is given
    key-value heads as they are, so that a group of query heads keeps one set, and the layer's
    projection and rotation; other methods get the heads repeated, and past keys as the model does.
    Exceptions too restore the model. Contexts of one thread nest: the innermost open one computes.

    Raises ValueError for a model without transformers' attention interface; for a model whose
    attention another thread has replaced (transformers reads it from the config, which threads
    share); and for options that no approximation can honour: logit soft-capping, attention sinks,
    position bias, attention dropout, output_attentions, a non-causal method in a causal model.
    """
    check_model(model)
    if kernel is not None:
        check_kernel(kernel)
    numbers = chosen_layers(model, layers)
    methods: dict[nn.Module, Any] = {
        module: _method(approximation, number) for module, number in numbers.items()
    }
    check_methods(model, methods)
    check_heads(heads, getattr(model.config, "num_attention_heads", None))
    check_pooled(list(methods.values()), len(attention_layers(model)), heads)
    every = [*attention_layers(model), *cross_attention_layers(model)]
    others: dict[nn.Module, Any] = dict.fromkeys(every, Exact())
    first = FirstReadings(methods.values())
    shared = {
        layer: SharedKeys(method, layer, numbers[layer], rotary_of(model), first)
        for layer, method in methods.items()
        if getattr(method, "shares_keys", False)
    }
    name = f"{OWN}_{uuid.uuid4().hex}"
    with ExitStack() as restored:
        _register(name, partial(_attend, others | methods | shared, kernel, heads))
        restored.enter_context(first.before_each_call(model))
        restored.callback(_unregister, name)
        restored.callback(_close, _opened(model, name))
        for handle in _hooks(model):
            restored.callback(handle.remove)
        _set_implementation(model, name)
        yield model


def set_attention(
    model: PreTrainedModel,
    approximation: Callable[[int], nn.Module],
    *,
    kernel: Kernel | None = None,
) -> None:
    """Gives layer i of `model` the module `approximation(i)` as its attention, to be trained.

    The modules become part of the model: `parameters()` and `state_dict()` have theirs. `kernel`
    None is the model's own, as in `replace_attention`, which takes precedence. Raises ValueError
    for a model that `replace_attention` refuses, or with attention dropout, which approximations do
    not have.
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
    methods = {layer: _method(approximation, number) for number, layer in enumerate(layers)}
    check_methods(model, methods)
    if any(getattr(method, "shares_keys", False) for method in methods.values()):
        raise ValueError("AfterPrefix is not trained with; replace_attention measures it")
    for layer, method in methods.items():
        layer.approximation = method
        if kernel is not None:
            layer.kernel = kernel  # type: ignore[assignment]
    _register(OWN, own_attention)
    _hooks(model)
    _set_implementation(model, OWN)


def _register(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    AttentionInterface.register(name, function)
    # Without a mask function of the same name transformers passes no mask at all, silently.
    AttentionMaskInterface.register(name, additive_mask)


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # transformers only logs that it cannot
        raise ValueError(f"{type(model).__name__} does not let its attention function be chosen")


def _unregister(name: str) -> None:
    """Forgets a name, for which the interfaces have no public way."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def _opened(model: PreTrainedModel, name: str) -> _Context:
    """Opens a context; ValueError where another thread has one of the model, or of its config."""
    with _LOCK:
        context = _Context(name, [(x, x._attn_implementation) for x in _configs(model)])
        for other in _OPEN:
            shared = any(a is b for a, _ in other.before for b, _ in context.before)
            if shared and other.thread is not context.thread and other.thread.is_alive():
                raise ValueError(
                    f"another thread has the attention of this {type(model).__name__} replaced: "
                    f"make a copy of the model for each thread, or wait until it is done"
                )
        _OPEN.append(context)
    return context


def _close(context: _Context) -> None:
    """Restores the attention that each config named before the context."""
    with _LOCK:
        _OPEN.remove(context)
        before = {id(config): name for config, name in context.before}

        def restored(config: Any, name: str | None) -> str | None:
            return before[id(config)] if name == context.name else name

        for other in _OPEN:
            other.before = [(config, restored(config, name)) for config, name in other.before]
        # All are read before any is set: setting an outer config's sets its sub-configs' too.
        now = [(x, restored(x, x._attn_implementation)) for x, _ in context.before]
        for config, name in now:
            config._attn_implementation = name


def _configs(model: PreTrainedModel) -> list[Any]:
    """Lists every config of the model that names an attention, outermost first.

    There is no public way to read the name.
    """
    configs: list[Any] = []
    waiting: list[Any] = [
        module.config for module in model.modules() if isinstance(module, PreTrainedModel)
    ]
    while waiting:
        config = waiting.pop(0)
        if config is not None and not any(config is known for known in configs):
            configs.append(config)
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return configs


def _hooks(model: PreTrainedModel) -> list[Any]:
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [part.register_forward_pre_hook(refuse_weights, with_kwargs=True) for part in parts]


def own_attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
    """Computes attention where nothing is replaced: by the module's `approximation`, or Exact."""
    method = getattr(module, "approximation", None) or Exact()
    return _attend({module: method}, None, None, module, *inputs, **options)


def _method(approximation: nn.Module | Callable[[int], nn.Module], layer: int) -> nn.Module:
    if isinstance(approximation, nn.Module | type) or not callable(approximation):
        return check_method(approximation=approximation)
    return check_method(**{f"approximation({layer})": approximation(layer)})


def _attend(
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
    """Calls the module's method as transformers calls attention, with (batch, heads, N, D)."""
    check_call(dropout, options)
    check_heads(heads, query.shape[1])
    key, value, attention_mask = trim(key, value, attention_mask, query.shape[2])
    is_causal = attends_causally(module) if is_causal is None else is_causal
    attn_mask, is_causal = split_mask(attention_mask, query, key, is_causal=is_causal)
    options = {
        "kernel": kernel or layer_kernel(module, scaling),
        "attn_mask": attn_mask,
        "is_causal": is_causal,
    }
    if isinstance(method := methods[module], SharedKeys):
        output = method(query, key, value, heads, **options)
    else:
        output = _in_heads(method, (query, *repeated(query, key, value)), heads, **options)
    return output.transpose(1, 2).contiguous(), None


def _in_heads(
    method: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    heads: Collection[int] | None,
    **options: Any,
) -> Float[Tensor, "batch heads N V"]:
    """Uses the method's output in `heads`, the exact one in the others."""
    if heads is None or isinstance(method, Exact):
        return method(*inputs, **options)
    output = Exact()(*inputs, **options)
    if not heads:
        return output
    chosen = torch.tensor(sorted(set(heads)), device=output.device)
    mask = options["attn_mask"]
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        options["attn_mask"] = mask.index_select(-3, chosen)
    part = method(*(x.index_select(1, chosen) for x in inputs), **options)
    return output.index_copy(1, chosen, part.to(output.dtype))
