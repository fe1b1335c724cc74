"""Gives a trained Hugging Face model another attention, for a while or for good.

    with hugging_face.replace_attention(model, approximations.OptimalValueOblivious(16)):
        logits = model(**batch).logits

`docs/hugging-face.md` lists the architectures, and the options that are refused.
"""

from value_aware_attention.hugging_face.adapter import replace_attention
from value_aware_attention.hugging_face.attending import set_attention
from value_aware_attention.hugging_face.check import check_cache
from value_aware_attention.hugging_face.compressed import CompressedGeneration, compressed_cache
from value_aware_attention.hugging_face.layers import attention_layers, own_kernel

__all__ = [
    "CompressedGeneration",
    "attention_layers",
    "check_cache",
    "compressed_cache",
    "own_kernel",
    "replace_attention",
    "set_attention",
]
