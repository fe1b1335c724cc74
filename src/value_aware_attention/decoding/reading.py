"""Reads texts once, for any number of compressed caches and their continuations."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from value_aware_attention.approximations import Exact
from value_aware_attention.caches.budgets import Ranking
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.caches.observed import Observed
from value_aware_attention.call import seconds_now
from value_aware_attention.decoding.after_prefix import OF_MODEL, AfterPrefix
from value_aware_attention.decoding.kept_layer import KeptLayer, Slots, filled
from value_aware_attention.hugging_face.adapter import replace_attention
from value_aware_attention.hugging_face.attending import repeated, set_implementation
from value_aware_attention.hugging_face.contexts import named_attention
from value_aware_attention.hugging_face.layers import layer_kernel
from value_aware_attention.hugging_face.recording import recording


class SharedReading:
    """Holds queries, keys and values of every layer over prompts and their continuations.

    Reading once serves every choice of keys: a cache is chosen from what is held, and only the
    continuation is read again, over the kept keys. Logits are those of `compressed_cache`.

    Layers that attend within a window keep it, as in `compressed_cache`: keys are chosen in the
    others, and `calls` are theirs.

    Args:
        model: A transformers model. For `continued` and `decoded`, a causal language model.
        tokens: Texts of one length, without padding.
        prefix: Tokens of the prompt; those after it are the continuation. None: an encoder's text,
            without a prompt.
        repeated: True: the prompt is read once more, for `observed="repeat"`.

    Raises ValueError for a prompt without a continuation, and for a decoder with another kind of
    layer or without one that attends to the whole past.
    """

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, tokens: Int[Tensor, "B N"], prefix: int | None, *,
        repeated: bool = False,
    ) -> None:  # fmt: skip
        if prefix is not None and not 1 <= prefix < tokens.shape[1]:
            raise ValueError(f"prefix is {prefix}; the texts have {tokens.shape[1]} tokens")
        self.model, self.tokens, self.prefix = model, tokens, prefix
        self.rankings: dict[str, list[tuple[Observed, Ranking | None]]] = {}
        with recording(
            model, shares_keys=True, repeated=prefix if repeated else None
        ) as self.all_calls:
            self.logits = self.output()
        chosen = range(len(self.all_calls)) if prefix is None else full_layers(model)
        self.calls = [self.all_calls[number] for number in chosen]

    def output(self) -> Float[Tensor, "B n E"]:
        """Reads the texts with the model's attention as it is now.

        Returns logits of the continuation, or of the whole text without a prompt; hidden states of
        a model without a head.
        """
        options: dict[str, Any] = {}
        rows = self.tokens.shape[1] - (self.prefix or 0)
        if self.prefix is not None:
            options = {"use_cache": False}
            if "logits_to_keep" in signature(self.model.forward).parameters:
                options["logits_to_keep"] = rows
        return cast(Tensor, self.model(input_ids=self.tokens, **options)[0][:, -rows:])

    @torch.no_grad()
    def choose(self, after: AfterPrefix) -> list[KeptKeys]:
        """Chooses keys of every layer as `AfterPrefix.choose`; a pool ranks them once for all r.

        With the pool "checked" the model reads the texts again.
        """
        if after.pool == "checked":
            return self._checked(after)
        calls = [call.arguments() | {"layer": call.layer} for call in self.calls]
        if after.pool not in OF_MODEL or not after.method.is_nested:
            return after.choose(calls)
        of_any_size = re.sub(r"\b(r|floor)=\d+", "", repr(after))
        if of_any_size not in self.rankings:
            self.rankings[of_any_size] = [after.ranked(after.observe(**call)) for call in calls]
        return after.choose_model(self.rankings[of_any_size])[0]

    def _checked(self, after: AfterPrefix) -> list[KeptKeys]:
        """Takes the keys that `after` keeps while the model reads with it."""
        choices: list[KeptKeys] = []

        def take(method: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            choices.extend(options["layer"].kept)

        handle = after.register_forward_pre_hook(take, with_kwargs=True)
        try:
            with replace_attention(self.model, after):
                self.output()
        finally:
            handle.remove()
        return choices[-len(self.calls) :]

    @torch.no_grad()
    def continued(self, choices: Sequence[KeptKeys]) -> Float[Tensor, "B n E"]:
        """Computes the logits of the continuation over the kept keys of each layer."""
        with self._over(choices) as read:
            return read(self.tokens[:, self.prefix :])

    @torch.no_grad()
    def decoded(
        self, choices: Sequence[KeptKeys], start: int, count: int
    ) -> tuple[Int[Tensor, "B count"], float]:
        """Decodes `count` tokens greedily from place `start` on, over the kept keys of each layer.

        Also returns the seconds of a token after the first.
        """
        with self._over(choices) as read:
            tokens = [read(self.tokens[:, self.prefix : start])[:, -1:].argmax(dim=-1)]
            begun = seconds_now()
            while len(tokens) < count:
                tokens.append(read(tokens[-1])[:, -1:].argmax(dim=-1))
            return torch.cat(tokens, dim=1), (seconds_now() - begun) / max(1, count - 1)

    @contextmanager
    def _over(self, choices: Sequence[KeptKeys]) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yields a function that reads further tokens over the kept keys, and returns logits."""
        cache = DynamicCache()
        for call in self.all_calls:
            cache.layers.append(layer := DynamicLayer())
            layer.update(*(x[:, :, 0, : self.prefix] for x in (call.key, call.value)))
        for number, choice in zip(full_layers(self.model), choices, strict=True):
            slots = Slots.of(choice, *filled(cache.layers[number]))
            cache.layers[number] = KeptLayer(slots, self.prefix or 0, lambda: True)
        with named_attention(self.model, alone=True) as name:
            AttentionInterface.register(name, partial(_serve, cache))
            AttentionMaskInterface.register(name, lambda *_, **__: None)
            set_implementation(self.model, name)
            yield (
                lambda tokens: (
                    self.model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
                )
            )


def full_layers(model: PreTrainedModel) -> list[int]:
    """Returns the numbers of a decoder's layers that attend to the whole past.

    Raises ValueError if there is none, or if another layer attends other than within a window.
    """
    kinds = [type(layer) for layer in DynamicCache(config=model.config).layers]
    if others := set(kinds) - {DynamicLayer, DynamicSlidingWindowLayer}:
        raise ValueError(
            f"the model has a {others.pop().__name__}; layers must attend to the whole past, or "
            f"within a window"
        )
    if DynamicLayer not in kinds:
        raise ValueError("every layer attends within a window, so no cache can be compressed")
    return [number for number, kind in enumerate(kinds) if kind is DynamicLayer]


def logits_after(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B N"],
    prefix: int,
    *,
    attention_mask: Int[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B n E"]:
    """Computes the logits of the tokens after `prefix`, which attend to it through a cache.

    Within `compressed_cache` these tokens see the keys that it kept of the first `prefix` tokens; a
    single pass over all tokens would be exact. Elsewhere the logits equal those of a single pass.
    To score a continuation, let the last token of its context be the first after `prefix`, since
    its logits predict the continuation's first token. Texts of unequal length are padded on the
    left. Raises ValueError unless 0 < prefix < N.
    """
    tokens = input_ids.shape[1]
    if not 0 < prefix < tokens:
        raise ValueError(
            f"prefix is {prefix}; it must be at least 1 and below the number of tokens, {tokens}"
        )
    options: dict[str, Any] = {"use_cache": True}
    output: Any = None
    for rows in (slice(prefix), slice(prefix, tokens)):
        if attention_mask is not None:
            places = (attention_mask.cumsum(dim=-1) - 1).clamp_min(0)
            options |= {"attention_mask": attention_mask[:, : rows.stop]}
            options |= {"position_ids": places[:, rows]}
        output = model(input_ids=input_ids[:, rows], **options)
        options["past_key_values"] = output.past_key_values
    return cast(Tensor, output.logits)


def _serve(
    cache: DynamicCache, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: None, scaling: float | None = None, **options: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes attention over the kept keys of a layer and the later ones, or within its window."""
    layer, kernel = cache.layers[cast(int, module.layer_idx)], layer_kernel(module, scaling)
    if isinstance(layer, KeptLayer):
        output = layer.serve(query, kernel, None)
    else:
        places = torch.arange(key.shape[2], device=key.device)
        age = places[-query.shape[2] :, None] - places
        visible = (age >= 0) & (age < cast(int, options["sliding_window"]))
        output = Exact()(query, *repeated(query, key, value), kernel=kernel, attn_mask=visible)
    return output.transpose(1, 2).contiguous(), None
