"""Finds how a model's layers rotate their queries and project their heads."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from value_aware_attention.approximations import Exact
from value_aware_attention.attention import working_precision
from value_aware_attention.call import Call, Rotary
from value_aware_attention.hugging_face.attending import exact
from value_aware_attention.hugging_face.contexts import attending_by
from value_aware_attention.hugging_face.layers import attention_layers, cross_attention_layers

TENSORS = ("query", "key", "value")
ROTATED = 256
"""Queries rotated at once, in fp64"""


def output_projection(
    layer: nn.Module, heads: tuple[int, int], value_dim: int
) -> Float[Tensor, "heads G V E"] | None:
    """Returns the output projection of an attention module, by key-value head and group.

    Returns None if the module has none, or one of another input width than its heads. A module may
    gate or normalise the heads before it; `Traits.projects` is then False.
    """
    for name in ("o_proj", "out_proj", "dense", "c_proj", "wo", "Wo", "output"):
        module = getattr(layer, name, None)
        if isinstance(module, nn.Linear | Conv1D):
            weight = module.weight if isinstance(module, Conv1D) else module.weight.T
            if weight.shape[0] == heads[0] * heads[1] * value_dim:
                return weight.detach().unflatten(0, (*heads, value_dim))
    return None


@dataclass(frozen=True)
class Traits:
    """Holds how a layer computes its queries and its output.

    Attributes:
        rotary: Rotates queries to later positions; None = no rotation. An unknown rotation raises
            ValueError when called.
        projects: Whether the output is `output_projection` of the heads, up to a bias.
    """

    rotary: Rotary | None = None
    projects: bool = True


_TRAITS: WeakKeyDictionary[nn.Module, dict[nn.Module, Traits]] = WeakKeyDictionary()


READ_TOKENS, SHIFTED = 6, 5
"""Tokens that a model reads to find its traits, and the shift of their second reading"""
NEAR_TENSORS = 0.1
"""Relative distance below which tensors count as equal; half precision causes about 0.01"""


def is_rotary(module: nn.Module) -> bool:
    """Returns whether a module is a rotary embedding."""
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def rotations(model: nn.Module) -> Iterator[Rotary]:
    """Yields the rotations that a model's layers may apply to queries.

    They use the model's own rotary embeddings and functions. Unknown kinds are left out, and those
    that depend on the length of the text.
    """
    for module in filter(is_rotary, model.modules()):
        apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        kinds = getattr(module, "rope_type", "default")
        match list(signature(module.forward).parameters):
            case ["x", "position_ids"]:
                ways = {"": kinds}
            case ["x", "position_ids", "layer_type"] if isinstance(kinds, dict):
                ways = kinds
            case _:
                ways = {}
        for layer_type, kind in ways.items():
            if apply is not None and not _changes(module, layer_type, kind):
                yield partial(_rotated, module, layer_type, apply)


def _changes(module: Any, layer_type: str, kind: str) -> bool:
    """Returns whether a rotation depends on the length of the text; equal factors do not."""
    settings = getattr(module.config, "rope_parameters", {}) if kind == "longrope" else {}
    factors = settings.get(layer_type, settings)
    alike = "long_factor" in factors and factors["long_factor"] == factors["short_factor"]
    return kind in ("dynamic", "longrope") and not alike


def _rotated(
    module: nn.Module, layer_type: str, apply: Callable[..., Any],
    query: Float[Tensor, "*batch N D"], shift: Int[Tensor, "#N"],
) -> Float[Tensor, "*batch N D"]:  # fmt: skip
    """Rotates queries by their numbers of positions, with the rotary embedding of a layer type.

    A single number for all queries is one rotation, which needs no more than their precision.
    """
    scaling = f"{layer_type}_attention_scaling".lstrip("_")
    tensors = list(signature(apply).parameters).index("cos")  # it takes queries and keys, or either

    def turned(query: Tensor, shift: Tensor) -> Tensor:
        angles = module(query.float(), shift[None], *filter(None, [layer_type]))
        cos, sin = (x.double() / getattr(module, scaling, 1.0) for x in angles)
        precision = working_precision(query).dtype if len(shift) == 1 else torch.float64
        cos, sin = cos.to(precision), sin.to(precision)
        part = query[..., : cos.shape[-1]].to(precision)  # some models rotate a part of each head
        as_key = part[(slice(1),) * (part.ndim - 2)]  # its rotation is not used
        rotated = apply(*[part, as_key][:tensors], cos[0], sin[0], unsqueeze_dim=0)
        rotated = (rotated if isinstance(rotated, Tensor) else rotated[0]).to(query.dtype)
        if cos.shape[-1] == query.shape[-1]:
            return rotated
        return torch.cat([rotated, query[..., cos.shape[-1] :]], dim=-1)

    if len(shift) == 1:
        return turned(query, shift)
    blocks = zip(query.split(ROTATED, dim=-2), shift.split(ROTATED), strict=True)
    return torch.cat([turned(*block) for block in blocks], dim=-2)


def refuse_rotation(name: str, query: Tensor, shift: Tensor) -> Tensor:
    """Refuses to rotate queries of a model, with its class name."""
    raise ValueError(
        f"{name} rotates queries in a way that is not known here: observed 'noncausal' and "
        f"'continued', ExpectedAttention and CapKV cannot turn them to later positions; observed "
        f"'last' and 'causal' need not"
    )


def traits_of(model: PreTrainedModel) -> dict[nn.Module, Traits]:
    """Returns how each attention layer rotates its queries and projects its heads.

    The model reads a few tokens twice, at different positions. A layer's rotation is the one, or
    none, that maps its first queries closest to the second. If none comes close, or the model
    cannot read like this, the layer's rotation raises ValueError when called.
    """
    layers = attention_layers(model)
    if set(layers) == set(_TRAITS.get(model, ())):
        return _TRAITS[model]
    is_turning = any(map(is_rotary, model.modules()))
    rotaries, refused = [*rotations(model)], partial(refuse_rotation, type(model).__name__)
    try:
        readings = [_reading(model, shift) for shift in ((0, SHIFTED) if is_turning else (None,))]
    except Exception:  # models raise errors of all kinds for unsupported inputs
        return dict.fromkeys(layers, Traits(refused if is_turning else None))
    traits = {}
    for layer, *calls in zip(layers, *readings, strict=True):
        traits[layer] = Traits(
            _nearest(rotaries, refused, *(call.query for call, _ in calls)),
            _projects(layer, *calls[0]),
        )
    _TRAITS[model] = traits
    return traits


@torch.no_grad()
def _reading(model: PreTrainedModel, shift: int | None) -> list[tuple[Call, Tensor]]:
    """Runs a model on a few tokens; returns the call and the output of each layer.

    `shift` is the position of the first token; None = the model's default positions.
    """
    modes = {module: module.training for module in model.modules()}
    layers, outputs = attention_layers(model), {}
    tokens = torch.arange(READ_TOKENS, device=model.device)[None]
    inputs = {"input_ids": 1 + tokens} | ({} if shift is None else {"position_ids": tokens + shift})

    def keep(module: nn.Module, _: object, output: Any) -> None:
        outputs[module] = output[0] if isinstance(output, tuple) else output

    handles = [layer.register_forward_hook(keep) for layer in layers]
    model.eval()
    calls: dict[nn.Module, Call] = {}

    def recorded(layer: nn.Module, *tensors: Tensor, **options: Any) -> Tensor:
        calls[layer] = Call.of(*tensors, **options)
        return exact(calls[layer])

    methods: dict[nn.Module, Callable[..., Tensor]] = {
        **{layer: partial(recorded, layer) for layer in layers},
        **dict.fromkeys(cross_attention_layers(model), Exact()),
    }
    try:
        with attending_by(model, methods):
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, is_training in modes.items():
            module.training = is_training
    return [(calls[layer], outputs[layer]) for layer in layers]


def _nearest(rotaries: Sequence[Rotary], refused: Rotary, *queries: Tensor) -> Rotary | None:
    """Finds the rotation between queries at two positions; None if there is none."""
    if len(queries) == 1:
        return None
    here, later = queries
    shift = torch.full((READ_TOKENS,), SHIFTED, device=here.device)
    distances: dict[Rotary | None, float] = {None: _distance(here, later)}
    for rotary in rotaries:
        with suppress(RuntimeError, TypeError, ValueError):  # does not fit these heads
            distances[rotary] = _distance(rotary(here, shift), later)
    nearest = min(distances, key=lambda rotary: distances[rotary])
    return nearest if distances[nearest] < NEAR_TENSORS else refused


def _projects(layer: nn.Module, call: Call, output: Tensor) -> bool:
    """Returns whether the output is the layer's output projection of the heads."""
    projection = output_projection(layer, (call.query.shape[1], 1), call.value.shape[-1])
    if projection is None:
        return False
    mixed = torch.einsum("bhnv,hve->bne", exact(call).float(), projection[:, 0].float())
    if mixed.shape != output.shape:
        return False
    mixed, output = (x - x.mean(dim=-2, keepdim=True) for x in (mixed, output.float()))
    return _distance(mixed, output) < NEAR_TENSORS


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())
