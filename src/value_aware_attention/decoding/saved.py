"""Saves compressed contexts as files, and loads them without reading their prompts again."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from value_aware_attention.arguments import described
from value_aware_attention.decoding.compressed import Compression
from value_aware_attention.decoding.filling import Choices, Prompt
from value_aware_attention.decoding.kept_layer import GrowingLayer, KeptLayer
from value_aware_attention.files import new_file, reading, with_checksum, without_checksum

FORMAT = 1
"""Version of the file format"""
HEADER = "value_aware_attention"
"""Name of the only entry of a file's metadata: safetensors writes several in no fixed order"""
OF_WINDOWS = ("keys", "values", "cumulative_length")
"""Attributes that make a layer with a window"""
OF_ANY_MODEL = PreTrainedConfig().to_dict().keys() - {"model_type"} | {"use_cache"}
"""Entries of a config that do not change what a cache holds"""

_hashes: WeakKeyDictionary[PreTrainedModel, tuple[Sequence[object], str]] = WeakKeyDictionary()


class LoadedCache(DynamicCache):
    """Holds a context that was read from a file.

    Attributes:
        asked: The method that chose the keys and its options, as text.
        attention_mask: 1 for each token that the cache has seen, 0 for padding. The mask of a call
            is this one, then a column for each new token.
    """

    asked: str
    attention_mask: Int[Tensor, "B M"]


@dataclass(frozen=True)
class _Made(Choices):
    """Stands for choices that were made before a context was saved."""

    asked: str

    def __post_init__(self) -> None:
        """Checks nothing, because there is no method."""

    def __str__(self) -> str:
        return self.asked

    def of_prompt(self, lengths: Sequence[int]) -> NoReturn:
        raise ValueError(
            "within load_compressed a model reads the loaded cache alone; give it as "
            "past_key_values, or open compressed_cache to read another prompt"
        )


def save_compressed(cache: Cache, path: Path | str) -> None:
    """Saves a cache that was compressed in the open `compressed_cache`, for `load_compressed`.

    The safetensors file holds all kept keys, values, positions, counts and log-weights, all later
    keys, and layers with windows as they are. It names the method and its options as text, and the
    model by its config, its dtype and the sha256 of its weights. The same cache gives the same
    bytes. The file appears whole or not at all.

    Raises ValueError for a cache without compressed layers, for one with `every`, whose later
    choices need the method, and for one that a call has left half read; DiskFull if there is no
    space left.
    """
    context = _context_of(cache)
    states = [_state(place, layer) for place, layer in enumerate(cache.layers)]
    tensors = {
        f"{place}.{name}": x.detach().cpu().clone(memory_format=torch.contiguous_format)
        for place, state in enumerate(states)
        for name, x in state.items()
        if isinstance(x, Tensor)
    }
    header = {
        "format": FORMAT,
        "asked": str(context.choices),
        "model": _identity(context.model),
        "layers": [
            {name: x for name, x in state.items() if not isinstance(x, Tensor)} for state in states
        ],
        "sha256": _digest(tensors),
    }
    with new_file(path) as partial:
        save_file(tensors, partial, {HEADER: with_checksum(json.dumps(header))})


@contextmanager
def load_compressed(path: Path | str, model: PreTrainedModel) -> Iterator[LoadedCache]:
    """Loads a cache that `save_compressed` wrote; `model` can read it within the context.

        with hugging_face.load_compressed("context.safetensors", model) as cache:
            model.generate(**question, past_key_values=copy.deepcopy(cache))

    Logits are those of the cache that was saved. The prompt is not read, and no code that the file
    names is run. A question goes into the cache, so each starts from a copy; a batch of questions
    needs `cache.batch_repeat_interleave`.

    Raises ValueError for a model with another config, dtype or other weights, for a file that is
    damaged, foreign or of a newer format, and where `compressed_cache` cannot be opened. Within the
    context, another cache that the model would fill is refused.
    """
    header, tensors = _read(path)
    context = Compression(model, _Made(_Made.of_prompt, 1.0, {}, header["asked"]))
    _check_model(path, header["model"], _identity(model))
    with reading(path, "save the context again"):
        cache = _loaded(header, tensors, context)
    with context.opened():
        yield cache


def _context_of(cache: Cache) -> Compression:
    """Returns the context that compressed or loaded a cache, and reports that its keys are used.

    Raises ValueError if there is no such context, or if layers have seen different tokens.
    """
    layers = cache.layers if isinstance(cache, Cache) else []
    readers = [x.is_read for x in layers if isinstance(x, KeptLayer) and x.is_filled]
    owner = getattr(readers[0], "__self__", None) if readers else None
    context = owner.context if isinstance(owner, Prompt) else owner
    if not isinstance(context, Compression):
        raise ValueError(
            f"cache is {described(cache)} without compressed layers; it must be one that a model "
            f"filled within compressed_cache"
        )
    if len({layer.get_seq_length() for layer in layers}) > 1:
        raise ValueError("a call that was interrupted has left this cache half read; fill a new one")
    if isinstance(owner, Prompt) and owner.report is not None:
        owner.report.was_read = True
    return context


def _state(place: int, layer: object) -> dict[str, Any]:
    """Returns all tensors and numbers of a layer; ValueError for one that cannot be saved."""
    if isinstance(layer, GrowingLayer):
        raise ValueError(
            f"every is {layer.every}; later choices need the method, which a file does not hold: "
            f"every=None"
        )
    if isinstance(layer, KeptLayer):
        return layer.state()
    if type(layer) is DynamicSlidingWindowLayer:
        return {name: getattr(layer, name) for name in OF_WINDOWS}
    raise ValueError(
        f"layer {place} is a {type(layer).__name__}; only compressed layers and layers with "
        f"windows are saved"
    )


def _read(path: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads the header and the tensors of a file; ValueError if they are not as written."""
    with reading(path, "save the context again"), safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(HEADER)
        if text is None:
            raise ValueError(f"{path} is no compressed context that save_compressed wrote")
        header = json.loads(text)
        if header["format"] > FORMAT:
            raise ValueError(
                f"{path} has the format {header['format']}; this version reads up to {FORMAT}: "
                f"install a newer value-aware-attention"
            )
        header = without_checksum(header)
        # copies, because tensors in a mapped file change with it and are not aligned
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        if _digest(tensors) != header["sha256"]:
            raise ValueError("it has changed since it was written")
    return header, tensors


def _loaded(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], context: Compression
) -> LoadedCache:
    """Makes a cache of what was read, each layer on the device of its module."""
    cache = LoadedCache(config=context.model.config)
    modules = {module.layer_idx: module for module in context.numbers}
    for place, numbers in enumerate(header["layers"]):
        device = next(modules[place].parameters()).device
        state = numbers | {
            name.partition(".")[2]: x.to(device)
            for name, x in tensors.items()
            if name.startswith(f"{place}.")
        }
        if "prefix" in numbers:
            cache.layers[place] = kept = KeptLayer.of_state(state, context.reads)
        else:
            cache.layers[place].lazy_initialization(state["keys"], state["values"])
            for name in OF_WINDOWS:
                setattr(cache.layers[place], name, state[name])
    visible = kept.counts.new_ones(len(kept.counts), 1, 1, kept.prefix)
    visible = visible if kept.visible is None else kept.visible.long()
    cache.asked = header["asked"]
    cache.attention_mask = pad(visible[:, 0, 0], (0, kept.later), value=1)
    return cache


def _check_model(path: Path | str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises ValueError if a context was saved with another model."""
    for name in {**here, **saved}:
        if saved.get(name) != here.get(name):
            raise ValueError(
                f"{path} was saved with another model: its {name} is {saved.get(name)!r}, this "
                f"model's is {here.get(name)!r}"
            )


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """Returns what identifies a model: its decoder's config, its dtype, and a hash of its weights.

    A hash is computed again if weights were replaced or changed in place; changes of `.data` are
    not noticed.
    """
    config = json.loads(model.config.get_text_config(decoder=True).to_json_string(use_diff=False))
    weights = model.state_dict()
    state = [(x.data_ptr(), x.is_inference() or x._version) for x in weights.values()]
    if _hashes.get(model, ((), ""))[0] != state:
        _hashes[model] = state, _digest(weights)
    names = [x for x in config if x not in OF_ANY_MODEL and not x.endswith("_token_id")]
    return {name: config[name] for name in names} | {
        "dtype": str(model.dtype), "sha256 of the weights": _hashes[model][1],
    }  # fmt: skip


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of the names, types, shapes and bytes of tensors."""
    digest = sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
