"""Saves compressed contexts as files, and loads them without reading their prompts again."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from value_aware_attention.decoding.compressed import Compression
from value_aware_attention.decoding.filling import Prompt
from value_aware_attention.decoding.kept_layer import KeptLayer
from value_aware_attention.decoding.pages import Pages
from value_aware_attention.files import new_file, reading, with_checksum, without_checksum
from value_aware_attention.hugging_face.layers import layer_kernel

FORMAT = 2  # version of the file format; keys in int8 came with 2
HEADER = "value_aware_attention"  # a single entry of metadata, since several have no fixed order
# what a layer consists of, and the pages of some layers
LAYER_STATE: dict[type, tuple[str, ...]] = {
    KeptLayer: ("prefix", "slots", "keys", "values", "counts", "bias", "indices", "visible"),
    DynamicSlidingWindowLayer: ("keys", "values", "cumulative_length"),
    Pages: tuple(field.name for field in fields(Pages)),
}
# entries of a config that change nothing in a cache
OF_ANY_MODEL = PreTrainedConfig().to_dict().keys() - {"model_type"} | {"use_cache"}

_hashes: WeakKeyDictionary[PreTrainedModel, tuple[object, str]] = WeakKeyDictionary()


def save_compressed(cache: Cache, path: Path | str) -> None:
    """Saves a cache that was compressed in the open `compressed_cache`, for `load_compressed`.

    The safetensors file holds all kept keys, values, positions, counts and log-weights, all later
    keys, and layers with windows as they are. It has the method and its options as text, and
    identifies the model by its config, its dtype and the sha256 of its weights. The same cache
    gives the same bytes. The file appears whole or not at all.

    Raises ValueError for a cache without compressed layers; with `every`, whose later choices need
    the method; with layers other than full attention and windows; and after an interrupted call.
    Raises DiskFull if there is no space left.
    """
    prompt = _prompt_of(cache)
    states = [_state(place, layer) for place, layer in enumerate(cache.layers)]
    tensors = {
        f"{place}.{name}": x.detach().cpu().clone(memory_format=torch.contiguous_format)
        for place, state in enumerate(states)
        for name, x in state.items()
        if isinstance(x, Tensor)
    }
    header = {
        "format": FORMAT,
        "asked": str(prompt.context.asked),
        "model": _identity(prompt.context.model),
        "layers": [
            {name: x for name, x in state.items() if not isinstance(x, Tensor)} for state in states
        ],
        "sha256": _digest(tensors),
    }
    if prompt.report is not None:
        prompt.report.was_read = True
    with new_file(path) as partial:
        save_file(tensors, partial, {HEADER: with_checksum(json.dumps(header))})


@contextmanager
def load_compressed(path: Path | str, model: PreTrainedModel) -> Iterator[DynamicCache]:
    """Loads a cache that `save_compressed` wrote; `model` can read it within the context.

        with hugging_face.load_compressed("context.safetensors", model) as cache:
            model(question, past_key_values=copy.deepcopy(cache))

    The logits equal those of the saved cache. The prompt is not read, and no code that the file
    names is run. A call adds its tokens to the cache, so each question starts from a copy; a batch
    of questions needs `batch_repeat_interleave` of a copy. The cache has two more attributes:
    `asked`, the method and its options as text, and `attention_mask` (texts, tokens seen), 0 for
    padding, to which the mask of a call adds a column for each new token.

    Raises ValueError for a model with another config, dtype or other weights, for a file that is
    damaged, foreign or of a newer format, and if `compressed_cache` cannot be opened. Within the
    context, any other cache raises it too.
    """
    header, tensors = _read(path)
    context = Compression(model, header["asked"])
    for name, here in _identity(model).items():
        if (there := header["model"].get(name)) != here:
            raise ValueError(
                f"{path} was saved with another model: its {name} is {there!r}, this model's is "
                f"{here!r}"
            )
    with reading(path, "save the context again"):
        cache = _loaded(header, tensors, context)
    with context.opened():
        yield cache


def _prompt_of(cache: Cache) -> Prompt:
    """Returns the prompt of a cache's first compressed layer; ValueError for other caches."""
    layers: Any = cache.layers if isinstance(cache, Cache) else []
    prompt = next(
        (
            getattr(layer.is_read, "__self__", None)
            for layer in layers
            if isinstance(layer, KeptLayer) and layer.is_filled
        ),
        None,
    )
    if not isinstance(prompt, Prompt) or len({layer.get_seq_length() for layer in layers}) > 1:
        raise ValueError(
            f"cache is a {type(cache).__name__}; it must have layers that were compressed within "
            f"compressed_cache, and all its layers must have read the same tokens"
        )
    return prompt


def _state(place: int, layer: object) -> dict[str, Any]:
    """Returns the parts of a layer; ValueError for a kind of layer that is not saved."""
    if type(layer) not in LAYER_STATE:
        raise ValueError(
            f"layer {place} is a {type(layer).__name__}; compressed layers and layers with windows "
            f"are saved, and only without `every`, since with `every` later choices need the method"
        )
    pages = getattr(layer, "pages", None)
    return {name: getattr(layer, name) for name in LAYER_STATE[type(layer)]} | {
        f"pages.{name}": getattr(pages, name) for name in LAYER_STATE[Pages] if pages
    }


def _read(path: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads the header and the tensors of a file; ValueError if they are not as written."""
    with reading(path, "save the context again"), safe_open(path, "pt") as file:
        if (text := (file.metadata() or {}).get(HEADER)) is None:
            raise ValueError(f"{path} is no compressed context that save_compressed wrote")
        header = json.loads(text)
        if header["format"] > FORMAT:
            raise ValueError(
                f"{path} has the format {header['format']}; this version reads up to {FORMAT}: "
                f"install a newer value-aware-attention"
            )
        # copies, because tensors of a mapped file change with it, and lie at any address
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        header = without_checksum(header)
        if _digest(tensors) != header["sha256"]:
            raise ValueError("it has changed since it was written")
    return header, tensors


def _loaded(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], context: Compression
) -> DynamicCache:
    """Makes a cache of what was read, each layer on the device of its module."""
    cache = DynamicCache(config=context.model.config)
    modules: dict[Any, Any] = {module.layer_idx: module for module in context.numbers}
    for place, state in enumerate(header["layers"]):
        device = next(modules[place].parameters()).device
        state |= {
            name.partition(".")[2]: x.to(device)
            for name, x in tensors.items()
            if name.startswith(f"{place}.")
        }
        if "prefix" in state:
            chosen = cache.layers[place] = KeptLayer.__new__(KeptLayer)
            pages = {name: state.get(f"pages.{name}") for name in LAYER_STATE[Pages]}
            chosen.pages, chosen.room = Pages(**pages) if "pages.key" in state else None, None
            chosen.is_read = Prompt(context, modules[place], layer_kernel(modules[place])).reads
        layer: Any = cache.layers[place]
        layer.lazy_initialization(state["keys"], state["values"])
        vars(layer).update({name: state[name] for name in LAYER_STATE[type(layer)]})
    ones = chosen.counts.new_ones(len(chosen.counts), chosen.prefix)
    is_token = ones if chosen.visible is None else chosen.visible[:, 0, 0].long()
    vars(cache).update(
        asked=header["asked"], attention_mask=pad(is_token, (0, chosen.later), value=1)
    )
    return cache


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the config of a model's decoder, its dtype, and a hash of its weights.

    The hash is computed once, and again after weights were replaced or changed in place; changes of
    `.data` are not noticed.
    """
    config, weights = model.config.get_text_config(decoder=True), model.state_dict()
    state = [(x.data_ptr(), x.is_inference() or x._version) for x in weights.values()]
    if model not in _hashes or _hashes[model][0] != state:
        _hashes[model] = state, _digest(weights)
    return {
        name: entry
        for name, entry in json.loads(config.to_json_string(use_diff=False)).items()
        if name not in OF_ANY_MODEL and not name.endswith("_token_id")
    } | {"dtype": str(model.dtype), "sha256 of the weights": _hashes[model][1]}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of the names, dtypes, shapes and bytes of tensors."""
    shapes = [(name, str(x.dtype), tuple(x.shape)) for name, x in sorted(tensors.items())]
    digest = sha256(repr(shapes).encode())
    for name, *_ in shapes:
        digest.update(tensors[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
