"""Fills a compressed cache: records what each layer has read, and chooses its keys."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from value_aware_attention.arguments import check_at_least, check_choice, check_flag, described
from value_aware_attention.attention import AttentionState
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.call import (
    Arguments,
    Collected,
    Layer,
    Stopwatch,
    collecting,
    read_refusals,
    seconds_now,
)
from value_aware_attention.decoding.after_prefix import AfterPrefix, joined_pools, placed
from value_aware_attention.decoding.kept_layer import GrowingLayer, KeptLayer, Slots, filled
from value_aware_attention.decoding.padding import Part, Parts
from value_aware_attention.hugging_face.masks import split_mask
from value_aware_attention.hugging_face.sharing import grouped
from value_aware_attention.hugging_face.traits import Traits
from value_aware_attention.kernels import Kernel

OBSERVED_IN_ONE_PASS = ("last", "causal", "noncausal", "continued")
"""Ways to observe that need only one pass over a prompt"""


@dataclass
class CompressedCache:
    """Reports what one cache kept of its prompt.

    Attributes:
        tokens: Length of the prompt, including padding.
        keys: Keys kept by layer and key-value head, averaged over texts; a mean slot is one of
            them, and padding is not counted.
        indices: The kept keys of each compressed layer, (texts, key-value heads, slots) on its
            device: ascending positions in a text, in which padding is not counted; -1 in unused
            slots. They take 4 bytes a slot as long as the report exists.
        asked: The method and all options.
        slots: Slots for the kept keys of all texts, layers and heads, including unused ones.
        bytes_before: Bytes of the prompt's keys and values in the compressed layers.
        bytes_after: Bytes of what these layers hold now.
        bytes_of_queries: Bytes of the prompt's queries that are held for later choices.
        seconds: Time for choosing and copying keys, including later choices.
        layers: Numbers of the compressed layers, as in `attention_layers`.
        bytes_of_others: Bytes of keys and values in layers with windows, which are not compressed.
        was_read: Whether any token was read over the kept keys, or they were saved.
    """

    tokens: int
    keys: Float[Tensor, "L H"]
    indices: list[Int[Tensor, "B H R"]]
    asked: str
    slots: int
    bytes_before: int
    bytes_after: int
    bytes_of_queries: int
    seconds: float
    layers: list[int]
    bytes_of_others: int
    was_read: bool = False

    def __str__(self) -> str:
        mib = 2**20
        lines = [
            f"{self.tokens:,} tokens: {self.keys.mean():,.1f} keys a head, "
            f"{self.bytes_before / mib:.1f} MiB -> {self.bytes_after / mib:.1f} MiB "
            f"({self.bytes_after / self.bytes_before:.1%}), chosen in {self.seconds:.2f} s",
            f"asked for: {self.asked}",
        ]
        if self.bytes_of_others:
            lines.append(
                f"{len(self.layers)} layers are compressed; {self.bytes_of_others / mib:.1f} MiB "
                f"in layers with windows stay as they are"
            )
        if not self.was_read:
            lines.append("no token was read over these keys: all logits are the exact model's")
        fewest, most = self.keys.min(), self.keys.max()
        if fewest < most:
            lines.append(f"heads keep {fewest:,.0f} to {most:,.0f} keys; `keys` has all numbers")
        return "\n".join(lines)


@dataclass
class CompressedCaches:
    """Reports the caches that were compressed within a context, in order."""

    caches: list[CompressedCache] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            "\n\n".join(map(str, self.caches)) or "no layer with full attention has filled a cache"
        )

    def warn_of_unread(self) -> None:
        """Warns if no token was read over a compressed cache, so that all its logits are exact."""
        if unread := sum(not cache.was_read for cache in self.caches):
            warnings.warn(
                f"no token was read over {unread} of {len(self.caches)} compressed caches, so all "
                f"logits are the exact model's: read the context first, then the rest with "
                f"past_key_values, as hugging_face.logits_after does",
                stacklevel=2,
            )


def built(method: Callable[[int], CacheMethod], r: int) -> CacheMethod:
    """Returns the cache method that `method` builds for r keys; ValueError if it builds none."""
    cache_method = method(r) if callable(method) and not isinstance(method, nn.Module) else None
    if not isinstance(cache_method, CacheMethod):
        raise ValueError(
            f"method is {described(method)}; it must be a function from a number of keys to a "
            f"cache method, such as caches.ValueAware"
        )
    return cache_method


@dataclass(frozen=True)
class Choices:
    """Holds the method, what to keep and `AfterPrefix`'s options, for prompts of any size.

    Attributes:
        keep: A share of a text's keys as a float, or a number of keys as an int.
        bits: 8 = kept keys and values are rounded to int8; None = they are not.
        mean_slot: Whether the last of r slots holds the mean of what a head dropped.
    """

    method: Callable[[int], CacheMethod]
    keep: float
    options: Arguments
    bits: int | None = None
    mean_slot: bool = False

    def __post_init__(self) -> None:
        check_choice((8, None), bits=self.bits)
        check_flag(mean_slot=self.mean_slot)
        changed = {"bits": self.bits, "mean_slot": self.mean_slot or None}
        for name, option in changed.items():
            if option is not None and self.options["every"] is not None:
                raise ValueError(
                    f"{name} is {option} and every is {self.options['every']}; keys that are "
                    f"chosen again stay as they are: give one of the two"
                )
        for name, again, others in (
            ("observed", "repeat", ", ".join(OBSERVED_IN_ONE_PASS)),
            ("pool", "checked", "model, layer or None"),
        ):
            if self.options[name] == again:
                raise ValueError(
                    f"{name} is {again!r}; it reads the prompt again, and a cache is filled in one "
                    f"pass: {others}"
                )
        check_choice(OBSERVED_IN_ONE_PASS, observed=self.options["observed"])
        check_choice(("model", "layer", None), pool=self.options["pool"])
        always = sum(check_at_least(0, **{x: self.options[x]}) for x in ("sinks", "recent"))
        check_at_least(0, floor=self.options["floor"])
        least = built(self.method, max(1, always))
        if self.mean_slot and least.refits:
            raise ValueError(
                f"mean_slot is True, and {type(least).__name__} refits the kept values to stand in "
                f"for all others: give one of the two"
            )
        AfterPrefix(least, prefix=least.r, **self.options | {"floor": 0})

    def __str__(self) -> str:
        name = type(self.method(max(1, self.options["sinks"] + self.options["recent"]))).__name__
        options = {"keep": self.keep, "bits": self.bits, "mean_slot": self.mean_slot}
        options |= getattr(self.method, "keywords", {}) | self.options
        return f"{name}, {', '.join(f'{x}={option!r}' for x, option in options.items())}"

    def kept_of(self, tokens: int) -> int:
        """Returns the number of keys a head of a text with this many tokens, beside a mean slot.

        Keys that are always kept may exceed it.
        """
        r = min(self.keep, tokens) if isinstance(self.keep, int) else round(self.keep * tokens)
        return r - (self.mean_slot and r < tokens)

    def after(self, tokens: int, r: int, **changed: Any) -> AfterPrefix:
        """Returns the `AfterPrefix` that keeps r keys of texts with this many tokens."""
        return AfterPrefix(self.method(r), prefix=tokens, **self.options | changed)

    def of_prompt(self, lengths: Sequence[int]) -> dict[int, AfterPrefix]:
        """Returns the `AfterPrefix` for the texts of a prompt, by their number of tokens.

        A text keeps at least its sinks and recent keys, even if they exceed its share.
        """
        sinks, recent, every = (self.options[name] for name in ("sinks", "recent", "every"))
        always, longest = max(1, sinks + recent), max(lengths)
        if (r := self.kept_of(longest)) < min(always, longest):
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
            share = max(self.kept_of(tokens), min(always, tokens))
            floor = min(self.options["floor"], longest if tokens == longest else share)
            after[tokens] = self.after(tokens, share, every=None, floor=floor)
        self._warn_of_few_rows(after[longest], longest)
        return after

    def _warn_of_few_rows(self, after: AfterPrefix, tokens: int) -> None:
        """Warns if less than half of the prompt's queries decide which heads lose keys."""
        if after.pool is not None and after.method.observes and 2 * after.rows < tokens:
            warnings.warn(
                f"pool is {after.pool!r} and {after.rows} of the prompt's {tokens} queries are "
                f"observed: heads that these do not use lose their keys; observed='continued' "
                f"with rows=None observes all, and pool=None keeps as many keys in every head",
                stacklevel=2,
            )


@dataclass(eq=False)
class Context:
    """Holds the state that a model's layers share within a `compressed_cache`.

    Attributes:
        asked: The choices to make; for a loaded cache, the text of the choices that were made.
        numbers: The index of each layer in the model.
        filling: The cache that a pass is filling or has filled; None between passes.
        is_chunked: True while `generate` reads a prompt in chunks.
    """

    model: PreTrainedModel
    asked: Choices | str
    numbers: Mapping[nn.Module, int]
    traits: Mapping[nn.Module, Traits]
    filling: "Filling | None" = None
    is_chunked: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # copies of a cache are read in the same context

    def __reduce__(self) -> str:
        raise ValueError(
            "a compressed cache is read in its context alone, so it cannot be pickled; "
            "hugging_face.save_compressed writes it to a file, copy.deepcopy copies it"
        )

    @property
    def choices(self) -> Choices:
        """Returns how keys are chosen; ValueError for a loaded cache, within which none can be."""
        if isinstance(self.asked, str):
            raise ValueError(
                "within load_compressed a model reads the loaded cache alone; give it as "
                "past_key_values, or open compressed_cache to read another prompt"
            )
        return self.asked


@dataclass
class Prompt:
    """Holds what one layer has read of a prompt.

    Attributes:
        visible: The keys that the last query sees (all except padding); None = all.
        state: State (B, heads, N, V) of its queries over their own past; None = the attention gave
            none.
        report: Report of the layer's cache, once keys are chosen.
    """

    context: Context
    module: nn.Module
    kernel: Kernel
    queries: list[Tensor] = field(default_factory=list)
    visible: Tensor | None = None
    state: AttentionState | None = None
    report: CompressedCache | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "Prompt":
        return self  # copies of a cache share the model

    @property
    def number(self) -> int:
        """Returns the layer's index in the model."""
        return self.context.numbers[self.module]

    def reads(self) -> bool:
        """Returns whether the context's model reads the kept keys now, and records that it did."""
        if self.report is not None and self.context.filling is not None:
            self.report.was_read = True
        return self.context.filling is not None

    def read(
        self, query: Tensor, key: Tensor, attention_mask: Tensor | None,
        state: AttentionState | None = None,
    ) -> None:  # fmt: skip
        """Reads a prompt or a chunk of one; ValueError if the cache already held other tokens."""
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
        self.visible, self.state = mask, state

    def call(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Arguments:
        """Returns the arguments of an `AfterPrefix` for this layer."""
        return grouped(
            self.module, self.context.traits[self.module], Layer(number=self.number), query, key,
            value, kernel=self.kernel, attn_mask=visible, is_causal=True,
        )  # fmt: skip


Prepared = tuple[Parts, list[tuple[AfterPrefix, Tensor, Any]]]
"""A layer's texts without padding; for each part its `AfterPrefix`, the pool of keys, and the
choice, or only the ranking if the keys of all layers are chosen together"""


def prepared(
    parts: Parts, cut: Iterable[tuple[AfterPrefix, Part]], state: AttentionState | None = None,
    shared: dict[Hashable, Tensor] | None = None,
) -> Prepared:  # fmt: skip
    """Chooses the keys of each part of a layer, or only ranks them, for `chosen`."""
    of_parts = []
    for after, (call, pool, start) in cut:
        observed = after.observe_part(call, pool, start, state, shared)
        choose = after.ranked if after.pool == "model" else after.choose_layer
        of_parts.append((after, pool, choose(observed)))
    return parts, of_parts


def chosen(layers: Sequence[Prepared]) -> list[KeptKeys]:
    """Returns the choices of layers that share a budget, or that of a single layer."""
    by_part = []
    for of_part in zip(*(of_parts for _, of_parts in layers), strict=True):
        after, choices = of_part[0][0], [choice for *_, choice in of_part]
        if after.pool == "model":
            with torch.autocast(of_part[0][1].device.type, enabled=False):
                (choices,) = after.choose_model(choices)
        if after.every is not None:  # else the pool is the whole prompt
            choices = [placed(c, pool) for c, (_, pool, _) in zip(choices, of_part, strict=True)]
        by_part.append(choices)
    return [
        parts.joined([choices[number] for choices in by_part])
        for number, (parts, _) in enumerate(layers)
    ]


def choose_again(prompts: Sequence[Prompt], layers: Sequence[GrowingLayer]) -> list[KeptKeys]:
    """Makes the next choice of layers that choose together, before the next token is read."""
    begun, first, choices = seconds_now(), layers[0], prompts[0].context.choices
    start, floor = first.prefix + first.every, choices.options["floor"]
    number = choices.keep if isinstance(choices.keep, int) else 0  # a short text grows to this r
    share = first.share.clamp_min(min(number, start))
    after = {r: choices.after(start, r, floor=min(floor, r)) for r in share.unique().tolist()}
    pools, ranked = joined_pools([x.at for x in layers], range(first.prefix, start)), []
    for prompt, layer, pool in zip(prompts, layers, pools, strict=True):
        with torch.autocast(pool.device.type, enabled=False):
            parts, cut = next(iter(after.values())).parted(
                pool=pool, share=share, **prompt.call(*layer.tensors(), layer.visible)
            )
            who = (after[r] for r in parts.of_first(share))
            ranked.append(prepared(parts, zip(who, cut, strict=True)))
    choice, report = chosen(ranked), prompts[0].report
    assert report is not None
    report.seconds += seconds_now() - begun
    return choice


class Filling:
    """Holds a cache whose prompt is being read, from the first layer of a pass to its end.

    If the pass is interrupted, the filling is dropped with everything read.
    """

    def __init__(self, context: Context, cache: Cache) -> None:
        self.context, self.cache = context, cache
        self.prompts: dict[int, Prompt] = {}  # by layer index in the cache
        self.kept: dict[int, KeptLayer] = {}
        self.after: dict[int, AfterPrefix] = {}  # by number of tokens in a text
        self.prepared: dict[int, Prepared] = {}  # by layer, like the queries
        self.queries: dict[int, Tensor] = {}  # if keys are chosen again
        self.lengths: list[int] = []  # lengths of the texts
        self.bytes_before, self.watch = 0, Stopwatch()
        self.refusals: Collected = []
        self.shared: dict[Hashable, Tensor] = {}  # shared by the layers while they choose

    def observe(self, place: int) -> None:
        """Chooses a layer's keys, or only ranks them if those of all layers are chosen together."""
        try:
            with self.watch.running(), collecting(self.refusals):
                self._observe(place)
        except Exception:  # NaN of an earlier layer may be the cause, and is then named
            read_refusals(self.refusals)
            raise

    def _observe(self, place: int) -> None:
        prompt = self.prompts[place]
        layer = cast(DynamicLayer, self.cache.layers[place])
        key, value = filled(layer)
        query = prompt.queries[0] if len(prompt.queries) == 1 else torch.cat(prompt.queries, dim=2)
        prompt.queries.clear()
        lengths = [key.shape[2]]
        if prompt.visible is not None:  # a model may compute NaN for padding
            query, key, value = (x.where(prompt.visible.mT, 0.0) for x in (query, key, value))
            layer.keys, layer.values = key, value
            lengths = prompt.visible.sum(dim=-1).flatten().tolist()
        self.after = self.after or self.context.choices.of_prompt(lengths)
        if self.context.choices.options["every"] is not None:
            self.lengths, self.queries[place] = lengths, query
        after = next(iter(self.after.values()))
        with torch.autocast(query.device.type, enabled=False):
            parts, cut = after.parted(
                start=key.shape[2], **prompt.call(query, key, value, prompt.visible)
            )
            for_parts = ((self.after[texts[0].keys], texts) for texts in cut)
            state, prompt.state = prompt.state, None  # without a mask, there is one part
            self.prepared[place] = prepared(parts, for_parts, state, self.shared)
        if after.pool != "model":
            self._choose([place])

    def _choose(self, places: Sequence[int]) -> None:
        """Chooses the keys of a layer, or of all layers together, and replaces these."""
        choose = partial(choose_again, [self.prompts[place] for place in places])
        group: list[GrowingLayer] = []
        choices = chosen([self.prepared.pop(place) for place in places])
        for place, choice in zip(places, choices, strict=True):
            key, value = filled(self.cache.layers[place])
            self.bytes_before += key.nbytes + value.nbytes
            prompt, options = self.prompts[place], self.context.choices
            if place in self.queries:
                layer: KeptLayer = self._growing(place, choice, group, choose)
            else:
                held = Slots.of(choice, key, value)
                if options.mean_slot:
                    held = held.with_mean(choice, key, value, prompt.visible)
                layer = KeptLayer(held, key.shape[2], prompt.reads, options.bits)
            layer.locate(choice, prompt.visible)
            self.kept[place] = self.cache.layers[place] = layer

    def _growing(
        self, place: int, choice: KeptKeys, group: list[GrowingLayer], choose: Callable[..., Any]
    ) -> GrowingLayer:
        """Returns a layer that chooses again, with the others of its group."""
        options, prompt = self.context.choices.options, self.prompts[place]
        always, key, value = options["sinks"] + options["recent"], *filled(self.cache.layers[place])
        sizes = {0: 1} | {tokens: after.method.r for tokens, after in self.after.items()}
        share = [max(always, sizes[tokens]) for tokens in self.lengths]
        return GrowingLayer(
            choice, key, value, prompt.reads, every=options["every"], group=group, choose=choose,
            share=torch.tensor(share, device=key.device).expand(len(key)), visible=prompt.visible,
            query=self.queries.pop(place),
            rows=next(iter(self.after.values())).rows if options["observed"] == "last" else None,
        )  # fmt: skip

    def finished(self) -> CompressedCache:
        """Chooses all keys not yet chosen, and reports what was kept."""
        for place in [place for place, prompt in self.prompts.items() if prompt.queries]:
            self.observe(place)  # read in chunks
        read_refusals(self.refusals)
        if self.context.choices.options["pool"] == "model":
            with self.watch.running():
                self._choose(list(self.prompts))
        layers = list(self.kept.values())
        others = [x for x in self.cache.layers if isinstance(x, DynamicSlidingWindowLayer)]
        counts = torch.stack([x.counts.to(layers[0].counts.device) for x in layers])
        report = CompressedCache(
            tokens=layers[0].prefix,
            keys=counts.float().mean(dim=1).cpu(),  # read all at once
            indices=[cast(Tensor, layer.indices) for layer in layers],
            asked=str(self.context.choices),
            slots=sum(layer.held for layer in layers),
            bytes_before=self.bytes_before,
            bytes_after=sum(layer.nbytes for layer in layers),
            bytes_of_queries=sum(x.query.nbytes for x in layers if isinstance(x, GrowingLayer)),
            seconds=self.watch.seconds(),
            layers=[prompt.number for prompt in self.prompts.values()],
            bytes_of_others=sum(x.nbytes for layer in others for x in filled(layer)),
        )
        for prompt in self.prompts.values():
            prompt.report = report
        return report
