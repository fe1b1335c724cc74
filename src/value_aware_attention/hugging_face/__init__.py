"""Replaces the attention of a Hugging Face model, within a context or permanently.

    with hugging_face.replace_attention(model, approximations.OptimalValueOblivious(16)):
        logits = model(**batch).logits

`docs/hugging-face.md` lists the supported architectures and the refused options.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from value_aware_attention.hugging_face.adapter import replace_attention
from value_aware_attention.hugging_face.attending import set_attention
from value_aware_attention.hugging_face.layers import attention_layers, own_kernel

if TYPE_CHECKING:  # from packages that import this one
    from value_aware_attention.decoding.check import check_cache
    from value_aware_attention.decoding.compressed import CompressedGeneration, compressed_cache
    from value_aware_attention.decoding.reading import logits_after
    from value_aware_attention.decoding.saved import load_compressed, save_compressed
    from value_aware_attention.models.checkpoints import load_model, load_tokenizer

__all__ = [
    "CompressedGeneration",
    "attention_layers",
    "check_cache",
    "compressed_cache",
    "load_compressed",
    "load_model",
    "load_tokenizer",
    "logits_after",
    "own_kernel",
    "replace_attention",
    "save_compressed",
    "set_attention",
]

_ABOVE = {  # from packages that import this one
    "CompressedGeneration": "decoding.compressed",
    "check_cache": "decoding.check",
    "compressed_cache": "decoding.compressed",
    "load_compressed": "decoding.saved",
    "load_model": "models.checkpoints",
    "load_tokenizer": "models.checkpoints",
    "logits_after": "decoding.reading",
    "save_compressed": "decoding.saved",
}


def __getattr__(name: str) -> Any:
    """Imports names of other packages on first access."""
    if name in _ABOVE:
        return getattr(import_module(f"value_aware_attention.{_ABOVE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
