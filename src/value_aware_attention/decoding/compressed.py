"""Compresses the key-value caches that a model fills, right after each prefill."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from threading import current_thread
from time import perf_counter
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateOutput
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from value_aware_attention.approximations import Exact
from value_aware_attention.arguments import check_at_least, check_choice, check_share, described
from value_aware_attention.caches.budgets import Ranking
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import KeptKeys, Observed
from value_aware_attention.call import Arguments, Layer, uncompiled
from value_aware_attention.decoding.after_prefix import AfterPrefix
from value_aware_attention.decoding.kept_layer import GrowingLayer, KeptLayer, Slots, filled
from value_aware_attention.decoding.padding import Parts
from value_aware_attention.hugging_face.adapter import named_attention, traits_of
from value_aware_attention.hugging_face.attending import OWN, set_implementation
from value_aware_attention.hugging_face.cache_layers import grouped
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
    layers: list[int]
    """Numbers of the layers that are compressed, as `attention_layers` has them"""
    bytes_of_others: int
    """Of the keys and values in layers with windows, which stay as they are"""
    was_read: bool = False
    """Whether any token was read over the kept keys"""

    def __str__(self) -> str:
        mib, heads = 2**20, [[f"{x:6,.0f}" for x in row] for row in self.keys.tolist()]
        lines = [
            f"{self.tokens:,} tokens: {self.keys.mean():,.1f} keys a head, "
            f"{self.bytes_before / mib:.1f} MiB -> {self.bytes_after / mib:.1f} MiB "
            f"({self.bytes_after / self.bytes_before:.1%}), chosen in {self.seconds:.2f} s"
        ]
        if self.bytes_of_others:
            others = f"{self.bytes_of_others / mib:.1f} MiB in layers with windows"
            lines.append(f"{len(self.layers)} layers are compressed; {others} stay as they are")
        if not self.was_read:
            lines.append("no token was read over these keys: all logits are the exact model's")
        if (self.keys != self.keys[0, 0]).any():
            rows = zip(self.layers, heads, strict=True)
            lines += [f"keys of layer {number}: {' '.join(row)}" for number, row in rows]
        return "\n".join(lines)


@dataclass
class CompressedCaches:
    """Reports the caches that were compressed within a context, in their order."""

    caches: list[CompressedCache] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            "\n\n".join(map(str, self.caches)) or "no layer with full attention has filled a cache"
        )

    def warn_of_unread(self) -> None:
        """Warns where the model gave the logits of a prompt, and no other, after a compression."""
        if unread := sum(not cache.was_read for cache in self.caches):
            warnings.warn(
                f"no token was read over {unread} of {len(self.caches)} compressed caches, so all "
                f"logits are the exact model's: read the context first, then the rest with "
                f"past_key_values, as hugging_face.logits_after does",
                stacklevel=2,
            )


@contextmanager
def compressed_cache(
    model: PreTrainedModel,
    method: Callable[[int], CacheMethod],
    *,
    keep: float,
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

    The prompt's queries attend exactly. Then each key-value head keeps `method(r)`'s choice of
    r = keep * tokens keys, padding apart; later tokens see these, and all later keys. Logits are
    those of one pass of `caches.AfterPrefix` with the same options, and gradients flow through the
    kept keys. A cache can be read within the context alone, and copied, not saved. A context whose
    caches nobody read ends with a warning, for one pass is exact: `logits_after` reads in two.
    docs/decoding.md says what that means for padding, windows, memory and several turns, and lists
    the models, caches and calls that raise ValueError.

    Args:
        model: A causal transformers model.
        method: Builds the cache method that keeps r keys; a class such as `caches.ValueAware` does.
        keep: Share of a text's own keys that a head keeps: above 0 and at most 1. Sinks and recent
            keys are kept where that is more; for a whole prompt so short this brings a warning.
        observed: Queries by which keys are chosen: "last", "causal", "noncausal" or "continued".
        rows: Most of these queries in each head. None: all with "continued", else 32. Few of them
            with a `pool` bring a warning: heads that they do not use lose their keys.
        sinks: First keys of the prompt that are always kept, counted in r.
        recent: Last keys of the prompt that are always kept, counted in r.
        every: Later tokens after which the method chooses r keys again, without `pool` and not by
            "continued". None: it chooses once.
        pool: Heads that share their keys: "layer" or "model". None: none.
        floor: Keys that every head keeps at least, with `pool`.
        seed: Draws the observed queries, one in each of `rows` equal strides.
    """
    options = {
        "observed": observed, "rows": rows, "sinks": sinks, "recent": recent, "every": every,
        "pool": pool, "floor": floor, "seed": seed,
    }  # fmt: skip
    with _Compression(model, _Choices(method, check_share(keep=keep), options)).opened() as report:
        yield report


def built(method: Callable[[int], CacheMethod], r: int) -> CacheMethod:
    """Returns the cache method that `method` builds for r keys; ValueError where it builds none."""
    is_function = callable(method) and not isinstance(method, nn.Module)
    cache_method = method(r) if is_function else None
    if not isinstance(cache_method, CacheMethod):
        raise ValueError(
            f"method is {described(method)}; it must be a function from a number of keys to a "
            f"cache method, such as caches.ValueAware"
        )
    return cache_method


@dataclass(frozen=True)
class _Choices:
    """Tells by which method, and how many keys, texts of any length keep."""

    method: Callable[[int], CacheMethod]
    keep: float
    options: Arguments
    """Those of `AfterPrefix`"""

    def __post_init__(self) -> None:
        for name, again, others in (
            ("observed", "repeat", ", ".join(OBSERVED)),
            ("pool", "checked", "model, layer or None"),
        ):
            if self.options[name] == again:
                raise ValueError(
                    f"{name} is {again!r}; it reads the prompt again, and a cache is filled in one "
                    f"pass: {others}"
                )
        check_choice(OBSERVED, observed=self.options["observed"])
        check_choice(("model", "layer", None), pool=self.options["pool"])
        always = sum(check_at_least(0, **{x: self.options[x]}) for x in ("sinks", "recent"))
        check_at_least(0, floor=self.options["floor"])
        least = built(self.method, max(1, always))
        AfterPrefix(least, prefix=least.r, **self.options | {"floor": 0})

    def after(self, tokens: int, r: int, **changed: Any) -> AfterPrefix:
        """Returns what keeps r keys of texts with so many tokens."""
        return AfterPrefix(self.method(r), prefix=tokens, **self.options | changed)

    def of_prompt(self, lengths: Sequence[int]) -> dict[int, AfterPrefix]:
        """Returns what compresses texts of a prompt, by their number of tokens.

        A text keeps what is always kept, if that is more than its share.
        """
        sinks, recent, every = (self.options[name] for name in ("sinks", "recent", "every"))
        always, longest = max(1, sinks + recent), max(lengths)
        if (r := round(self.keep * longest)) < min(always, longest):
            warnings.warn(
                f"keep is {self.keep:g}, which leaves {r} of the prompt's {longest} tokens; "
                f"{min(always, longest)} are kept, as {sinks} sinks and {recent} recent keys "
                f"always are",
                stacklevel=2,
            )
        if longest < (least := always if every else 1):
            raise ValueError(
                f"the prompt has {longest} tokens; it must have at least {least}"
                + f", with every: {sinks} sinks and {recent} recent keys" * bool(every)
            )
        after = {}
        for tokens in filter(None, lengths):
            share = max(round(self.keep * tokens), min(always, tokens))
            floor = min(self.options["floor"], longest if tokens == longest else share)
            after[tokens] = self.after(tokens, share, every=None, floor=floor)
        self._warn_of_few_rows(after[longest], longest)
        return after

    def _warn_of_few_rows(self, after: AfterPrefix, tokens: int) -> None:
        """Warns where less than half of the prompt's queries decide which heads lose keys."""
        if after.pool is not None and after.method.observes and 2 * after.rows < tokens:
            warnings.warn(
                f"pool is {after.pool!r} and {after.rows} of the prompt's {tokens} queries are "
                f"observed: heads that these do not use lose their keys; observed='continued' "
                f"with rows=None observes all, and pool=None keeps as many keys in every head",
                stacklevel=2,
            )


class _Compression:
    """Serves the attention of a model, and compresses the caches that it fills."""

    def __init__(self, model: PreTrainedModel, choices: _Choices) -> None:
        _check_decoder(model)
        self.model, self.choices = model, choices
        attention = model.config._attn_implementation
        self.attention = "sdpa" if attention in FUSED else attention
        self.numbers = {module: number for number, module in enumerate(attention_layers(model))}
        self.traits = traits_of(model)
        self.report = CompressedCaches()
        self.thread = current_thread()
        self.is_chunked = False
        self.filling: _Filling | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "_Compression":
        return self  # a copy of a cache is read in the same context

    def __reduce__(self) -> str:
        raise ValueError(
            "a compressed cache is read in its compressed_cache alone, so it cannot be saved or "
            "pickled; copy.deepcopy copies it"
        )

    @contextmanager
    def opened(self) -> Iterator[CompressedCaches]:
        """Lets the model attend here within the context."""
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
        """Follows the caches of the model's calls until the context is restored."""
        for module in self.numbers:
            see = partial(self._see_cache, str(_cache_argument(module)))
            restored.callback(module.register_forward_pre_hook(see, with_kwargs=True).remove)
        for module in (self.model.base_model, self.model):  # some models call parts of the first
            restored.callback(module.register_forward_hook(self._end_pass).remove)
            check = module.register_forward_pre_hook(_check_mask, with_kwargs=True)
            restored.callback(check.remove)
        for name, function in (
            ("_prefill", self._prefill),
            ("_prepare_attention_mask_for_generation", _warning_of_padding),
            ("_get_candidate_generator", _refuse_assistance),
        ):
            if hasattr(self.model, name):
                setattr(self.model, name, partial(function, getattr(self.model, name)))
                restored.callback(delattr, self.model, name)
        restored.callback(setattr, self, "filling", None)

    @uncompiled
    def _see_cache(
        self, name: str, module: nn.Module, _: tuple[object, ...], options: dict[str, object]
    ) -> None:
        """Begins a filling with the first layer that is called with a cache."""
        if current_thread() is not self.thread:
            raise ValueError(
                "another thread has opened this compressed_cache: open it in the thread that "
                "generates, or make a copy of the model for each"
            )
        cache = options.get(name)
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
            self.filling = _Filling(self, cache)

    def _prefill(
        self, prefill: Callable[..., object], *inputs: object, **options: object
    ) -> object:
        """Reads a prompt as `generate` does; one read in chunks is compressed at its end."""
        arguments = signature(prefill).bind(*inputs, **options).arguments
        _check_continued(**arguments)
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
        """Reports the cache that the pass has filled, if it has, and drops what was read."""
        if self.is_chunked:
            return
        if self.filling is not None and self.filling.prompts:
            self.report.caches.append(self.filling.finished())
        self.filling = None

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
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention as transformers calls it."""
        if module not in self.numbers:
            raise ValueError(
                f"another {type(module).__name__} reads the config of the model in this "
                f"compressed_cache: give each model a config of its own"
            )
        assert self.filling is not None  # it was made when the module was called
        place, kernel = cast(int, module.layer_idx), layer_kernel(module, scaling)
        layer = self.filling.cache.layers[place]
        if isinstance(layer, KeptLayer) and layer.is_filled:
            check_call(dropout, options)
            _check_own(module, layer, key, value)
            mask = None if attention_mask is None else attention_mask[..., -layer.later :]
            visible, _ = split_mask(mask, query, key[:, :, layer.slots :], is_causal=True)
            with torch.autocast(query.device.type, enabled=False):
                output = layer.serve(query, kernel, visible)
            return output.transpose(1, 2).contiguous(), None
        outputs = _attention_of(module, self.attention)(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
        if not isinstance(layer, DynamicSlidingWindowLayer):
            check_call(dropout, options)
            _check_layer(module, layer, key, value, options.get("sliding_window"))
            prompt = self.filling.prompts.setdefault(place, _Prompt(self, module, kernel))
            prompt.read(query, key, attention_mask)
            if not self.is_chunked:
                self.filling.observe(place)
        return outputs


@dataclass
class _Prompt:
    """Holds what one layer has read of a prompt, and chooses again among its keys."""

    context: _Compression
    module: nn.Module
    kernel: Kernel
    queries: list[Tensor] = field(default_factory=list)
    visible: Tensor | None = None
    """The keys that the last query sees, all but padding; None = all"""
    parts: Parts | None = None
    """Its texts without their padding"""
    ranked: list[tuple[Observed, Ranking | None]] = field(default_factory=list)
    """Of each part, where the model's keys are chosen together"""
    report: CompressedCache | None = None
    """Of the cache that this is a layer of, once its keys are chosen"""

    def __deepcopy__(self, memo: dict[int, object]) -> "_Prompt":
        return self  # a copy of a cache is of the same model

    @property
    def number(self) -> int:
        """Returns the layer's place in the model."""
        return self.context.numbers[self.module]

    def reads(self) -> bool:
        """Tells whether the context's model reads the kept keys now, and reports that it did."""
        if self.report is not None and self.context.filling is not None:
            self.report.was_read = True
        return self.context.filling is not None

    def read(self, query: Tensor, key: Tensor, attention_mask: Tensor | None) -> None:
        """Reads a prompt, or a chunk of one; ValueError where the cache held other tokens."""
        earlier = key.shape[2] - query.shape[2]
        if earlier and not self.queries:
            raise ValueError(
                f"the cache holds {earlier} tokens that were not compressed; within "
                f"compressed_cache a model must fill its cache from empty, and a new one after a "
                f"call that was interrupted"
            )
        self.queries.append(query.detach())
        mask, is_causal = split_mask(attention_mask, query, key, is_causal=True)
        if mask is not None:
            if not (is_causal or mask.shape[-2] == 1 or self.context.is_chunked):
                raise ValueError(
                    "the prompt's mask is not causal with padding alone; compressed_cache could "
                    "not tell which keys later tokens see"
                )
            mask = mask[..., -1:, :].repeat(len(query) // len(mask), 1, 1, 1)
        self.visible = mask

    def call(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Arguments:
        """Returns the arguments of an `AfterPrefix` for this layer."""
        traits, layer = self.context.traits[self.module], Layer(number=self.number)
        return grouped(
            self.module, traits, layer, query, key, value, kernel=self.kernel, attn_mask=visible,
            is_causal=True,
        )  # fmt: skip

    def choose_again(
        self, share: Int[Tensor, " B"], pool: Tensor, query: Tensor, key: Tensor, value: Tensor,
        visible: Tensor | None,
    ) -> KeptKeys:  # fmt: skip
        """Lets the method choose among a pool of keys before the next token is read."""
        begun, tokens, choices = _time(), key.shape[2], self.context.choices
        always = choices.options["sinks"] + choices.options["recent"]
        share = share.clamp_min(max(1, always))
        after = {r: choices.after(tokens, r) for r in share.unique().tolist()}
        with torch.autocast(query.device.type, enabled=False):
            parts, cut = next(iter(after.values())).parted(
                pool=pool, share=share, **self.call(query, key, value, visible)
            )
            of_parts = zip(parts.of_first(share), cut, strict=True)
            choice = parts.joined([after[r].choose_part(*texts) for r, texts in of_parts])
        assert self.report is not None
        self.report.seconds += _time() - begun
        return choice


class _Filling:
    """Holds a cache whose prompt is being read, from a pass's first layer to its end.

    Where the pass is interrupted it is dropped, and with it all that was read.
    """

    def __init__(self, context: _Compression, cache: Cache) -> None:
        self.context, self.cache = context, cache
        self.prompts: dict[int, _Prompt] = {}  # by their layer's place in the cache
        self.kept: dict[int, KeptLayer] = {}
        self.after: dict[int, AfterPrefix] = {}  # by the number of a text's tokens
        self.bytes_before, self.seconds = 0, 0.0

    def observe(self, place: int) -> None:
        """Chooses a layer's keys, or observes it where the model's are chosen together."""
        begun, prompt = _time(), self.prompts[place]
        layer = cast(DynamicLayer, self.cache.layers[place])
        key, value = filled(layer)
        query = prompt.queries[0] if len(prompt.queries) == 1 else torch.cat(prompt.queries, dim=2)
        prompt.queries.clear()
        lengths = [key.shape[2]]
        if prompt.visible is not None:  # what a model computes for padding may be NaN
            query, key, value = (x.where(prompt.visible.mT, 0.0) for x in (query, key, value))
            layer.keys, layer.values = key, value
            lengths = prompt.visible.sum(dim=-1).flatten().tolist()
        self.after = self.after or self.context.choices.of_prompt(lengths)
        after = next(iter(self.after.values()))
        with torch.autocast(query.device.type, enabled=False):
            prompt.parts, cut = after.parted(
                start=key.shape[2], **prompt.call(query, key, value, prompt.visible)
            )
            for_parts = [(self.after[texts[0].keys], texts) for texts in cut]
            if after.pool == "model":
                prompt.ranked = [
                    each.ranked(each.observe_part(*texts)) for each, texts in for_parts
                ]
            else:
                choices = [
                    each.choose_layer(each.observe_part(*texts)) for each, texts in for_parts
                ]
                self._replace(place, prompt.parts.joined(choices), query)
        self.seconds += _time() - begun

    def _replace(self, place: int, choice: KeptKeys, query: Tensor | None = None) -> None:
        """Lets the cache hold the kept keys in the place of a layer."""
        key, value = filled(self.cache.layers[place])
        options, prompt = self.context.choices.options, self.prompts[place]
        self.bytes_before += key.nbytes + value.nbytes
        if options["every"] is None or query is None:
            layer = KeptLayer(Slots.of(choice, key, value), key.shape[2], prompt.reads)
        else:
            after = next(iter(self.after.values()))
            layer = GrowingLayer(
                choice, key, value, prompt.reads, every=options["every"], query=query,
                visible=prompt.visible, choose=prompt.choose_again,
                rows=after.rows if options["observed"] == "last" else None,
            )  # fmt: skip
        self.kept[place] = self.cache.layers[place] = layer

    def finished(self) -> CompressedCache:
        """Chooses the keys that are not chosen yet, and reports what was kept."""
        for place in [place for place, prompt in self.prompts.items() if prompt.queries]:
            self.observe(place)  # it was read in chunks
        begun = _time()
        if self.context.choices.options["pool"] == "model":
            self._choose_model()
        layers = list(self.kept.values())
        others = [x for x in self.cache.layers if isinstance(x, DynamicSlidingWindowLayer)]
        report = CompressedCache(
            tokens=layers[0].prefix,
            keys=torch.stack([layer.counts.float().mean(dim=0).cpu() for layer in layers]),
            slots=sum(layer.held for layer in layers),
            bytes_before=self.bytes_before,
            bytes_after=sum(layer.nbytes for layer in layers),
            bytes_of_queries=sum(x.query.nbytes for x in layers if isinstance(x, GrowingLayer)),
            seconds=self.seconds + _time() - begun,
            layers=[prompt.number for prompt in self.prompts.values()],
            bytes_of_others=sum(x.nbytes for layer in others for x in filled(layer)),
        )
        for prompt in self.prompts.values():
            prompt.report = report
        return report

    def _choose_model(self) -> None:
        """Chooses the keys of all layers together."""
        choices = []
        for layers in zip(*(prompt.ranked for prompt in self.prompts.values()), strict=True):
            observed, _ = layers[0]
            with torch.autocast(observed.key.device.type, enabled=False):
                choices.append(self.after[observed.keys].choose_model(layers)[0])
        for number, (place, prompt) in enumerate(self.prompts.items()):
            assert prompt.parts is not None
            self._replace(place, prompt.parts.joined([choice[number] for choice in choices]))


@uncompiled
def _check_mask(model: nn.Module, inputs: tuple[object, ...], options: dict[str, object]) -> None:
    """Raises ValueError for a mask that has not a column for each token of the cache and the call.

    transformers fills a shorter one up with hidden tokens, the new ones among them.
    """
    arguments = signature(model.forward).bind_partial(*inputs, **options).arguments
    mask, cache = (arguments.get(name) for name in ("attention_mask", "past_key_values"))
    if not isinstance(mask, Tensor) or getattr(cache, "is_compileable", False):
        return  # a static cache, which is refused later, has masks of its whole length
    tensors = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    tokens = next((x for x in tensors if isinstance(x, Tensor)), mask)
    before, length = cache.get_seq_length() if isinstance(cache, Cache) else 0, tokens.shape[1]
    if mask.shape[-1] != before + length:
        raise ValueError(
            f"attention_mask has {mask.shape[-1]} columns; the cache has seen {before} tokens, "
            f"kept or not, and the call brings {length}, so it must have {before + length}"
        )
    if mask.device != tokens.device:
        raise ValueError(f"attention_mask is on {mask.device}; the tokens are on {tokens.device}")


def _check_continued(
    input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: Arguments, **_: object
) -> None:
    """Raises ValueError for a cache that `generate` would continue at another place.

    It is given the whole text, whose mask is as long, or the new tokens with the mask of all. Where
    the cache has the whole text, transformers reads it again behind itself.
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
        trained = getattr(layer, "approximation", None)
        if trained is not None and not isinstance(trained, Exact):
            raise ValueError(
                f"the model was trained with {type(trained).__name__}; a compressed cache is read "
                f"by exact attention"
            )


def _cache_argument(module: nn.Module) -> str | None:
    """Finds the name by which an attention module is given its cache."""
    names = signature(module.forward).parameters
    return next((name for name in ("past_key_values", "layer_past") if name in names), None)


def _check_layer(
    module: nn.Module, layer: object, key: Tensor, value: Tensor, window: object
) -> None:
    """Raises ValueError for a layer that cannot be compressed once it is filled."""
    if not (type(layer) is DynamicLayer or isinstance(layer, KeptLayer)):
        raise ValueError(
            f"layer {module.layer_idx} caches in a {type(layer).__name__}; compressed_cache needs "
            f"the DynamicLayer of a DynamicCache"
        )
    _check_own(module, layer, key, value)
    if window is not None:
        raise ValueError(
            f"layer {module.layer_idx} attends within a window of {window} and its cache has none: "
            f"give DynamicCache(config=model.config), or no cache"
        )


def _check_own(module: nn.Module, layer: DynamicLayer, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless a module reads just what its layer of the cache holds."""
    if key is not layer.keys or value is not layer.values:
        raise ValueError(
            f"{type(module).__name__} attends to other keys or values than its cache holds; "
            f"compressed_cache cannot compress them"
        )


def _attention_of(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns the attention function of this name, as the module's own code finds it."""
    homes = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    eager = (getattr(home, "eager_attention_forward", None) for home in homes)
    return ALL_ATTENTION_FUNCTIONS.get(name, next(filter(None, eager), None))


def _warning_of_padding(
    prepare: Callable[..., Tensor], *inputs: object, **options: object
) -> Tensor:
    """Warns where `generate` takes tokens of the prompt for padding, which no query sees."""
    mask = prepare(*inputs, **options)
    if hidden := int((mask == 0).sum()):
        warnings.warn(
            f"{hidden} tokens of the prompt equal pad_token_id and are taken for padding; give "
            f"generate an attention_mask",
            stacklevel=2,
        )
    return mask


def _refuse_assistance(*_: object, **__: object) -> None:
    raise ValueError(
        "assisted decoding reads the prompt together with candidates and removes them again; "
        "within compressed_cache generate without assistant_model and prompt_lookup_num_tokens"
    )


class CompressedGeneration:
    """Generates with compressed caches: `model.generate(..., custom_generate=this)`.

    The arguments are those of `compressed_cache`; `report` has the caches of all calls.
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
        """Decodes as `generate` would with this config."""
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
