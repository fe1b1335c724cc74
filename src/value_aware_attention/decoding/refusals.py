"""Checks the inputs of a compressed cache: raises errors and issues warnings."""

import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from value_aware_attention.approximations import Exact
from value_aware_attention.call import Arguments, uncompiled
from value_aware_attention.decoding.kept_layer import KeptLayer
from value_aware_attention.hugging_face.layers import (
    attends_causally,
    attention_layers,
    check_model,
    cross_attention_layers,
)


@uncompiled
def check_inputs(model: nn.Module, inputs: tuple[object, ...], options: dict[str, object]) -> None:
    """Raises ValueError unless a call fits its cache: as many texts, a mask with all columns.

    A call that was interrupted leaves layers that have read different numbers of tokens.

    A mask has one column per token of the cache and the call: transformers extends a shorter one
    with hidden tokens, and so hides new ones.
    """
    arguments = signature(model.forward).bind_partial(*inputs, **options).arguments
    mask, cache = (arguments.get(name) for name in ("attention_mask", "past_key_values"))
    tensors = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    tokens: Any = next((x for x in tensors if isinstance(x, Tensor)), mask)
    layers: Any = cache.layers if isinstance(cache, Cache) and isinstance(tokens, Tensor) else ()
    tracked = [x for x in layers if isinstance(x, (KeptLayer, DynamicSlidingWindowLayer))]
    if len({layer.get_seq_length() for layer in tracked}) > 1:
        raise ValueError(
            "a call that was interrupted has left this cache half read; give a new one"
        )
    for layer in tracked:
        if isinstance(layer, KeptLayer) and layer.is_filled and len(layer.counts) != len(tokens):
            raise ValueError(
                f"the cache holds {len(layer.counts)} texts and the call brings {len(tokens)}; "
                f"cache.batch_repeat_interleave(n) repeats each text of a cache n times"
            )
    if not isinstance(mask, Tensor) or getattr(cache, "is_compileable", False):
        return  # masks of a static cache, refused later, have its full length
    before, length = cache.get_seq_length() if isinstance(cache, Cache) else 0, tokens.shape[1]
    if mask.shape[-1] != before + length:
        raise ValueError(
            f"attention_mask has {mask.shape[-1]} columns; the cache has seen {before} tokens, "
            f"kept or not, and the call brings {length}, so it must have {before + length}"
        )
    if mask.device != tokens.device:
        raise ValueError(f"attention_mask is on {mask.device}; the tokens are on {tokens.device}")


def check_continued(
    input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: Arguments, **_: object
) -> None:
    """Raises ValueError for a cache that `generate` would continue at a wrong position.

    Valid inputs are the whole text with a mask of its length, or the new tokens with a mask of all.
    If the cache already has the whole text, transformers would read it again after itself.
    """
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    before = cache.get_seq_length() if isinstance(cache, Cache) else 0
    columns = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    tokens = input_ids.shape[1]
    if before and not (before < tokens == columns or columns in (-1, before + tokens)):
        raise ValueError(
            f"the cache has seen {before} tokens, kept or not; generate got {tokens} with an "
            f"attention_mask of {columns} columns: give it the whole text, longer than what was "
            f"seen, or the new tokens with a mask of all, {before + tokens} columns"
        )


def check_decoder(model: PreTrainedModel) -> None:
    check_model(model)
    layers = attention_layers(model)
    if cross_attention_layers(model) or not all(map(attends_causally, layers)):
        raise ValueError(f"{type(model).__name__} is not a decoder: only they fill caches")
    for layer in layers:
        if cache_argument(layer) is None or not hasattr(layer, "layer_idx"):
            raise ValueError(f"{type(layer).__name__} has no cache that is known here")
        trained = getattr(layer, "approximation", None)
        if trained is not None and not isinstance(trained, Exact):
            raise ValueError(
                f"the model was trained with {type(trained).__name__}; a compressed cache is read "
                f"by exact attention"
            )


def cache_argument(module: nn.Module) -> str | None:
    """Returns the name of an attention module's cache argument."""
    names = signature(module.forward).parameters
    return next((name for name in ("past_key_values", "layer_past") if name in names), None)


def check_layer(
    module: nn.Module, layer: object, key: Tensor, value: Tensor, window: object
) -> None:
    """Raises ValueError for a filled layer that cannot be compressed."""
    if not (type(layer) is DynamicLayer or isinstance(layer, KeptLayer)):
        raise ValueError(
            f"layer {module.layer_idx} caches in a {type(layer).__name__}; compressed_cache needs "
            f"the DynamicLayer of a DynamicCache"
        )
    check_unchanged(module, layer, key, value)
    if window is not None:
        raise ValueError(
            f"layer {module.layer_idx} attends within a window of {window} and its cache has none: "
            f"give DynamicCache(config=model.config), or no cache"
        )


def check_unchanged(module: nn.Module, layer: DynamicLayer, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless a module reads exactly what its cache layer holds."""
    if key is not layer.keys or value is not layer.values:
        raise ValueError(
            f"{type(module).__name__} attends to other keys or values than its cache holds; "
            f"compressed_cache cannot compress them"
        )


def warning_of_padding(
    prepare: Callable[..., Tensor], *inputs: object, **options: object
) -> Tensor:
    """Warns if `generate` treats tokens of the prompt as padding, which no query sees."""
    mask = prepare(*inputs, **options)
    if hidden := int((mask == 0).sum()):
        warnings.warn(
            f"{hidden} tokens of the prompt equal pad_token_id and are taken for padding; give "
            f"generate an attention_mask",
            stacklevel=2,
        )
    return mask


def refuse_assistance(*_: object, **__: object) -> None:
    raise ValueError(
        "assisted decoding reads the prompt together with candidates and removes them again; "
        "within compressed_cache generate without assistant_model and prompt_lookup_num_tokens"
    )
