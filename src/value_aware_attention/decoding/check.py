"""Compares a compressed cache's logits with one pass over the keys it says it kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from math import inf

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from value_aware_attention.arguments import described
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.call import Arguments
from value_aware_attention.decoding.after_prefix import AfterPrefix, Given
from value_aware_attention.hugging_face.adapter import replace_attention
from value_aware_attention.hugging_face.layers import attention_layers

Reader = Callable[[Int[Tensor, "B 1"], int], Float[Tensor, "B 1 E"]]
"""(a token of each text, their position) -> the logits of the next tokens"""


@dataclass(frozen=True)
class CacheCheck:
    """Holds the differences between a cache's logits and those of one pass over the kept keys.

    Attributes:
        differences: Largest difference of a logit, relative to the largest logit, by text and later
            token.
    """

    prefix: int
    differences: Float[Tensor, "B N"]
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Returns whether no logit differs by more than the tolerance."""
        return self.first is None

    @property
    def first(self) -> int | None:
        """Returns the first position where a text's logits differ; None if there is none."""
        departs = ~(self.differences <= self.tolerance).all(dim=0)  # NaN differs too
        return self.prefix + int(departs.int().argmax()) if departs.any() else None

    def __str__(self) -> str:
        count, largest = self.differences.shape[1], self.differences.max()
        if self.first is None:
            return f"equal over {count} tokens: logits differ by {largest:.1e} of the largest"
        at = self.first - self.prefix
        texts = (~(self.differences[:, at] <= self.tolerance)).nonzero()[:, 0].tolist()
        before = f"; those before by {self.differences[:, :at].max():.1e}" if at else ""
        return (
            f"departs at position {self.first}, {at} tokens after the prefix, in texts {texts}: "
            f"logits differ by {self.differences[:, at].max():.1e} of the largest{before}"
        )


def _check_kept(model: PreTrainedModel, kept: Sequence[object], texts: int, prefix: int) -> None:
    """Raises ValueError for choices that do not fit this model and these texts."""
    layers = len(attention_layers(model))
    if len(kept) != layers:
        raise ValueError(f"kept has {len(kept)} layers; the model has {layers}")
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for layer, choice in enumerate(kept):
        indices, weight = (getattr(choice, name, None) for name in ("indices", "log_weight"))
        if not (isinstance(indices, Tensor) and isinstance(weight, Tensor)):
            raise ValueError(f"kept[{layer}] is {described(choice)}; it must be a caches.KeptKeys")
        slots = indices.shape[-1] if indices.ndim else 0
        fits = slots and indices.numel() == texts * heads * slots and weight.shape == indices.shape
        if not fits or indices.is_floating_point():
            raise ValueError(
                f"kept[{layer}] has {indices.dtype} indices {tuple(indices.shape)} and log-weights "
                f"{tuple(weight.shape)}; both must be ({texts}, {heads}, slots), with integer "
                f"indices and at least one slot"
            )
        if indices.min() < 0 or indices.max() >= prefix or not (weight < inf).all():
            raise ValueError(
                f"kept[{layer}] has indices {indices.min()} to {indices.max()}; they must be 0 to "
                f"{prefix - 1}, and log-weights must be numbers below infinity"
            )
        value = getattr(choice, "value", None)
        if value is not None and (value.shape[:-1] != indices.shape or not value.isfinite().all()):
            raise ValueError(
                f"kept[{layer}] has values {tuple(value.shape)}; they must be finite and "
                f"{(*indices.shape, 'head size')}"
            )


def _inputs(
    model: PreTrainedModel, input_ids: Int[Tensor, "B T"], attention_mask: Tensor | None
) -> Arguments:
    """Returns the inputs of one pass, with the same positions as in `generate`."""
    inputs: Arguments = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is None:
        return inputs
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}; it must be that of "
            f"input_ids, {tuple(input_ids.shape)}"
        )
    inputs["attention_mask"] = attention_mask
    if "position_ids" in signature(model.forward).parameters:
        inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return inputs


def _read(
    model: PreTrainedModel,
    cache: Cache | Reader,
    token: Int[Tensor, "B 1"],
    position: int,
    width: int,
) -> Float[Tensor, "B 1 E"]:
    """Reads one token of each text with a cache; ValueError for logits of another shape."""
    if isinstance(cache, Cache):
        return model(input_ids=token, past_key_values=cache, use_cache=True).logits
    logits, shape = cache(token, position), (len(token), 1, width)
    if not isinstance(logits, Tensor) or logits.shape != shape:
        returned = tuple(logits.shape) if isinstance(logits, Tensor) else described(logits)
        raise ValueError(f"the function returned {returned}; it must return logits {shape}")
    return logits


@torch.no_grad()
def check_cache(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B T"],
    kept: Sequence[KeptKeys],
    cache: Cache | Reader,
    *,
    prefix: int,
    attention_mask: Int[Tensor, "B T"] | None = None,
    tolerance: float = 1e-4,
) -> CacheCheck:
    """Compares a compressed cache of any kind with one exact pass over the keys it says it kept.

    `kept` has a `caches.KeptKeys` (B, H, R) for each layer: positions in the prefix, log-weights
    (0 = unchanged) and, if changed, values. `cache` is a Cache with the prefix of all texts; the
    model reads the later tokens with it one by one, which fills it. For other code, `cache` is a
    function from a token of each text and its position to the logits. The reference is one pass of
    `caches.AfterPrefix`, which hides all other keys of the prefix from later queries.

    Shifted positions, lost biases, a wrong mask and dropped later keys all show as a difference
    from the faulty position on. Raises ValueError for a prefix without later tokens, for choices
    that do not fit the model's layers, heads and texts, and for a Cache with padded texts, because
    only its own code knows where padding is.
    """
    if input_ids.ndim != 2 or not 1 <= prefix < input_ids.shape[1]:
        raise ValueError(
            f"prefix is {prefix} and input_ids has the shape {tuple(input_ids.shape)}; it must be "
            f"(texts, tokens), with tokens after the prefix"
        )
    _check_kept(model, kept, len(input_ids), prefix)
    inputs = _inputs(model, input_ids, attention_mask)
    if isinstance(cache, Cache) and attention_mask is not None and not attention_mask.all():
        raise ValueError("texts have padding; give a function that places their tokens")
    served = [AfterPrefix(Given(layer), prefix=prefix, sinks=0, recent=0) for layer in kept]
    with replace_attention(model, served.__getitem__):
        expected = model(**inputs).logits[:, prefix:].float()

    logits = [
        _read(model, cache, input_ids[:, at : at + 1], at, expected.shape[-1]).float()
        for at in range(prefix, input_ids.shape[1])
    ]
    apart = (torch.cat(logits, dim=1) - expected).abs().amax(dim=-1)
    largest = expected.abs().amax(dim=-1).clamp_min(torch.finfo(expected.dtype).tiny)
    return CacheCheck(prefix, apart / largest, tolerance)
