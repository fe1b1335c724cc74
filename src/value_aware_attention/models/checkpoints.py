"""Loads a language model with its tokenizer: from a folder, a GGUF file, or by its hub name."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from value_aware_attention.hugging_face.layers import CLASSES, auto_class, class_names
from value_aware_attention.hugging_face.saved import (
    check_files,
    check_weights,
    gguf_file,
    installed,
    local_folder,
    only_local,
    why_not,
    without_report,
)
from value_aware_attention.models import TrainedAttention  # and its model types, registered


def load_model(name: str, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Loads the model of a local folder, a GGUF file or the hub, on the CPU, in evaluation mode.

    `package:NAME/PATH` is a folder or file of an installed package; names of `named_models` are
    known too. The config's `architectures` decides the kind: a masked LM, a causal LM, or else the
    model without a head. Only safetensors are read, and no code of the checkpoint is run. `dtype`
    None is the checkpoint's own. A GGUF file, or a folder with a GGUF file as its only weights,
    holds a causal LM. Its weights are dequantised to float32 (None) or `dtype`; every part of it is
    used, or refused by name. Raises FileNotFoundError or OSError if there is no model. Raises
    ValueError for a model that cannot be loaded or was trained with an approximation, a config
    without the model's class, and weights that do not match the config.
    """
    name = str(installed(name))
    if file := gguf_file(name):
        with _loading(file), without_report():
            from value_aware_attention.models.gguf_files import load_gguf  # needs the package gguf

            model, report = load_gguf(file, dtype or torch.float32)
        check_weights(file, model, report)
        return cast(PreTrainedModel, model)
    if folder := local_folder(name):
        check_files(folder)
    options: dict[str, Any] = {"local_files_only": only_local(name), "trust_remote_code": False}
    with _loading(name):
        config = AutoConfig.from_pretrained(name, **options)
    if attention := TrainedAttention.of(config):
        raise ValueError(
            f"{name} was trained with {attention}; give a model trained with exact attention"
        )
    build = auto_class(config, _architecture(name, config))
    config.return_dict = True  # transformers' own models require it
    if config._attn_implementation not in (None, "sdpa", "eager"):
        config._attn_implementation = "eager"  # others may need a package or a GPU
    with _loading(name), without_report():
        model, report = build.from_pretrained(
            name, config=config, use_safetensors=True, dtype=dtype or "auto",
            output_loading_info=True, ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    check_weights(name, model, report, drawn=("pooler",) if build is AutoModel else ())
    return model


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder, a GGUF file or the hub; OSError if there is none."""
    name = installed(name)
    if file := gguf_file(name):
        with _loading(file):
            from value_aware_attention.models.gguf_tokenizers import load_gguf_tokenizer

            return load_gguf_tokenizer(file)
    if folder := local_folder(name):
        if not any(
            any(folder.glob(file))
            for file in ("tokenizer.json", "vocab.*", "*.model", "tekken.json")
        ):
            raise FileNotFoundError(
                f"{name} has no tokenizer: give a folder that has one (option tokenizer)"
            )
        check_files(folder)
    with _loading(name):
        return AutoTokenizer.from_pretrained(
            name, local_files_only=only_local(name), trust_remote_code=False
        )


@contextmanager
def _loading(name: str | Path) -> Iterator[None]:
    """Explains in one line why transformers fails to load a model or tokenizer."""
    try:
        yield
    except MemoryError:
        raise
    except OSError as error:
        raise OSError(f"{name} cannot be loaded: {why_not(name, error)}") from None
    except Exception as error:  # a config may raise any kind, a tokenizer Rust's
        if str(error).startswith(f"{name} "):  # raised for one of our models
            raise
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{name} needs code of its own, which is not run: give a model that transformers "
                f"itself has"
            ) from error
        lacking = "it has no " if isinstance(error, KeyError) else ""
        reason = f"{lacking}{' '.join(str(error).split())}" or type(error).__name__
        raise ValueError(f"{name} cannot be loaded: {reason}") from error


def _architecture(name: str, config: PreTrainedConfig) -> str:
    """Returns the class name in the config; ValueError if there is none."""
    saved = config.architectures
    first = saved[0] if isinstance(saved, list) and saved else None
    names = [
        model
        for mapping in (*CLASSES.values(), MODEL_MAPPING)
        for model in class_names(mapping, config)
    ]
    other = getattr(transformers, first, None) if isinstance(first, str) else None
    if first not in names and getattr(other, "config_class", None) is not type(config):
        raise ValueError(
            f"{name}: architectures is {json.dumps(saved)} in config.json; it must be a list with "
            f"the class that was saved, such as {' or '.join(dict.fromkeys(names))}"
        )
    return str(first)


def checkpoint_files(name: str) -> list[Path]:
    """Lists the config and weights that `load_model` reads; for a GGUF model, its file."""
    name = str(installed(name))
    if file := gguf_file(name):
        return [file]
    config: Any = cached_file(name, "config.json", local_files_only=True)
    return [Path(config), *sorted(Path(config).parent.glob("*.safetensors"))]
