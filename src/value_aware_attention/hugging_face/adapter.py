"""Swaps the attention of a trained Hugging Face model for an approximation, and back.

Also for exact attention that records its calls.
"""

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread, current_thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from value_aware_attention.approximations import Exact
from value_aware_attention.call import Call, Rotary
from value_aware_attention.hugging_face.attending import (
    OWN,
    attend,
    hooks,
    method_of,
    register,
    set_implementation,
)
from value_aware_attention.hugging_face.cache_layers import (
    FirstReadings,
    SharedKeys,
    Traits,
    check_pooled,
    is_rotary,
    output_projection,
    refuse_rotation,
    rotations,
    shares_keys,
)
from value_aware_attention.hugging_face.layers import (
    attention_layers,
    check_heads,
    check_methods,
    check_model,
    chosen_layers,
    cross_attention_layers,
)
from value_aware_attention.kernels import Kernel, check_kernel


class _Uncopied:
    """Refuses a copy of a model whose attention is replaced: the copy would name it for ever."""

    def __reduce_ex__(self, protocol: object) -> str:
        raise ValueError(
            "the attention of this model is replaced; copy or save it before the context"
        )


@dataclass(eq=False)
class _Context:
    """Holds an open `replace_attention`: its thread, and the attention each config named before.

    Contexts of a config are a chain: it names the innermost, and each has the name of the next.
    """

    name: str
    before: list[tuple[PreTrainedConfig, str | None]]
    model: PreTrainedModel
    alone: bool = False
    """True: no other context of its model may be open."""
    thread: Thread = field(default_factory=current_thread)


_OPEN: list[_Context] = []
_TRAITS: WeakKeyDictionary[nn.Module, dict[nn.Module, Traits]] = WeakKeyDictionary()
TOKENS, SHIFT = 6, 5
"""Tokens that a model reads for its traits, and how many positions later it reads them again"""
NEAR = 0.1
"""Relative distance of tensors that count as equal: half precision moves them by a hundredth"""
_LOCK = Lock()
"""Held while `_OPEN` changes"""


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
    with ExitStack() as restored:
        restored.enter_context(first.before_each_call(model))
        name = restored.enter_context(named_attention(model))
        register(name, partial(attend, attending, kernel, heads))
        for handle in hooks(model):
            restored.callback(handle.remove)
        set_implementation(model, name)
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


@contextmanager
def named_attention(model: PreTrainedModel, *, alone: bool = False) -> Iterator[str]:
    """Gives a model's attention a name of its own, to be registered and set, within the context.

    Restores what each config named before. Raises ValueError as `_opened`.
    """
    name = f"{OWN}_{uuid.uuid4().hex}"
    context = _opened(model, name, alone)
    try:
        yield name
    finally:
        _close(context)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)  # there is no public way


def _opened(model: PreTrainedModel, name: str, alone: bool) -> _Context:
    """Opens a context; ValueError where another thread has one of the model, or of its config.

    Also where it would be within or around one that must be `alone`.
    """
    with _LOCK:
        before = [(config, config._attn_implementation) for config in _configs(model)]
        context = _Context(name, before, model, alone)
        for other in _OPEN:
            shared = any(a is b for a, _ in other.before for b, _ in context.before)
            if shared and other.thread is not context.thread and other.thread.is_alive():
                raise ValueError(
                    f"another thread has the attention of this {type(model).__name__} replaced: "
                    f"make a copy of the model for each thread, or wait until it is done"
                )
            if shared and (alone or other.alone):
                raise ValueError(
                    f"the attention of this {type(model).__name__} is replaced already; "
                    f"compressed_cache cannot be within or around replace_attention or another "
                    f"compressed_cache"
                )
        _OPEN.append(context)
        for module in {model, model.base_model}:
            setattr(module, name, _Uncopied())
    return context


def _close(context: _Context) -> None:
    """Restores the attention that each config named before the context."""
    with _LOCK:
        _OPEN.remove(context)
        for module in {context.model, context.model.base_model}:
            delattr(module, context.name)
        before = {id(config): name for config, name in context.before}

        def restored(config: PreTrainedConfig, name: str | None) -> str | None:
            return before[id(config)] if name == context.name else name

        for other in _OPEN:
            other.before = [(config, restored(config, name)) for config, name in other.before]
        # All are read before any is set: setting an outer config's sets its sub-configs' too.
        now = [(x, restored(x, x._attn_implementation)) for x, _ in context.before]
        for config, name in now:
            config._attn_implementation = name


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Lists every config of the model that names an attention, outermost first.

    There is no public way to read the name.
    """
    configs: list[PreTrainedConfig] = []
    waiting: list[PreTrainedConfig | None] = [
        module.config for module in model.modules() if isinstance(module, PreTrainedModel)
    ]
    while waiting:
        config = waiting.pop(0)
        if config is not None and not any(config is other for other in configs):
            configs.append(config)
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return configs


class _Recorder(nn.Module):
    """Exact attention that keeps its calls."""

    def __init__(self, shares_keys: bool, repeated: int | None) -> None:
        super().__init__()
        self.shares_keys = shares_keys
        self.observed = "last" if repeated is None else "repeat"  # as in `AfterPrefix`
        self.prefix, self.pool = repeated, None
        self.calls: list[Call] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        call = Call.of(query, key, value, **options)
        self.calls.append(call)
        return exact(call)


def exact(call: Call) -> Float[Tensor, "*batch N V"]:
    """Computes exact attention as the model does."""
    arguments = call.arguments()
    for name in ("key", "value"):
        arguments[name] = arguments[name].expand(*call.batch, -1, -1)
    return Exact()(**arguments)


@contextmanager
def recording(
    model: PreTrainedModel,
    *,
    kernel: Kernel | None = None,
    shares_keys: bool = False,
    repeated: int | None = None,
) -> Iterator[list[Call]]:
    """Records the call of every layer while the model reads within the context.

    On exit the list has the calls, by layer; a layer that ran several times has several. With
    `shares_keys` they are those of an `AfterPrefix`: query (B, H, G, N, D) by key-value head, key
    and value (B, H, 1, N, .). `repeated` is the length of a prefix that is read once more, for
    methods that observe "repeat".
    """
    recorders: dict[int, _Recorder] = {}
    calls: list[Call] = []

    def recorder(layer: int) -> nn.Module:
        return recorders.setdefault(layer, _Recorder(shares_keys, repeated))

    with replace_attention(model, recorder, kernel=kernel):
        yield calls
    calls += [call for layer in sorted(recorders) for call in recorders[layer].calls]


def traits_of(model: PreTrainedModel) -> dict[nn.Module, Traits]:
    """Tells how each attention layer turns its queries and projects its heads.

    The model reads a few tokens, and again at later positions: a layer turns queries by the
    rotation that takes those of the first reading nearest to those of the second, or by none; one
    that none of them takes there refuses to. Layers of a model that cannot read so refuse too.
    """
    layers = attention_layers(model)
    if set(layers) == set(_TRAITS.get(model, ())):
        return _TRAITS[model]
    is_turning = any(map(is_rotary, model.modules()))
    rotaries, refused = rotations(model), partial(refuse_rotation, type(model).__name__)
    try:
        readings = [_reading(model, shift) for shift in ((0, SHIFT) if is_turning else (None,))]
    except Exception:  # models raise all kinds for inputs that they do not take
        return dict.fromkeys(layers, Traits(refused if is_turning else None))
    traits = {}
    for layer, *calls in zip(layers, *readings, strict=True):
        rotary = _nearest(rotaries, refused, *(call.query for call, _ in calls))
        traits[layer] = Traits(rotary, _projects(layer, *calls[0]))
    _TRAITS[model] = traits
    return traits


@torch.no_grad()
def _reading(model: PreTrainedModel, shift: int | None) -> list[tuple[Call, Tensor]]:
    """Lets a model read a few tokens; returns the call and the output of each layer.

    `shift`: the position of the first token, None = the model's default positions.
    """
    modes = {module: module.training for module in model.modules()}
    layers, outputs = attention_layers(model), {}
    tokens = torch.arange(TOKENS, device=model.device)[None]
    inputs = {"input_ids": 1 + tokens} | ({} if shift is None else {"position_ids": tokens + shift})

    def keep(module: nn.Module, _: object, output: Any) -> None:
        outputs[module] = output[0] if isinstance(output, tuple) else output

    handles = [layer.register_forward_hook(keep) for layer in layers]
    model.eval()
    try:
        with recording(model) as calls:
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, is_training in modes.items():
            module.training = is_training
    return list(zip(calls, (outputs[layer] for layer in layers), strict=True))


def _nearest(rotaries: Sequence[Rotary], refused: Rotary, *queries: Tensor) -> Rotary | None:
    """Finds the rotation between queries at two positions; None where there is one position."""
    if len(queries) == 1:
        return None
    here, later = queries
    shift = torch.full((TOKENS,), SHIFT, device=here.device)
    distances: dict[Rotary | None, float] = {None: _distance(here, later)}
    for rotary in rotaries:
        with suppress(RuntimeError, TypeError, ValueError):  # for other heads, or of another kind
            distances[rotary] = _distance(rotary(here, shift), later)
    nearest = min(distances, key=lambda rotary: distances[rotary])
    return nearest if distances[nearest] < NEAR else refused


def _projects(layer: nn.Module, call: Call, output: Tensor) -> bool:
    """Tells whether the output is that of the heads through the layer's output projection."""
    groups = (call.query.shape[1], 1)
    projection = output_projection(layer, groups, call.value.shape[-1])
    if projection is None:
        return False
    mixed = torch.einsum("bhnv,hve->bne", exact(call).float(), projection[:, 0].float())
    if mixed.shape != output.shape:
        return False
    mixed, output = (x - x.mean(dim=-2, keepdim=True) for x in (mixed, output.float()))
    return _distance(mixed, output) < NEAR


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())
