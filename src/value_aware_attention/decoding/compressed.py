"""Compresses the key-value caches of a model right after each prefill."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import signature
from threading import current_thread
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateOutput
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from value_aware_attention.arguments import check_keep, described
from value_aware_attention.attention import AttentionState
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.call import uncompiled
from value_aware_attention.decoding.filling import (
    Choices,
    CompressedCaches,
    Context,
    Filling,
    Prompt,
)
from value_aware_attention.decoding.kept_layer import KeptLayer
from value_aware_attention.decoding.refusals import (
    cache_argument,
    check_continued,
    check_decoder,
    check_inputs,
    check_layer,
    check_unchanged,
    refuse_assistance,
    warning_of_padding,
)
from value_aware_attention.hugging_face.attending import OWN, repeated, set_implementation
from value_aware_attention.hugging_face.contexts import named_attention
from value_aware_attention.hugging_face.layers import attention_layers, check_call, layer_kernel
from value_aware_attention.hugging_face.masks import split_mask
from value_aware_attention.hugging_face.traits import traits_of

IMPLEMENTATIONS = ("eager", "sdpa", OWN)
"""Attention functions with supported masks"""
FUSED = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention functions that compute the same with other mask formats; "sdpa" replaces them"""


@contextmanager
def compressed_cache(
    model: PreTrainedModel,
    method: Callable[[int], CacheMethod],
    *,
    keep: float,
    bits: int | None = None,
    mean_slot: bool = False,
    observed: str = "continued",
    rows: int | None = None,
    sinks: int = 2,
    recent: int = 4,
    every: int | None = None,
    pool: str | None = "model",
    floor: int = 0,
    seed: int = 0,
) -> Iterator[CompressedCaches]:
    """Compresses every cache that `model` fills from empty within the context after its prefill.

        with compressed_cache(model, caches.LeaveOneOut, keep=1 / 4) as report:
            model.generate(**inputs, max_new_tokens=200)
        print(report)

    The prompt's queries attend exactly. Then each key-value head keeps the r = keep * tokens keys
    (padding not counted) that `method(r)` chooses; later tokens see these and all later keys.
    Without `bits` and `mean_slot`, logits equal those of one pass of `caches.AfterPrefix` with the
    same options, and gradients flow. A cache can be read and copied only within the context;
    `save_compressed` writes it to a file. If none was read or saved, a warning says that a single
    pass is exact. docs/decoding.md explains the rest, and lists what is refused.

    Args:
        model: A causal transformers model.
        method: Builds the cache method for r keys, such as the class `caches.ValueAware`.
        keep: Share of a text's keys that a head keeps, above 0 and at most 1; or r, an integer
            >= 2. Sinks and recent keys stay beyond it; for a whole prompt a warning says so.
        bits: 8 rounds kept keys and values to int8. Not with `every` or gradients.
        mean_slot: One of r slots is the mean of what a head dropped. Not with `every` or refits.
        observed: Which queries choose the keys: "last", "causal", "noncausal" or "continued".
        rows: Most observed queries per head, few with a `pool` warn; None: 32, "continued" all.
        sinks: First keys of the prompt that are always kept, included in r.
        recent: Last keys of the prompt that are always kept, included in r.
        every: Number of later tokens after which r keys are chosen again; not with "continued".
        pool: Heads that share a budget of keys: "layer" or "model". None: each head keeps r.
        floor: Least number of keys per head with `pool`.
        seed: Draws the observed queries, one in each of `rows` equal strides.
    """
    options = {"observed": observed, "rows": rows, "sinks": sinks, "recent": recent}
    options |= {"every": every, "pool": pool, "floor": floor, "seed": seed}
    asked = Choices(method, check_keep(keep), options, bits, mean_slot)
    with Compression(model, asked).opened() as report:
        yield report


class Compression(Context):
    """Computes the attention of a model, and compresses the caches that it fills."""

    def __init__(self, model: PreTrainedModel, asked: Choices | str) -> None:
        check_decoder(model)
        super().__init__(
            model,
            asked,
            {module: number for number, module in enumerate(attention_layers(model))},
            traits_of(model),
        )
        attention = model.config._attn_implementation
        self.attention = "sdpa" if attention in FUSED else attention
        self.report = CompressedCaches()
        self.thread = current_thread()
        self.kernel = cache(layer_kernel)
        # The last call over kept keys, the later keys that it sees, its mask and options
        self.last: tuple[tuple[object, ...], Tensor | None, object] | None = None

    @contextmanager
    def opened(self) -> Iterator[CompressedCaches]:
        """Replaces the model's attention by this object's within the context."""
        with ExitStack() as restored:
            name = restored.enter_context(named_attention(self.model, alone=True))
            if self.attention not in IMPLEMENTATIONS:
                raise ValueError(
                    f"the model's attention is {self.attention!r}; compressed_cache reads the "
                    f"masks of {' and '.join(IMPLEMENTATIONS)}: "
                    f"model.set_attn_implementation('sdpa')"
                )
            AttentionInterface.register(name, self.attend)
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[self.attention])
            self._follow(restored)
            set_implementation(self.model, name)
            yield self.report
            self.report.warn_of_unread()

    def _follow(self, restored: ExitStack) -> None:
        """Tracks the caches of the model's calls until the context is restored."""
        for module in self.numbers:
            restored.callback(
                module.register_forward_pre_hook(
                    partial(self._see_cache, str(cache_argument(module))), with_kwargs=True
                ).remove
            )
        for module in (self.model.base_model, self.model):  # some models bypass the first
            restored.callback(module.register_forward_hook(self._end_pass).remove)
            restored.callback(
                module.register_forward_pre_hook(check_inputs, with_kwargs=True).remove
            )
        for name, function in (
            ("_prefill", self._prefill),
            ("_prepare_attention_mask_for_generation", warning_of_padding),
            ("_get_candidate_generator", refuse_assistance),
        ):
            if hasattr(self.model, name):
                setattr(self.model, name, partial(function, getattr(self.model, name)))
                restored.callback(delattr, self.model, name)
        restored.callback(setattr, self, "filling", None)

    @uncompiled
    def _see_cache(
        self, name: str, module: nn.Module, _: tuple[object, ...], options: dict[str, object]
    ) -> None:
        """Starts a filling at the first layer that is called with a cache."""
        cache = options.get(name)
        if self.filling is not None and self.filling.cache is cache and not self.filling.prompts:
            return  # a later layer of a pass over kept keys
        if current_thread() is not self.thread:
            raise ValueError(
                "another thread has opened this compressed_cache: open it in the thread that "
                "generates, or make a copy of the model for each"
            )
        if cache is None and any(
            module.training and getattr(module, "gradient_checkpointing", False)
            for module in self.model.modules()
        ):
            raise ValueError(
                "gradient checkpointing takes the cache from the layers of a model in training "
                "mode: model.eval(), or train without it"
            )
        if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
            kind = "an offloaded cache" if isinstance(cache, Cache) else described(cache)
            raise ValueError(
                f"past_key_values is {kind}; within compressed_cache a model must be called with "
                f"use_cache=True, and with a DynamicCache or none"
            )
        filling = self.filling
        if (
            filling is None
            or filling.cache is not cache
            or (module.layer_idx in filling.prompts and not self.is_chunked)  # interrupted
        ):
            self.filling = Filling(self, cache)

    def _prefill(
        self, prefill: Callable[..., object], *inputs: object, **options: object
    ) -> object:
        """Reads a prompt like `generate`; a prompt in chunks is compressed at its end."""
        arguments = signature(prefill).bind(*inputs, **options).arguments
        check_continued(**arguments)
        self.is_chunked = arguments["generation_config"].prefill_chunk_size is not None
        try:
            outputs = prefill(*inputs, **options)
        finally:
            was_chunked, self.is_chunked = self.is_chunked, False
        if was_chunked:
            self._end_pass()
        return outputs

    @uncompiled
    def _end_pass(self, *_: object) -> None:
        """Reports the cache that the pass filled, if any, and frees what was read."""
        if self.is_chunked:
            return
        if self.filling is not None and self.filling.prompts:
            self.report.caches.append(self.filling.finished())
        self.filling = self.last = None

    @uncompiled
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention with the signature of transformers."""
        if module not in self.numbers:
            raise ValueError(
                f"another {type(module).__name__} reads the config of the model in this "
                f"compressed_cache: give each model a config of its own"
            )
        assert self.filling is not None  # set by `_see_cache` before the module runs
        place = cast(int, module.layer_idx)
        layer = self.filling.cache.layers[place]
        kernel = self.kernel(module, scaling)
        if isinstance(layer, KeptLayer) and layer.is_filled:
            check_unchanged(module, layer, key, value)
            # Objects are compared by identity; the third entry keeps them from being freed.
            call = layer.later, dropout, id(attention_mask), *options, *map(id, options.values())
            if self.last is None or self.last[0] != call:  # else another layer of this pass did it
                check_call(dropout, options)
                mask = None if attention_mask is None else attention_mask[..., -layer.later :]
                visible, _ = split_mask(mask, query, key[:, :, layer.slots :], is_causal=True)
                self.last = call, visible, (attention_mask, options)
            return layer.serve(query, kernel, self.last[1]).transpose(1, 2).contiguous(), None
        outputs, state = _attention_and_state(
            _attention_of(module, self.attention), module, query, key, value, attention_mask,
            scaling=scaling, dropout=dropout, **options,
        )  # fmt: skip
        if not isinstance(layer, DynamicSlidingWindowLayer):
            check_call(dropout, options)
            check_layer(module, layer, key, value, options.get("sliding_window"))
            self.filling.prompts.setdefault(place, Prompt(self, module, kernel)).read(
                query, key, attention_mask, state
            )
            if not self.is_chunked:
                self.filling.observe(place)
        return outputs


def _attention_of(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns the attention function that the module's own code finds under this name."""
    eager = (
        getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        for kind in type(module).__mro__
    )
    return ALL_ATTENTION_FUNCTIONS.get(name, next(filter(None, eager), None))


def _attention_and_state(
    function: Callable[..., tuple[Tensor, Tensor | None]], module: nn.Module, query: Tensor,
    key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None, dropout: float,
    **options: Any,
) -> tuple[tuple[Tensor, Tensor | None], AttentionState | None]:  # fmt: skip
    """Calls an attention function of transformers; also returns each query's state over its past.

    PyTorch's fused attention on a CPU returns the log of its normaliser, which the function drops.
    The state is None where that kernel does not compute the call: on other devices, below fp32,
    with a mask or gradients, for parts of a prompt and for other attention functions.
    """
    tensors = (query, key, value)
    if (
        function is not sdpa_attention_forward
        or mask is not None
        or not getattr(module, "is_causal", False)
        or options.get("is_causal") is False
        or query.shape[2] != key.shape[2]
        or len({x.shape[-1] for x in tensors}) > 1
        or any(x.device.type != "cpu" or x.dtype != torch.float32 for x in tensors)
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        or torch.is_autocast_enabled("cpu")
    ):
        return (
            function(module, query, key, value, mask, scaling=scaling, dropout=dropout, **options),
            None,
        )
    check_call(dropout, options)
    output, log_total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, *repeated(query, key, value), 0.0, True, scale=scaling
    )
    log_total = log_total[..., None]
    state = AttentionState(output, torch.ones_like(log_total), log_total)
    return (output.transpose(1, 2).contiguous(), None), state


class CompressedGeneration:
    """Generates with compressed caches: `model.generate(..., custom_generate=this)`.

    The arguments are those of `compressed_cache`; `report` lists the caches of all calls.
    """

    def __init__(
        self, method: Callable[[int], CacheMethod], *, keep: float, **options: Any
    ) -> None:
        self.open = lambda model: compressed_cache(model, method, keep=keep, **options)
        self.report = CompressedCaches()

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, *, generation_config: GenerationConfig,
        **model_kwargs: object,
    ) -> Tensor | GenerateOutput:  # fmt: skip
        """Decodes like `generate` with this config."""
        mode = GENERATION_MODES_MAPPING[generation_config.get_generation_mode()]
        if not hasattr(model, mode):
            raise ValueError(
                f"generation by {mode} is code of the hub; CompressedGeneration decodes greedily, "
                f"by sampling or with beams"
            )
        with self.open(model) as report:
            outputs = getattr(model, mode)(
                input_ids, generation_config=generation_config, **model_kwargs
            )
        self.report.caches += report.caches
        return outputs
