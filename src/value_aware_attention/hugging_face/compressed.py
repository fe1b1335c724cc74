"""Compresses the key-value caches that a model fills, right after each prefill."""

import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from threading import current_thread
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from value_aware_attention.approximations import Exact
from value_aware_attention.arguments import check_at_least, check_choice, check_share, described
from value_aware_attention.call import Layer, uncompiled
from value_aware_attention.hugging_face.adapter import close, opened, unregister
from value_aware_attention.hugging_face.attending import OWN, set_implementation
from value_aware_attention.hugging_face.cache_layers import grouped, rotary_of
from value_aware_attention.hugging_face.kept_layer import GrowingLayer, KeptLayer, Slots
from value_aware_attention.hugging_face.layers import (
    attends_causally,
    attention_layers,
    check_call,
    check_model,
    cross_attention_layers,
    layer_kernel,
)
from value_aware_attention.hugging_face.masks import split_mask
from value_aware_attention.kernels import Kernel

OBSERVED = ("last", "causal", "noncausal", "continued")
"""Ways to observe that need one pass over a prompt"""
IMPLEMENTATIONS = ("eager", "sdpa", OWN)
"""Attention functions whose masks are read here"""
FUSED = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention functions that compute the same from other masks; "sdpa" stands in for them"""


@dataclass
class CompressedCache:
    """Tells what one cache kept of its prompt."""

    tokens: int
    """Length of the prompt, its padding included"""
    keys: Float[Tensor, "L H"]
    """Keys kept by layer and key-value head, the mean of the texts, each of its own tokens"""
    slots: int
    """Slots that hold the kept keys of all texts, layers and heads, unused ones included"""
    bytes_before: int
    """Of the keys and values of the prompt, in the layers that are compressed"""
    bytes_after: int
    bytes_of_queries: int
    """Of the prompt's queries that are held for later choices"""
    seconds: float
    """Time of choosing keys and of copying them, later choices included"""

    def __str__(self) -> str:
        mib, heads = 2**20, [[f"{x:6,.0f}" for x in row] for row in self.keys.tolist()]
        lines = [
            f"{self.tokens:,} tokens: {self.keys.mean():,.1f} keys a head, "
            f"{self.bytes_before / mib:.1f} MiB -> {self.bytes_after / mib:.1f} MiB "
            f"({self.bytes_after / self.bytes_before:.1%}), chosen in {self.seconds:.2f} s"
        ]
        if (self.keys != self.keys[0, 0]).any():
            lines += [f"keys of layer {n}: {' '.join(row)}" for n, row in enumerate(heads)]
        return "\n".join(lines)


@dataclass
class CompressedCaches:
    """Reports the caches that were compressed within a context, in their order."""

    caches: list[CompressedCache] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            "\n\n".join(map(str, self.caches)) or "no layer with full attention has filled a cache"
        )


@dataclass
class _Prompt:
    """Holds what one layer has read of a prompt that is not compressed yet."""

    module: nn.Module
    kernel: Kernel
    queries: list[Tensor] = field(default_factory=list)
    visible: Tensor | None = None
    """The keys that the last query sees, all but padding; None = all"""
    parts: Any = None
    """The `caches.padding.Parts` of its texts"""
    seen: list[Any] = field(default_factory=list)
    """`caches.Observed` of each part, where the model's keys are chosen together"""
    report: Any = None
    """The `CompressedCache` of the cache that this is a layer of"""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Prompt":
        return self  # a copy of a cache is of the same model


@dataclass
class _Filling:
    """Holds a prompt that is read, until its keys are chosen."""

    prompts: dict[int, _Prompt] = field(default_factory=dict)
    """By their layer's place in the cache"""
    kept: dict[int, KeptLayer] = field(default_factory=dict)
    after: dict[int, Any] = field(default_factory=dict)
    """The `caches.AfterPrefix` of texts with so many tokens"""
    bytes_before: int = 0
    seconds: float = 0.0


@contextmanager
def compressed_cache(
    model: PreTrainedModel,
    method: Callable[[int], nn.Module],
    *,
    keep: float,
    observed: str = "noncausal",
    rows: int = 32,
    sinks: int = 2,
    recent: int = 4,
    every: int | None = None,
    pool: Any = None,
    floor: int = 0,
    seed: int = 0,
) -> Iterator[CompressedCaches]:
    """Compresses every cache that `model` fills from empty within the context after its prefill.

        with compressed_cache(
            model, caches.ValueAware, keep=1 / 8, observed="continued", pool="model"
        ) as report:
            model.generate(**inputs, max_new_tokens=200)
        print(report)

    The prompt's queries attend exactly. Then each key-value head keeps `method(r)`'s choice of
    r = keep * tokens keys; later tokens see these, and all later keys. Logits are those of one pass
    of `caches.AfterPrefix` with the same options. In a padded batch each text keeps what it keeps
    alone, a share of its own tokens; one that is shorter than others keeps at least its sinks and
    recent keys. Gradients flow through the kept keys, not through the choice; a backward pass to
    refitted ones raises ValueError. Full-attention layers are compressed; sliding windows and
    recurrent layers stay as they are. A cache can be read within the context alone, and copied; it
    cannot be saved, nor can the model be copied in it.
    Where heads keep different numbers of keys, memory follows the keys that are kept. A model of
    FlexAttention or flash attention reads its prompt by "sdpa", which computes the same.

    Raises ValueError for a model that `replace_attention` refuses, for encoders and models with
    cross-attention, for other attention functions than these and "eager", within or around
    `replace_attention` or another `compressed_cache`, in the calls of another thread, and in the
    model's calls for `use_cache` False, for a cache that another context, none or an interrupted
    call has filled, for static, quantised and offloaded caches, for layers whose attention reads
    other keys than they cache, for windowed attention in a cache without windows, for assisted
    decoding, and for a prompt of which `keep` leaves fewer keys than are always kept.

    Args:
        model: A causal transformers model.
        method: Builds the cache method that keeps r keys; a class such as `caches.ValueAware` does.
        keep: Share of a text's own keys, padding apart, that a head keeps: a number above 0 and at
            most 1.
        observed: Queries by which keys are chosen: "last", "causal", "noncausal" or "continued"
            (`caches.AfterPrefix`).
        rows: Number of these queries in each head.
        sinks: First keys of the prompt that are always kept, counted in r.
        recent: Last keys of the prompt that are always kept, counted in r.
        every: Later tokens after which the method chooses r keys again. None: it chooses once.
        pool: Heads that share their keys: "layer", "model", or a `caches.CacheProfile` of a prefix
            as long as the prompt. None: every head keeps r.
        floor: Keys that every head keeps at least, with `pool`.
        seed: Draws the observed queries, one in each of `rows` equal strides.
    """
    check_choice(OBSERVED, observed=observed)
    keep = check_share(keep=keep)
    always = check_at_least(0, sinks=sinks) + check_at_least(0, recent=recent)
    check_at_least(0, floor=floor)
    made = built(method, max(1, always))
    if pool == "checked":
        raise ValueError("pool is 'checked'; a cache is filled in one pass: model, layer or None")
    if every is not None and pool is not None:
        raise ValueError(f"every is {every}; with pool keys are chosen once")
    options = {
        "observed": observed, "rows": rows, "sinks": sinks, "recent": recent, "every": every,
        "pool": pool, "floor": floor, "seed": seed,
    }  # fmt: skip
    if not hasattr(pool, "budgets"):  # a profile is of one length of the prompt
        made.after(made.r, **options | {"floor": 0})
    _check_decoder(model)
    own = model.config._attn_implementation
    own = "sdpa" if own in FUSED else own
    name = f"{OWN}_{uuid.uuid4().hex}"
    with ExitStack() as restored:
        restored.callback(close, opened(model, name, alone=True))
        if own not in IMPLEMENTATIONS:
            raise ValueError(
                f"the model's attention is {own!r}; compressed_cache reads the masks of "
                f"{' and '.join(IMPLEMENTATIONS)}: model.set_attn_implementation('sdpa')"
            )
        compression = _Compression(model, method, keep, options, own)
        AttentionInterface.register(name, compression.attend)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
        restored.callback(unregister, name)
        restored.enter_context(compression.following(model))
        set_implementation(model, name)
        yield compression.report


def _time() -> float:
    """Reads the clock when all work is done, a GPU's too."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()


def _check_decoder(model: PreTrainedModel) -> None:
    check_model(model)
    layers = attention_layers(model)
    if cross_attention_layers(model) or not all(map(attends_causally, layers)):
        raise ValueError(f"{type(model).__name__} is not a decoder: only they fill caches")
    for layer in layers:
        if _cache_argument(layer) is None or not hasattr(layer, "layer_idx"):
            raise ValueError(f"{type(layer).__name__} has no cache that is known here")
        own = getattr(layer, "approximation", None)
        if own is not None and not isinstance(own, Exact):
            raise ValueError(
                f"the model was trained with {type(own).__name__}; a compressed cache is read "
                f"by exact attention"
            )


def built(method: Callable[[int], nn.Module], r: int) -> Any:
    """Returns the cache method that `method` builds for r keys; ValueError where it builds none."""
    is_function = callable(method) and not isinstance(method, nn.Module)
    made = method(r) if is_function else None
    if not callable(getattr(made, "keep", None)):  # of `caches`, which imports this package
        raise ValueError(
            f"method is {described(method)}; it must be a function from a number of keys to a "
            f"cache method, such as caches.ValueAware"
        )
    return made


def _cache_argument(module: nn.Module) -> str | None:
    """Finds the name by which an attention module is given its cache."""
    names = signature(module.forward).parameters
    return next((name for name in ("past_key_values", "layer_past") if name in names), None)


class _Compression:
    """Serves the attention of a model, and compresses the caches that it fills."""

    def __init__(
        self,
        model: PreTrainedModel,
        method: Callable[[int], Any],
        keep: float,
        options: dict[str, Any],
        own: str,
    ) -> None:
        self.method, self.keep, self.options, self.own = method, keep, options, own
        self.model = model
        self.numbers = {module: number for number, module in enumerate(attention_layers(model))}
        self.rotary = rotary_of(model)
        self.report = CompressedCaches()
        self.thread = current_thread()
        self.is_open = self.is_reading = self.is_chunked = False
        self.cache: Any = None
        self.filling = _Filling()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Compression":
        return self  # a copy of a cache is read in the same context

    def __reduce__(self) -> Any:
        raise ValueError(
            "a compressed cache is read in its compressed_cache alone, so it cannot be saved or "
            "pickled; copy.deepcopy copies it"
        )

    @contextmanager
    def following(self, model: PreTrainedModel) -> Iterator[None]:
        """Follows the caches of the model's calls."""
        with ExitStack() as restored:
            for module in self.numbers:
                see = partial(self._see_cache, str(_cache_argument(module)))
                handle = module.register_forward_pre_hook(see, with_kwargs=True)
                restored.callback(handle.remove)
            for module in (model.base_model, model):  # some models call parts of the first
                restored.callback(module.register_forward_hook(self._end_pass).remove)
            for name, function in (
                ("_prefill", self._prefill),
                ("_prepare_attention_mask_for_generation", _warning_of_padding),
                ("_get_candidate_generator", _refuse_assistance),
            ):
                if hasattr(model, name):
                    setattr(model, name, partial(function, getattr(model, name)))
                    restored.callback(delattr, model, name)
            self.is_open = True
            restored.callback(self._close)
            yield

    def _close(self) -> None:
        self.is_open, self.cache, self.filling = False, None, _Filling()

    @uncompiled
    def _see_cache(self, name: str, module: nn.Module, _: Any, options: dict[str, Any]) -> None:
        if current_thread() is not self.thread:
            raise ValueError(
                "another thread has opened this compressed_cache: open it in the thread that "
                "generates, or make a copy of the model for each"
            )
        cache = options.get(name)
        if cache is None and any(
            part.training and getattr(part, "gradient_checkpointing", False)
            for part in self.model.modules()
        ):
            raise ValueError(
                "gradient checkpointing takes the cache from the layers of a model in training "
                "mode: model.eval(), or train without it"
            )
        if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
            given = "an offloaded cache" if isinstance(cache, Cache) else described(cache)
            raise ValueError(
                f"past_key_values is {given}; within compressed_cache a model must be called with "
                f"use_cache=True, and with a DynamicCache or none"
            )
        if cache is not self.cache:  # another one, also after a pass that was interrupted
            self.cache, self.filling = cache, _Filling()
        self.is_reading = True

    def _prefill(self, prefill: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Reads a prompt as `generate` does; one read in chunks is compressed at its end."""
        given = signature(prefill).bind(*inputs, **options).arguments
        self.is_chunked = given["generation_config"].prefill_chunk_size is not None
        try:
            found = prefill(*inputs, **options)
        finally:
            was_chunked, self.is_chunked = self.is_chunked, False
        if was_chunked and self.filling.prompts:
            for place in list(self.filling.prompts):
                self._observe(place)
            self._finish()
        return found

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
        """Computes attention as transformers calls it."""
        place: Any = module.layer_idx
        if module not in self.numbers:
            raise ValueError(
                f"another {type(module).__name__} reads the config of the model in this "
                f"compressed_cache: give each model a config of its own"
            )
        layer = self.cache.layers[place]
        kernel = layer_kernel(module, scaling)
        if isinstance(layer, KeptLayer) and layer.is_filled:
            check_call(dropout, options)
            _check_own(module, layer, key, value)
            mask = None if attention_mask is None else attention_mask[..., -layer.later :]
            visible, _ = split_mask(mask, query, key[:, :, layer.slots :], is_causal=True)
            with torch.autocast(query.device.type, enabled=False):
                output = layer.serve(query, kernel, visible)
            return output.transpose(1, 2).contiguous(), None
        found: tuple[Tensor, Tensor | None] = _attention_of(module, self.own)(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
        if isinstance(layer, DynamicSlidingWindowLayer):
            return found
        check_call(dropout, options)
        self._check_filling(module, layer, query, key, value, options.get("sliding_window"))
        prompt = self.filling.prompts.setdefault(place, _Prompt(module, kernel))
        prompt.queries.append(query.detach())
        mask, is_causal = split_mask(attention_mask, query, key, is_causal=True)
        if mask is not None and not is_causal and mask.shape[-2] > 1 and not self.is_chunked:
            raise ValueError(
                "the prompt's mask is not causal with padding alone; compressed_cache could not "
                "tell which keys later tokens see"
            )
        prompt.visible = (
            None if mask is None else mask[..., -1:, :].repeat(len(query) // len(mask), 1, 1, 1)
        )
        if not self.is_chunked:
            self._observe(place)
        return found

    def _check_filling(
        self, module: nn.Module, layer: Any, query: Tensor, key: Tensor, value: Tensor,
        window: int | None,
    ) -> None:  # fmt: skip
        """Raises ValueError for a layer that cannot be compressed once it is filled."""
        place: Any = module.layer_idx
        if type(layer) is not DynamicLayer and not isinstance(layer, KeptLayer):
            raise ValueError(
                f"layer {place} caches in a {type(layer).__name__}; compressed_cache needs the "
                f"DynamicLayer of a DynamicCache"
            )
        _check_own(module, layer, key, value)
        if window is not None:
            raise ValueError(
                f"layer {place} attends within a window of {window} and its cache has none: give "
                f"DynamicCache(config=model.config), or no cache"
            )
        earlier = key.shape[2] - query.shape[2]
        if place in self.filling.prompts and not earlier:  # of a pass that was interrupted
            self.filling = _Filling()
        if earlier and not (self.is_chunked and place in self.filling.prompts):
            raise ValueError(
                f"the cache holds {earlier} tokens that were not compressed; within "
                f"compressed_cache a model must fill its cache from empty, and a new one after a "
                f"call that was interrupted"
            )

    def _observe(self, place: int) -> None:
        """Chooses a layer's keys, or observes it where the model's are chosen together."""
        begun, prompt, layer = _time(), self.filling.prompts[place], self.cache.layers[place]
        number, tokens = self.numbers[prompt.module], layer.keys.shape[2]
        query = prompt.queries[0] if len(prompt.queries) == 1 else torch.cat(prompt.queries, dim=2)
        prompt.queries.clear()
        lengths = [tokens]
        if prompt.visible is not None:  # what a model computes for padding may be NaN
            is_token = prompt.visible.mT
            query, layer.keys, layer.values = (
                x.where(is_token, 0.0) for x in (query, layer.keys, layer.values)
            )
            lengths = prompt.visible.sum(dim=-1).flatten().tolist()
        if not self.filling.after:
            self.filling.after = self._after(lengths)
        after = next(iter(self.filling.after.values()))
        with torch.autocast(query.device.type, enabled=False):
            prompt.parts, each = after.parted(
                start=tokens,
                **grouped(
                    prompt.module, Layer(number=number, rotary=self.rotary),
                    query, layer.keys, layer.values,
                    kernel=prompt.kernel, attn_mask=prompt.visible, is_causal=True,
                ),
            )  # fmt: skip
            seen = [self.filling.after[text.keys].observe_part(text, *pool) for text, *pool in each]
            if after.pool == "model":
                prompt.seen = seen
            else:
                kept = [self.filling.after[text.keys].chosen(text, number) for text in seen]
                self._replace(place, prompt.parts.joined(kept), query)
        self.filling.seconds += _time() - begun

    def _after(self, lengths: Sequence[int]) -> dict[int, Any]:
        """Returns what compresses texts of a prompt, by their number of tokens.

        A text that is shorter than others keeps what is always kept, if that is more.
        """
        options = self.options | {"every": None}
        sinks, recent, every = (self.options[name] for name in ("sinks", "recent", "every"))
        always, longest = max(1, sinks + recent), max(lengths)
        r = round(self.keep * longest)
        if r < max(1, always if every else min(always, longest)):
            hint = (
                "; generate(guidance_scale=...) reads such a prompt too, unless it is given "
                "negative_prompt_ids"
            ) * (longest == 1) or f"; with every, r must be at least {always}" * (r == longest)
            raise ValueError(
                f"keep is {self.keep:g}, which leaves {r} of the prompt's {longest} tokens; "
                f"{sinks} sinks and {recent} recent keys are always kept{hint}"
            )
        share = {n: max(round(self.keep * n), min(always, n)) for n in lengths if n}
        return {
            n: self.method(r).after(
                n, **options | {"floor": min(options["floor"], longest if n == longest else r)}
            )
            for n, r in share.items()
        }

    def _replace(self, place: int, kept: Any, query: Any = None) -> None:
        """Lets the cache hold the kept keys in the place of a layer."""
        layer, every = self.cache.layers[place], self.options["every"]
        key, value = layer.keys, layer.values
        self.filling.bytes_before += key.nbytes + value.nbytes
        if every is None:
            held = KeptLayer(Slots.of(kept, key, value), key.shape[2], self._is_read)
        else:
            prompt = self.filling.prompts[place]
            held = GrowingLayer(
                kept, key, value, self._is_read, every=every, query=query, visible=prompt.visible,
                choose=partial(self._choose_again, prompt),
                rows=self.options["rows"] if self.options["observed"] == "last" else None,
            )  # fmt: skip
        self.filling.kept[place] = self.cache.layers[place] = held

    def _is_read(self) -> bool:
        """Tells whether the context's model reads, in its context."""
        return self.is_open and self.is_reading

    def _choose_again(
        self, prompt: _Prompt, share: Tensor, pool: Tensor, query: Tensor, key: Tensor,
        value: Tensor, visible: Tensor | None,
    ) -> Any:  # fmt: skip
        """Lets a method choose among a pool of keys before the next token is read."""
        begun, tokens = _time(), key.shape[2]
        layer = Layer(number=self.numbers[prompt.module], rotary=self.rotary)
        share = share.clamp_min(max(1, self.options["sinks"] + self.options["recent"]))
        shares = share.unique().tolist()
        after = {r: self.method(r).after(tokens, **self.options) for r in shares}
        with torch.autocast(query.device.type, enabled=False):
            parts, each = after[shares[0]].parted(
                pool=pool,
                share=share,
                **grouped(
                    prompt.module, layer, query, key, value, kernel=prompt.kernel,
                    attn_mask=visible, is_causal=True,
                ),
            )  # fmt: skip
            of_each = zip(parts.of_first(share), each, strict=True)
            kept = parts.joined([after[r].kept(*part) for r, part in of_each])
        prompt.report.seconds += _time() - begun
        return kept

    @uncompiled
    def _end_pass(self, *_: Any) -> None:
        self.is_reading = False
        if self.filling.prompts and not self.is_chunked:
            self._finish()

    def _finish(self) -> None:
        """Chooses the model's keys where they are chosen together, and reports what was kept."""
        begun = _time()
        if self.options["pool"] == "model":
            prompts = list(self.filling.prompts.values())
            with torch.autocast(prompts[0].parts.is_token.device.type, enabled=False):
                kept = [
                    self.filling.after[seen[0].keys].alternatives(seen)[0]
                    for seen in zip(*(prompt.seen for prompt in prompts), strict=True)
                ]
            for number, (place, prompt) in enumerate(self.filling.prompts.items()):
                self._replace(place, prompt.parts.joined([choice[number] for choice in kept]))
                prompt.seen = []
        layers: list[Any] = list(self.filling.kept.values())
        report = CompressedCache(
            tokens=layers[0].prefix,
            keys=torch.stack([layer.counts.float().mean(dim=0).cpu() for layer in layers]),
            slots=sum(layer.held for layer in layers),
            bytes_before=self.filling.bytes_before,
            bytes_after=sum(layer.nbytes for layer in layers),
            bytes_of_queries=sum(x.query.nbytes for x in layers if isinstance(x, GrowingLayer)),
            seconds=self.filling.seconds + _time() - begun,
        )
        self.report.caches.append(report)
        for prompt in self.filling.prompts.values():
            prompt.report = report
        self.filling = _Filling()


def _check_own(module: nn.Module, layer: Any, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless a module reads just what its layer of the cache holds."""
    if key is not layer.keys or value is not layer.values:
        raise ValueError(
            f"{type(module).__name__} attends to other keys or values than its cache holds; "
            f"compressed_cache cannot compress them"
        )


def _attention_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """Returns the attention function of this name, as the module's own code finds it."""
    homes = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    eager = (getattr(home, "eager_attention_forward", None) for home in homes)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get(name, next(filter(None, eager), None))
    return found


def _warning_of_padding(prepare: Callable[..., Tensor], *inputs: Any, **options: Any) -> Tensor:
    """Warns where `generate` takes tokens of the prompt for padding, which no query sees."""
    mask = prepare(*inputs, **options)
    if hidden := int((mask == 0).sum()):
        warnings.warn(
            f"{hidden} tokens of the prompt equal pad_token_id and are taken for padding; give "
            f"generate an attention_mask",
            stacklevel=2,
        )
    return mask


def _refuse_assistance(*_: Any, **__: Any) -> None:
    raise ValueError(
        "assisted decoding reads the prompt together with candidates and removes them again; "
        "within compressed_cache generate without assistant_model and prompt_lookup_num_tokens"
    )


class CompressedGeneration:
    """Generates with compressed caches: `model.generate(..., custom_generate=this)`.

    The arguments are those of `compressed_cache`; `report` has the caches of all calls.
    """

    def __init__(self, method: Callable[[int], nn.Module], *, keep: float, **options: Any) -> None:
        self.open = lambda model: compressed_cache(model, method, keep=keep, **options)
        self.report = CompressedCaches()

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, *, generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Decodes as `generate` would with this config."""
        mode = GENERATION_MODES_MAPPING[generation_config.get_generation_mode()]
        if not hasattr(model, mode):
            raise ValueError(
                f"generation by {mode} is code of the hub; CompressedGeneration decodes greedily, "
                f"by sampling or with beams"
            )
        with self.open(model) as report:
            found = getattr(model, mode)(
                input_ids, generation_config=generation_config, **model_kwargs
            )
        self.report.caches += report.caches
        return found
