"""Swaps the attention of a trained Hugging Face model for an approximation, and back."""

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

    Attention to another sequence stays exact. `caches.AfterPrefix` is given key-value heads as they
    are, so that a group of query heads keeps one set, and the layer's projection and rotation (the
    first time, the model reads six tokens twice to tell these); other methods get the heads
    repeated, and past keys as the model does. Exceptions too restore the model. Contexts of one
    thread nest: the innermost open one computes.

    Raises ValueError for a model without transformers' attention interface; for a model whose
    attention another thread has replaced (transformers reads it from the config, which threads
    share); and for options that no approximation can honour: logit soft-capping, attention sinks,
    position bias, attention dropout, output_attentions, a non-causal method in a causal model.

    Args:
        model: A transformers model in evaluation mode; it is changed in place and restored.
        approximation: One method for all layers, or a function from a layer's number (its place in
            `attention_layers`) to that layer's.
        kernel: Similarity kernel of the replaced attention. None: `kernel` of the attention module
            where it has one, else the exponential with the model's own scaling.
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
    """Returns what computes the attention of each module of a model."""
    layers = (*attention_layers(model), *cross_attention_layers(model))
    attending: dict[nn.Module, Callable[..., Tensor]] = dict.fromkeys(layers, Exact())
    for layer, method in methods.items():
        attending[layer] = method
        if shares_keys(method):
            traits = traits_of(model)[layer]
            attending[layer] = SharedKeys(method, layer, numbers[layer], traits, first)
    return attending
