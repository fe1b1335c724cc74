"""Replaces the attention of a trained Hugging Face model by an approximation, and restores it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from value_aware_attention.approximations import Exact
from value_aware_attention.hugging_face.attending import method_of
from value_aware_attention.hugging_face.contexts import attending_by
from value_aware_attention.hugging_face.layers import (
    attention_layers,
    check_heads,
    check_methods,
    check_model,
    chosen_layers,
    cross_attention_layers,
)
from value_aware_attention.hugging_face.sharing import (
    FirstReadings,
    SharedKeys,
    check_pooled,
    shares_keys,
)
from value_aware_attention.hugging_face.traits import traits_of
from value_aware_attention.kernels import Kernel, check_kernel


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

    Attention to another sequence stays exact. `caches.AfterPrefix` gets unrepeated key-value heads,
    so that a group of query heads keeps one set, and the layer's projection and rotation (to find
    these, the model reads six tokens twice at the first use). Other methods get repeated heads, and
    past keys as the model does. The model is restored after exceptions too. Contexts of one thread
    can be nested; the innermost one is active.

    Raises ValueError for a model without transformers' attention interface, and for a model whose
    attention another thread has replaced (threads share the config, where transformers reads it).
    Also raises it for options that approximations do not support: logit soft-capping, attention
    sinks, position bias, attention dropout, output_attentions, a non-causal method in a causal
    model.

    Args:
        model: A transformers model in evaluation mode, changed in place and then restored.
        approximation: One method for all layers, or a function from a layer's number (its index in
            `attention_layers`) to its method.
        kernel: Similarity kernel of the replaced attention. None: the attention module's `kernel`
            if it has one, else the exponential kernel with the model's scaling.
        layers: Numbers of the layers whose attention is replaced. None: all.
        heads: Numbers of the query heads whose attention is replaced. None: all.
    """
    check_model(model)
    if kernel is not None:
        check_kernel(kernel)
    numbers = chosen_layers(model, layers)
    methods = {module: method_of(approximation, number) for module, number in numbers.items()}
    check_methods(model, methods)
    check_heads(heads, getattr(model.config, "num_attention_heads", None))
    check_pooled(list(methods.values()), len(attention_layers(model)), heads)
    first = FirstReadings(methods.values())
    attending = _attending(model, methods, numbers, first)
    with first.before_each_call(model), attending_by(model, attending, kernel, heads):
        yield model


def _attending(
    model: PreTrainedModel,
    methods: Mapping[nn.Module, nn.Module],
    numbers: Mapping[nn.Module, int],
    first: FirstReadings,
) -> dict[nn.Module, Callable[..., Tensor]]:
    """Returns the attention function of each module of a model."""
    attending: dict[nn.Module, Callable[..., Tensor]] = dict.fromkeys(
        (*attention_layers(model), *cross_attention_layers(model)), Exact()
    )
    for layer, method in methods.items():
        attending[layer] = (
            SharedKeys(method, layer, numbers[layer], traits_of(model)[layer], first)
            if shares_keys(method)
            else method
        )
    return attending
