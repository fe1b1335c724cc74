"""Loads any language model with its tokenizer: from a local folder, or by its name on the hub."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from value_aware_attention.hugging_face.hub import local_folder, only_local, why_not
from value_aware_attention.hugging_face.saved import check_files
from value_aware_attention.models import TrainedAttention  # and its model types, registered
from value_aware_attention.storage import reading

__all__ = ["auto_class", "load_model", "load_tokenizer"]

VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "tekken.json")
"""What a folder with a tokenizer holds at least one of."""


def load_model(name: str, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A local folder's model, or one of the hub, on the CPU, in evaluation mode.

    Its kind is what its config's `architectures` says: a masked LM, a causal LM, otherwise the
    model without a head. Only safetensors are read and no code of the checkpoint is run. `dtype`
    None is the checkpoint's own. Raises FileNotFoundError or OSError where there is none,
    ValueError for a model trained with an approximation.
    """
    folder = local_folder(name)
    if folder is not None:
        check_files(folder)
    try:
        with reading(name, "give a whole one"):
            return _loaded(name, dtype or "auto")
    except OSError as error:
        raise OSError(f"{name} cannot be loaded: {why_not(name, error)}") from None


def _loaded(name: str, dtype: Any) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": only_local(name), "trust_remote_code": False}
    config = AutoConfig.from_pretrained(name, **options)
    if attention := TrainedAttention.of(config):
        raise ValueError(
            f"{name} was trained with {attention}; give a model trained with exact attention"
        )
    model: PreTrainedModel = auto_class(config, (config.architectures or [""])[0]).from_pretrained(
        name, config=config, use_safetensors=True, dtype=dtype, **options
    )
    return model


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, or of a model of the hub. Raises where there is none."""
    folder = local_folder(name)
    if folder is not None and not any(any(folder.glob(file)) for file in VOCABULARIES):
        raise FileNotFoundError(f"{name} has no tokenizer: give tokenizer=FOLDER, one that has")
    if folder is not None:
        check_files(folder)
    try:
        with reading(name, "give a whole one"):
            return AutoTokenizer.from_pretrained(
                name, local_files_only=only_local(name), trust_remote_code=False
            )
    except OSError as error:
        raise OSError(f"{name} cannot be loaded: {why_not(name, error)}") from None


def auto_class(config: PreTrainedConfig, architecture: str) -> Any:
    """The AutoModel class under which transformers lists this architecture of the config's type."""
    for mapping, found in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM),
    ):
        listed: Any = mapping.get(type(config), ())
        classes = listed if isinstance(listed, tuple) else (listed,)
        if architecture in [model.__name__ for model in classes]:
            return found
    return AutoModel
