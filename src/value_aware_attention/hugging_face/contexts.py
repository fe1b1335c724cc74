"""Tracks the open contexts of replaced attention, and what each config named before."""

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread, current_thread

from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from value_aware_attention.hugging_face.attending import (
    OWN,
    attend,
    hooks,
    register,
    set_implementation,
)
from value_aware_attention.kernels import Kernel


class _Uncopied:
    """Refuses to copy a model with replaced attention: the copy would keep its name forever."""

    def __reduce_ex__(self, protocol: object) -> str:
        raise ValueError(
            "the attention of this model is replaced; copy or save it before the context"
        )


@dataclass(eq=False)
class _Context:
    """Holds an open `replace_attention`: its thread, and the attention each config named before.

    Contexts of a config form a chain: it names the innermost, and each holds the next name.

    Attributes:
        alone: Whether no other context of its model may be open.
    """

    name: str
    before: list[tuple[PreTrainedConfig, str | None]]
    model: PreTrainedModel
    alone: bool = False
    thread: Thread = field(default_factory=current_thread)


_OPEN: list[_Context] = []
_CHANGING = Lock()
"""Guards changes of `_OPEN`"""


@contextmanager
def attending_by(
    model: PreTrainedModel,
    methods: Mapping[nn.Module, Callable[..., Tensor]],
    kernel: Kernel | None = None,
    heads: Collection[int] | None = None,
) -> Iterator[None]:
    """Replaces the attention of each module of a model by a method within the context."""
    with ExitStack() as restored:
        name = restored.enter_context(named_attention(model))
        register(name, partial(attend, methods, kernel, heads))
        for handle in hooks(model):
            restored.callback(handle.remove)
        set_implementation(model, name)
        yield


@contextmanager
def named_attention(model: PreTrainedModel, *, alone: bool = False) -> Iterator[str]:
    """Yields a unique attention name for a model, to be registered and set within the context.

    Restores what each config named before. Raises ValueError like `_opened`.
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
    """Opens a context; ValueError if another thread has one for the model or its config.

    Also raises it for nesting with a context that must be `alone`.
    """
    with _CHANGING:
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
    with _CHANGING:
        _OPEN.remove(context)
        for module in {context.model, context.model.base_model}:
            delattr(module, context.name)
        before = {id(config): name for config, name in context.before}

        def restored(config: PreTrainedConfig, name: str | None) -> str | None:
            return before[id(config)] if name == context.name else name

        for other in _OPEN:
            other.before = [(config, restored(config, name)) for config, name in other.before]
        # All are read before any is set: setting an outer config also sets its sub-configs.
        for config, name in [(x, restored(x, x._attn_implementation)) for x, _ in context.before]:
            config._attn_implementation = name


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Lists the configs of the model that name an attention, outermost first.

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
