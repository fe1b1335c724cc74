"""Passes a model's key-value heads to a cache method unrepeated, shared by their groups."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, Protocol, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from value_aware_attention.approximations import Exact
from value_aware_attention.call import Arguments, Layer
from value_aware_attention.hugging_face.attending import repeated
from value_aware_attention.hugging_face.layers import positions
from value_aware_attention.hugging_face.traits import TENSORS, Traits, is_rotary, output_projection


class Kept(Protocol):
    """Describes the kept keys of a layer, such as `caches.KeptKeys`."""

    def where(self, is_ours: Tensor, other: "Kept", /) -> "Kept":
        """Takes the keys of each text from one of two choices."""


class SharingMethod(Protocol):
    """Describes a method with keys shared by the heads of a group, such as `caches.AfterPrefix`."""

    prefix: int | None
    observed: str
    pool: str | None

    def __call__(self, **call: object) -> Tensor: ...

    def starts(self, keys: int) -> Sequence[int]:
        """Returns the first row after each choice in a text with this many keys."""

    def choose_ways(self, calls: Collection[Arguments]) -> Sequence[Sequence[Kept]]:
        """Makes the next choice for every layer, in one or two ways to be compared by the model's
        output."""


def shares_keys(method: object) -> TypeGuard[SharingMethod]:
    """Returns whether a method takes the model's key-value heads unrepeated."""
    return getattr(method, "shares_keys", False)


def check_pooled(methods: Sequence[nn.Module], layers: int, heads: Collection[int] | None) -> None:
    """Raises ValueError if heads that share a budget of keys do not have the same method."""
    pools = [method.pool if shares_keys(method) else None for method in methods]
    if heads is not None and any(pools):
        raise ValueError(f"heads are {sorted(heads)}; with pool all heads share the keys kept")
    of_model = [pool for pool in pools if pool in ("model", "checked")]
    if of_model and len(methods) < layers:
        raise ValueError(
            f"pool is {of_model[0]!r} and {len(methods)} of {layers} layers are replaced; all "
            f"layers share the keys kept"
        )
    if of_model and any(method is not methods[0] for method in methods):
        raise ValueError(
            f"pool is {of_model[0]!r} and layers have methods of their own; give one to all"
        )


class FirstReadings:
    """Runs a model on its text before each call, for methods that need more than one layer.

    A method that observes "repeat" gets each layer's queries, keys and values of the prefix read a
    second time. A method that pools keys over the model gets the calls of all layers together, and
    may be compared with equal budgets on the prefix read a second time.
    """

    def __init__(self, methods: Iterable[nn.Module]) -> None:
        sharing = [method for method in methods if shares_keys(method)]
        prefixes = {method.prefix for method in sharing if method.observed == "repeat"}
        if len(prefixes) > 1:
            raise ValueError(f"prefixes are {sorted(map(str, prefixes))}; one prefix is repeated")
        self.prefix = next(iter(prefixes), None)
        self.pooled = next((m for m in sharing if m.pool in ("model", "checked")), None)
        self.is_reading = self.is_checking = False
        self.calls: dict[nn.Module, Arguments] = {}
        self.repeated: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = {}
        self.kept: dict[nn.Module, list[Kept]] = {}

    @contextmanager
    def before_each_call(self, model: PreTrainedModel) -> Iterator[None]:
        """Runs the model before every call, if a method needs it."""
        if self.prefix is None and self.pooled is None:
            yield
            return
        before = model.register_forward_pre_hook(self._read_first, with_kwargs=True)
        after = model.register_forward_hook(self._forget, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._forget()

    def _read_first(
        self, model: PreTrainedModel, inputs: tuple[object, ...], options: Arguments
    ) -> None:
        if self.is_reading or self.is_checking:
            return
        self.kept.clear()
        arguments = signature(model.forward).bind_partial(*inputs, **options).arguments
        if self.prefix is not None:
            self._read(model, _repeating(model, arguments, self.prefix))
            for module, call in self.calls.items():
                query, key, value = (call[name][..., self.prefix :, :] for name in TENSORS)
                self.repeated[module] = query, key, value
        if self.pooled is not None:
            self._choose(model, arguments, self.pooled)
        self.calls.clear()

    def _choose(self, model: PreTrainedModel, arguments: Arguments, pooled: SharingMethod) -> None:
        """Makes all choices; each after a reading over the earlier ones, which later keys depend
        on."""
        self._read(model, arguments)
        for module, second in self.repeated.items():
            call = self.calls[module]
            call["layer"] = replace(call["layer"], repeated=second)
        keys = next(iter(self.calls.values()))["key"].shape[-2]
        for number in range(len(pooled.starts(keys))):
            if number:
                self._read(model, arguments)
            ways = pooled.choose_ways(self.calls.values())
            layers = list(self.calls)
            if len(ways) > 1:
                ways = [self._nearer(model, arguments, layers, *ways)]
            for layer, kept in zip(layers, ways[0], strict=True):
                self.kept[layer] = [*self.kept.get(layer, ()), kept]

    @torch.no_grad()
    def _nearer(
        self, model: PreTrainedModel, arguments: Arguments, layers: list[nn.Module],
        first: Sequence[Kept], second: Sequence[Kept],
    ) -> list[Kept]:  # fmt: skip
        """Takes for each text the sets whose outputs over the prefix, read a second time, are
        nearer to the exact outputs."""
        assert self.pooled is not None and self.pooled.prefix is not None
        prefix, far = self.pooled.prefix, []
        twice = _repeating(model, arguments, prefix)
        exact = self._read(model, twice)[:, prefix:]
        self.is_checking = True
        try:
            for choices in (first, second):
                self.kept = {layer: [kept] for layer, kept in zip(layers, choices, strict=True)}
                far.append(
                    _divergence(model(**twice)[0][:, prefix:], exact, twice.get("attention_mask"))
                )
        finally:
            self.is_checking = False
        self.kept.clear()
        is_nearer = far[0] < far[1]
        return [a.where(is_nearer, b) for a, b in zip(first, second, strict=True)]

    def _read(self, model: PreTrainedModel, arguments: Arguments) -> Tensor:
        """Records the calls of all layers over the choices so far; returns the output."""
        self.calls.clear()
        self.is_reading = True
        try:
            with torch.no_grad():
                return model(**arguments)[0]
        finally:
            self.is_reading = False

    def _forget(self, *_: object) -> None:
        """Forgets what was read: calls of a part of the model have no earlier reading."""
        if not (self.is_reading or self.is_checking):
            self.repeated.clear()
            self.kept.clear()


def _repeating(model: PreTrainedModel, arguments: Arguments, prefix: int) -> Arguments:
    """Returns the inputs of a pass over the prefix followed by itself."""
    if arguments.get("input_ids") is None:
        raise ValueError("a prefix is read once more; the model must be given input_ids")
    twice = {
        name: _twice(model, arguments[name], prefix)
        for name in ("input_ids", "attention_mask", "position_ids")
        if arguments.get(name) is not None
    }
    mask = twice.get("attention_mask", torch.ones_like(twice["input_ids"]))[:, :prefix]
    if not mask.all():
        if getattr(model.config.get_text_config(), "sliding_window", None):
            raise ValueError(
                f"the windows of {type(model).__name__} would reach over the padding between "
                f"two readings of a prefix; give texts without padding"
            )
        if twice["input_ids"].shape[1] < 2 * prefix:
            raise ValueError(
                f"prefix is {prefix} and texts have padding; to read them once more the model "
                f"needs {2 * prefix} positions"
            )
        if "position_ids" not in twice and any(map(is_rotary, model.modules())):
            twice["position_ids"] = torch.arange(prefix, device=mask.device).repeat(len(mask), 2)
    if "position_ids" in twice:
        places = twice["position_ids"].expand_as(twice["input_ids"]).clone()
        places[:, prefix:] += mask.sum(dim=1, keepdim=True)  # tokens per text
        twice["position_ids"] = places
    return twice | {"use_cache": False}


def _twice(model: PreTrainedModel, x: Int[Tensor, "B N"], prefix: int) -> Int[Tensor, "B T"]:
    """Appends the prefix to itself, cut to the model's positions."""
    if x.ndim != 2 or x.shape[1] < prefix:
        raise ValueError(f"prefix is {prefix}; the text has shape {tuple(x.shape)}")
    limit = positions(model)
    again = prefix if limit is None else min(prefix, limit - prefix)
    if again < 1:
        raise ValueError(
            f"prefix is {prefix}; the model has {limit} positions, none to repeat it at"
        )
    return torch.cat([x[:, :prefix], x[:, :again]], dim=1)


def _divergence(
    output: Float[Tensor, "B N E"], exact: Float[Tensor, "B N E"], mask: Int[Tensor, "B T"] | None
) -> Float[Tensor, " B"]:
    """Computes KL(exact || output) over the tokens of each text, without padding.

    For a model without a head, hidden states count as logits.
    """
    here, there = (x.float().log_softmax(dim=-1) for x in (output, exact))
    kl = kl_div(here, there, reduction="none", log_target=True).sum(dim=-1)
    return (kl if mask is None else kl * mask[:, -kl.shape[1] :]).sum(dim=-1)


def grouped(
    module: nn.Module, traits: Traits, layer: Layer, query: Tensor, key: Tensor, value: Tensor,
    **options: Any,
) -> Arguments:  # fmt: skip
    """Returns the call of a layer, with heads in groups that share keys and with its traits.

    Raises ValueError unless each key-value head has the same number of query heads.
    """
    heads, keys, values = (x.shape[1] for x in (query, key, value))
    if keys != values or heads % keys:
        raise ValueError(
            f"the model has {heads} query, {keys} key and {values} value heads; to share a set "
            f"of keys the last two must be equal and divide the first"
        )
    groups = (keys, heads // keys)
    if (mask := options["attn_mask"]) is not None and mask.ndim > 3:
        options["attn_mask"] = mask[:, None] if mask.shape[1] == 1 else mask.unflatten(1, groups)
    projection = output_projection(module, groups, value.shape[-1]) if traits.projects else None
    layer = replace(layer, rotary=traits.rotary, projection=projection)
    inputs = query.unflatten(1, groups), key[:, :, None], value[:, :, None]
    return dict(zip(TENSORS, inputs, strict=True)) | options | {"layer": layer}


@dataclass(frozen=True)
class SharedKeys:
    """Calls a method such as `caches.AfterPrefix` with heads in groups that share keys."""

    method: SharingMethod
    module: nn.Module
    number: int
    traits: Traits
    first: FirstReadings
    shares_keys = True

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, heads: Collection[int] | None,
        **options: Any,
    ) -> Float[Tensor, "batch heads N V"]:  # fmt: skip
        """Computes the method's output in `heads` (None = all), the exact one in the others."""
        exact = partial(Exact(), query, *repeated(query, key, value), **options)
        layer = Layer(
            number=self.number,
            repeated=self.first.repeated.get(self.module),
            kept=self.first.kept.get(self.module),
        )
        call = grouped(self.module, self.traits, layer, query, key, value, **options)
        if self.first.is_reading:
            if self.module in self.first.calls:
                raise ValueError(
                    f"{type(self.module).__name__} is the attention of several layers, which "
                    f"cannot be told apart when the text is read first"
                )
            self.first.calls[self.module] = call
            if layer.kept is None:
                return exact()
        output = self.method(**call).flatten(1, 2)
        if heads is None:
            return output
        chosen = torch.tensor(sorted(set(heads)), dtype=torch.long, device=output.device)
        return exact().index_copy(1, chosen, output.index_select(1, chosen))
